"""Tokens that a tokenizer gains: their rows begin as in transformers, are trained, saved and reload."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.config import RunConfig
from fsdp_qlora.export.merge import merge_adapter
from tests.distributed.test_lora_init import logits_of
from tests.distributed.test_resume import run_once, settings
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import tiny_rows
from tests.tokenizers import VOCAB_SIZE, save_chat_model

TOKENS = "<think>,</think>,@"
STEPS = tiny_rows(2, 4)
GROWN = VOCAB_SIZE + 2  # a byte-level tokenizer has @ already


@pytest.fixture(scope="module", params=[False, rest(True)], ids=["apart", "tied"])
def folder(request, tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), tie_word_embeddings=request.param)


def ends_of(folder: str, cases: list[dict]) -> list[dict]:
    """The embedding and the head before any step, gathered."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.dist import full_tensor

    found = []
    for case in cases:
        model = build_model(
            RunConfig(model_name=folder, precision="fp32", added_tokens=TOKENS, **case),
            torch.device("cpu"),
        )
        ends = dict(embedding=model.get_input_embeddings(), head=model.get_output_embeddings())
        assert all(end.weight.requires_grad for end in ends.values())
        found.append({n: full_tensor(end.weight.detach()).clone() for n, end in ends.items()})
    return found


def test_new_rows_begin_as_transformers_makes_them_on_any_number_of_ranks(folder):
    cases = [dict(), dict(train_type="lora", sharding_strategy="ddp"), dict(train_type="full")]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(GROWN)
    for world_size in (1, 3):
        for found in run_ranks(ends_of, world_size, folder, cases)[0]:
            for ours, theirs in (
                (found["embedding"], model.get_input_embeddings().weight),
                (found["head"], model.get_output_embeddings().weight),
            ):
                assert ours.shape == theirs.shape == (GROWN, 64)
                torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-4)
            assert torch.equal(found["embedding"][:VOCAB_SIZE], old)


def trained(folder: str, out: str) -> dict:
    """Train through the whole trainer; the live logits and what was saved are compared by the parent."""
    config = settings(folder, out, added_tokens=TOKENS, max_steps=3, checkpoint_every=2)
    run_once(config, stop_at=2)
    return run_once(config)


def test_a_run_resumes_and_its_folder_reloads_in_transformers_and_peft(folder, tmp_path):
    run_ranks(trained, 2, folder, str(tmp_path / "out"))
    adapter = tmp_path / "out" / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert len(tokenizer) == GROWN and tokenizer.encode("<think>") == [VOCAB_SIZE]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.resize_token_embeddings(len(tokenizer))
    reloaded = logits_of(PeftModel.from_pretrained(base, adapter), STEPS)
    generating = logits_of(load_for_inference(folder, adapter, "none", dtype=torch.float32), STEPS)
    assert reloaded.shape[-1] == GROWN
    torch.testing.assert_close(generating, reloaded, rtol=1e-5, atol=1e-5)
    merge_adapter(folder, adapter, tmp_path / "merged", merge_base="original", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged, STEPS), reloaded, rtol=1e-4, atol=1e-4)
    assert (
        len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == merged.config.vocab_size == GROWN
    )


def test_a_vocabulary_with_rows_to_spare_keeps_its_size(tmp_path):
    from fsdp_qlora.build import planned_model
    from tests.tiny import save_tiny
    from tests.tokenizers import save_tokenizer

    save_tiny(tmp_path, vocab_size=320)
    save_tokenizer(tmp_path)
    config = RunConfig(model_name=str(tmp_path), added_tokens=TOKENS)
    model, _ = planned_model(config, torch.device("cpu"))
    assert model.config.vocab_size == 320


def test_tokens_come_from_a_file_and_none_new_is_refused(folder, tmp_path):
    from fsdp_qlora.preflight.run_data import run_tokenizer

    (tmp_path / "tokens.txt").write_text("<a,b>\n\n<c>\n<c>\n")
    config = RunConfig(model_name=folder, added_tokens=str(tmp_path / "tokens.txt"))
    assert config.new_tokens == ["<a,b>", "<c>"] and len(run_tokenizer(config)) == VOCAB_SIZE + 2
    with pytest.raises(
        ValueError, match="--added_tokens @: the tokenizer of .* has them all already"
    ):
        run_tokenizer(RunConfig(model_name=folder, added_tokens="@"))
    for text, part in (("absent.txt", "No such file"), (",", "contains no token")):
        with pytest.raises(ValueError, match=f"--added_tokens {text}: {part}"):
            RunConfig(model_name=folder, added_tokens=text)
