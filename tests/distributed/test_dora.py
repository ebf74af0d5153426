"""DoRA on plain and 4-bit weights, sharded: as PEFT's in one process, and saved as PEFT saves it.

Its norm needs whole rows of W + B A, which are there only while FSDP has gathered the layer.
"""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.test_load_and_save import train_and_save
from tests.distributed.test_parity import STEPS, assert_equal_run, train_cases
from tests.parts import in_parts
from tests.ranks import run_ranks
from tests.tiny import padded_batch, reference_model, reference_run, save_tiny, tiny_rows

KINDS = {"dora": dict(train_type="lora", adapter="dora"), "bnb_dora": dict(train_type="bnb_dora")}
VARIATIONS = [
    dict(),
    dict(use_gradient_checkpointing=False),
    dict(reentrant_checkpointing=True),
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="shard_grad_op"),
    dict(use_cpu_offload=True),
    dict(activation_policy="keep_linears"),
    dict(wrap_policy="attention_mlp"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def references(folder):
    return {kind: reference_run(reference_model(folder, kind), STEPS) for kind in KINDS}


@pytest.mark.parametrize("variations", in_parts(VARIATIONS, 5, then=(1, 3)))
def test_runs_equal_one_process_of_peft_with_and_without_checkpointing(
    folder, references, variations
):
    cases = [(kind, KINDS[kind] | v) for kind in KINDS for v in variations]
    by_rank = run_ranks(train_cases, 2, folder, STEPS, [case for _, case in cases])
    for (kind, case), *results in zip(cases, *by_rank, strict=True):
        assert_equal_run(results[0], references[kind], 1e-5, case)
        assert results[0]["checksums"] == results[1]["checksums"]
        moved = [w for name, w in results[0]["weights"].items() if "magnitude" in name]
        assert len(moved) == 14 and all(w.dim() == 1 for w in moved)


def test_three_ranks_with_uneven_shards_equal_one_process(folder):
    steps = tiny_rows(steps=3, rows_per_step=3, seed=5)
    (result,) = run_ranks(train_cases, 3, folder, steps, [KINDS["bnb_dora"]])[0]
    reference = reference_run(reference_model(folder, "bnb_dora"), steps)
    assert_equal_run(result, reference, 1e-5, "3 ranks")


def test_saved_magnitudes_are_whole_and_give_peft_the_live_logits(folder, tmp_path):
    cases = [
        KINDS[kind] | dict(sharding_strategy=s) for kind in KINDS for s in ("full_shard", "ddp")
    ]
    logits = run_ranks(train_and_save, 2, folder, str(tmp_path), cases, STEPS[:2])[0]
    batch = padded_batch(STEPS[0])
    inputs = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    for i, case in enumerate(cases):
        kind = case["train_type"]
        base = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            if kind == "lora"
            else reference_model(folder, kind).unload()
        )
        saved = load_file(tmp_path / str(i) / "adapter_model.safetensors")
        shapes = {
            n: tuple(t.shape) for n, t in saved.items() if n.endswith(".lora_magnitude_vector")
        }
        assert len(shapes) == 14 and set(shapes.values()) == {(64,), (32,), (128,)}
        reloaded = PeftModel.from_pretrained(base, tmp_path / str(i), is_trainable=True)
        # Not in eval mode: there bitsandbytes repacks for a CPU kernel that rounds to bf16.
        with torch.no_grad():
            found = reloaded(**inputs).logits
        torch.testing.assert_close(found, logits[i], rtol=1e-5, atol=1e-5)
