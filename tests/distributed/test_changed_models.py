"""A streamed model that is changed before its weights are read: a larger vocabulary, converted bytes."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from fsdp_qlora.loading import Checkpoint
from tests.distributed.test_other_trainers import curve, trainer
from tests.distributed.test_own_loops import message_of
from tests.ranks import run_ranks
from tests.tiny import save_tiny
from tests.tokenizers import save_chat_model

ROWS, MORE = 300, 333  # of the embedding in the files, and of a model that has been resized


def read_after_changes(folders: list[str], with_token: str, output: str) -> dict:
    """Both ends of each resized model, steps of a trainer that resizes, and what is refused."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    from fsdp_qlora import full_tensor
    from fsdp_qlora.integrations import trl
    from fsdp_qlora.integrations.streamed import shard_and_load, streamed_model

    cpu, found = torch.device("cpu"), {}
    for folder in folders:
        for quant in ("none", "nf4"):
            model = streamed_model(folder, quant)
            model.resize_token_embeddings(MORE)
            shard_and_load(model, cpu)
            ends = model.get_input_embeddings(), model.get_output_embeddings()
            found[folder, quant] = [full_tensor(end.weight.detach()).clone() for end in ends]
    rows = [
        dict(messages=[dict(role="user", content=f"{i}"), dict(role="assistant", content="hi")])
        for i in range(8)
    ]
    given = dict(chat_template_path=with_token, max_length=128, max_steps=1)
    make = partial(trainer, trl, "SFT", folders[0])
    loaded = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    for name, model, ours in (
        ("full", folders[0], dict(peft_config=None, quant="none")),
        ("ddp", loaded, dict(sharding_strategy="ddp")),
    ):
        made = make(model, output, given, rows, **ours)
        made.train()
        found[name] = len(curve(made)), made.model.get_output_embeddings().weight.shape[0]
    found["rows"] = message_of(make, folders[0], output, given, rows)

    smaller = streamed_model(folders[0], "none")
    found["smaller"] = message_of(smaller.resize_token_embeddings, 200)
    replaced = streamed_model(folders[0], "none")
    replaced.set_input_embeddings(torch.nn.Embedding(MORE, 64, device="meta"))
    found["replaced"] = message_of(shard_and_load, replaced, cpu)
    converted = prepare_model_for_kbit_training(streamed_model(folders[0], "nf4"))
    found["converted"] = message_of(shard_and_load, converted, cpu)
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_resized_model_has_means_in_its_new_rows_and_other_changes_are_refused(tmp_path):
    """The reference is what transformers' own resizing gives new rows: their mean, but for a tiny noise."""
    from transformers import AutoModelForCausalLM

    folder = save_chat_model(tmp_path / "model", vocab_size=ROWS)
    tied = save_tiny(tmp_path / "tied", vocab_size=ROWS, tie_word_embeddings=True)
    with_token = Path(shutil.copytree(folder, tmp_path / "template"))
    path = with_token / "tokenizer_config.json"
    config = json.loads(path.read_text())
    tokens = [f"<|token {i}|>" for i in range(60)]  # beyond the 300 rows
    config["extra_special_tokens"] = [*config["extra_special_tokens"], *tokens]
    path.write_text(json.dumps(config))

    results = run_ranks(read_after_changes, 2, [folder, tied], str(with_token), str(tmp_path / "o"))
    for found in results:
        for name in (folder, tied):
            plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            plain.resize_token_embeddings(MORE)
            ends = plain.get_input_embeddings(), plain.get_output_embeddings()
            for quant in ("none", "nf4"):
                for ours, end in zip(found[name, quant], ends, strict=True):
                    assert torch.equal(ours[:ROWS], end.weight[:ROWS])
                    assert torch.allclose(ours[ROWS:], end.weight[ROWS:], atol=1e-3)
        assert found["full"] == found["ddp"] == (1, 320)  # TRL's multiple of 64
        assert found["rows"].startswith("trainable_token_indices") and "ddp" in found["rows"]
        for name in ("smaller", "replaced"):
            assert "model.embed_tokens.weight has shape (300, 64)" in found[name]
        assert "prepare_model_for_kbit_training" in found["converted"]


def test_rows_behind_a_tensors_last_are_never_read(tmp_path):
    """The bytes there are those of the next tensor."""
    files = Checkpoint(save_tiny(tmp_path))
    span = files.stored["model.embed_tokens.weight"]
    assert span.rows(90, 97).shape == (7, 64)
    with pytest.raises(ValueError, match="a weight has 97 rows there and 98 or more in the model"):
        span.rows(90, 98)
