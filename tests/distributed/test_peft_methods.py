"""Other methods of PEFT than LoRA under a trainer: PEFT's values over whole weights, or one line."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_other_trainers import curve, trainer
from tests.distributed.test_own_loops import message_of
from tests.distributed.test_parity import relative
from tests.parts import slow
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

STEPS = 3
COMPUTED = ["IA3", "OFT", "LOHA", "LOKR", "LN_TUNING", "FOURIERFT"]
REFUSED = ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "VERA", "ADALORA"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def method(name: str):
    """A small configuration of a method."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING as CLASSES

    layers = dict(target_modules=["q_proj", "down_proj"])
    ranks = layers | dict(r=4)
    given = dict(
        IA3=layers | dict(feedforward_modules=["down_proj"]),
        OFT=layers | dict(oft_block_size=4, r=0),
        LOHA=ranks,
        LOKR=ranks,
        LN_TUNING=dict(target_modules=["input_layernorm"]),
        FOURIERFT=layers | dict(n_frequency=8),
        VERA=dict(r=4, target_modules=["q_proj"]),
        ADALORA=layers | dict(init_r=4, target_r=2, total_step=8),
    )
    of_prompts = dict(num_virtual_tokens=4)
    return CLASSES[name](task_type="CAUSAL_LM", **given.get(name, of_prompts))


def trained(folder: str, output: str, strategy: str | None) -> dict[str, list]:
    """By method the curve over whole weights, with what it saves in `output`; plain TRL without strategy."""
    import trl as plain
    from transformers import AutoModelForCausalLM

    from fsdp_qlora.integrations import trl as ours

    found = {}
    for name in COMPUTED:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = 2 if strategy else 4
        given = dict(max_steps=STEPS, per_device_train_batch_size=rows)
        more = dict(sharding_strategy=strategy) if strategy else {}
        library = ours if strategy else plain
        made = trainer(
            library, "SFT", folder, model, output, given, peft_config=method(name), **more
        )
        made.train()
        made.save_model(f"{output}/{name}")
        found[name] = curve(made)
    return found


def refused(folder: str, output: str) -> list[str]:
    """What is said of methods that are not computed, then of those that need whole weights."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from fsdp_qlora import quantize_linears
    from fsdp_qlora.integrations import trl
    from fsdp_qlora.integrations.streamed import shard_and_load, streamed_model

    def make(model, name):
        trainer(trl, "SFT", folder, model, output, {}, peft_config=method(name))

    model = AutoModelForCausalLM.from_pretrained(folder)
    said = [message_of(make, model, name) for name in REFUSED]
    said += [message_of(make, folder, name) for name in COMPUTED]
    said.append(message_of(make, quantize_linears(model, "nf4"), "IA3"))
    adapted = get_peft_model(streamed_model(folder, "none"), method("IA3"))
    return [*said, message_of(shard_and_load, adapted, torch.device("cpu"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["full_shard", slow("ddp")])
def test_methods_over_whole_weights_train_and_save_as_in_peft(folder, tmp_path, strategy):
    (expected,) = run_ranks(trained, 1, folder, str(tmp_path / "plain"), None, timeout=600)
    for found in run_ranks(trained, 2, folder, str(tmp_path / "ranks"), strategy, timeout=600):
        for name in COMPUTED:
            assert len(found[name]) == STEPS
            assert relative(found[name], expected[name]) < 1e-5, name
    for name in COMPUTED:
        wanted, saved = (
            load_file(tmp_path / place / name / "adapter_model.safetensors")
            for place in ("plain", "ranks")
        )
        assert saved.keys() == wanted.keys(), name
        for key, value in wanted.items():
            assert (saved[key] - value).norm() < 1e-3 * value.norm() + 1e-6, key


@pytest.mark.filterwarnings("ignore")
def test_methods_that_are_not_computed_are_refused_before_anything_is_read(folder, tmp_path):
    first, second = run_ranks(refused, 2, folder, str(tmp_path))
    assert first == second
    for name, text in zip([*REFUSED, *COMPUTED, "IA3", "IA3"], first, strict=True):
        assert text.startswith(f"peft_config: {name} ") and "LoraConfig" in text, text
        assert "\n" not in text and "from_pretrained" in text
