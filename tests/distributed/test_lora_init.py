"""PiSSA, OLoRA and LoftQ: adapters and base as PEFT makes them, trained, saved, resumed and merged.

PEFT's LoftQ runs on a GPU only, so here its rounds are done with PEFT's decomposition and the ops of
bitsandbytes.
"""

from __future__ import annotations

import json

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.export.merge import merge_adapter
from tests.distributed.test_load_and_save import train_and_save
from tests.distributed.test_parity import STEPS, assert_equal_run, train_cases
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tiny import (
    RANK,
    SEED,
    TARGETS,
    padded_batch,
    reference_model,
    reference_run,
    save_tiny,
)

PLACES = [
    dict(sharding_strategy="full_shard"),
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="full_shard", use_cpu_offload=True),
]
ALPHA = 8  # of train_cases, so scaling is 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def peft_model(folder: str, kind: str, **more):
    """The model as PEFT makes it on plain weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = dict(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS,
        init_lora_weights=kind,
    )
    return get_peft_model(model, LoraConfig(**settings | more)).train()


def layers_of(model) -> dict[str, dict[str, torch.Tensor]]:
    """A, B and the frozen weight of each adapted layer of a PEFT model."""
    return {
        n: dict(
            a=m.lora_A["default"].weight.detach(),
            b=m.lora_B["default"].weight.detach(),
            base=m.get_base_layer().weight.detach(),
        )
        for n, m in model.named_modules()
        if hasattr(m, "lora_A")
    }


def built_layers(folder: str, cases: list[dict]) -> list[dict]:
    """A, B and the frozen weight, as numbers, of each adapted layer, gathered."""
    from fsdp_qlora.adapters import LoraLinear
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.quantization.formats import FrozenWeight

    found = []
    for case in cases:
        model = build_model(
            RunConfig(
                **dict(
                    model_name=folder, precision="fp32", lora_rank=RANK, lora_alpha=ALPHA, seed=SEED
                )
                | case
            ),
            torch.device("cpu"),
        )
        found.append({})
        for name, m in model.named_modules():
            if not isinstance(m, LoraLinear):
                continue
            w = FrozenWeight.of(m.base_layer)
            weight, absmax = (t if t is None else full_tensor(t.detach()) for t in w[:2])
            whole = FrozenWeight(weight, absmax, *w.form).dense(torch.float32)
            found[-1][name] = dict(
                a=full_tensor(m.lora_A["default"].weight.detach()).clone(),
                b=full_tensor(m.lora_B["default"].weight.detach()).clone(),
                base=whole.clone(),
            )
    return found


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes' NF4 of a weight stands for."""
    return dequantize_4bit(*quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4"))


def assert_same_rounding(found: torch.Tensor, expected: torch.Tensor):
    """Equal but for a value in thousands that lies between two numbers of the format."""
    assert ((found - expected).abs() > 1e-5).float().mean() < 2e-3


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_pissa_and_olora_take_out_of_the_base_what_peft_does(folder, world_size):
    cases = [
        dict(init_lora_weights=kind, train_type=t) | place
        for kind in ("pissa", "olora")
        for t in ("lora", "qlora")
        for place in PLACES[: world_size + 1]
    ]
    results = run_ranks(built_layers, world_size, folder, cases)
    for case, *by_rank in zip(cases, *results, strict=True):
        expected = layers_of(peft_model(folder, case["init_lora_weights"]))
        for found in by_rank:
            assert found.keys() == expected.keys()
            for name, layer in expected.items():
                torch.testing.assert_close(found[name]["a"], layer["a"], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(found[name]["b"], layer["b"], rtol=1e-5, atol=1e-5)
                if case["train_type"] == "qlora":
                    assert_same_rounding(found[name]["base"], in_nf4(layer["base"]))
                else:
                    torch.testing.assert_close(
                        found[name]["base"], layer["base"], rtol=0, atol=1e-6
                    )


def test_a_fast_svd_takes_out_nearly_as_much_as_the_exact_one(folder):
    cases = [
        dict(init_lora_weights=kind, train_type="lora") for kind in ("pissa", "pissa_niter_16")
    ]
    exact, fast = run_ranks(built_layers, 2, folder, cases)[0]
    for name, layer in exact.items():
        part, near = (each[name]["b"] @ each[name]["a"] for each in (exact, fast))
        assert layer["base"].norm() < fast[name]["base"].norm() < 1.01 * layer["base"].norm(), name
        torch.testing.assert_close(
            fast[name]["base"] + 2 * near, layer["base"] + 2 * part, rtol=0, atol=1e-6
        )


def peft_loftq(weight: torch.Tensor, rounds: int) -> tuple[torch.Tensor, ...]:
    """B A and the base after some rounds of PEFT's `loftq_init`."""
    rest = weight.clone()
    for _ in range(rounds):
        base = in_nf4(rest)
        found = _low_rank_decomposition(weight - base, RANK)
        rest = weight - found["L"] @ found["R"]
    return found["L"] @ found["R"], base


def test_loftq_rounds_and_corrects_as_peft_does_whatever_the_scaling(folder):
    weights = {n: m["base"] for n, m in layers_of(peft_model(folder, True)).items()}
    cases = [
        dict(init_lora_weights="loftq", loftq_iter=rounds, lora_alpha=alpha) | place
        for rounds in (1, 3)
        for alpha in (RANK, 16)
        for place in PLACES[:2]
    ]
    for case, found in zip(cases, run_ranks(built_layers, 2, folder, cases)[0], strict=True):
        for name, weight in weights.items():
            part, base = peft_loftq(weight, case["loftq_iter"])
            layer = found[name]
            ours = layer["b"] @ layer["a"] * (case["lora_alpha"] / RANK)
            assert_same_rounding(layer["base"], base)
            # A value rounded another way in round 1 moves the rest a little in later rounds.
            tolerance = 1e-5 if case["loftq_iter"] == 1 else 0.05
            assert (ours - part).norm() < tolerance * part.norm(), (case, name)
            assert (layer["base"] + ours - weight).norm() < (base - weight).norm(), (case, name)


@pytest.mark.slow
def test_other_formats_begin_nearer_to_the_original_than_without(folder):
    forms = [
        dict(quant="int8"),
        dict(quant="hqq", n_bits=2),
        dict(quant="fp4", absmax_dtype="int8"),
    ]
    weights = {n: m["base"] for n, m in layers_of(peft_model(folder, True)).items()}
    for kind in ("loftq", "pissa"):
        cases = [form | dict(init_lora_weights=k) for form in forms for k in ("default", kind)]
        results = run_ranks(built_layers, 2, folder, cases)[0]
        for plain, ours in zip(results[::2], results[1::2], strict=True):

            def error(found):
                return sum(
                    (m["base"] + 2 * m["b"] @ m["a"] - weights[n]).norm() for n, m in found.items()
                )

            assert error(ours) < error(plain)


@pytest.mark.parametrize("kind", [rest("pissa"), slow("olora")])
def test_training_equals_pefts_in_one_process(folder, kind):
    variations = [
        *PLACES,
        dict(adapter="dora"),
        dict(use_gradient_checkpointing=False),
        dict(use_rslora=True, lora_alpha=4),
        dict(lora_rank_pattern="q_proj=2,down_proj=8"),
    ]
    cases = [dict(train_type="lora", init_lora_weights=kind) | v for v in variations]
    more = [
        {},
        {},
        {},
        dict(use_dora=True),
        {},
        dict(use_rslora=True, lora_alpha=4),
        dict(rank_pattern=dict(q_proj=2, down_proj=8)),
    ]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    for case, settings, result in zip(cases, more, results, strict=True):
        assert_equal_run(
            result, reference_run(peft_model(folder, kind, **settings), STEPS), 2e-5, case
        )


# ---- saved -------------------------------------------------------------------------------------

SAVED = [
    dict(),
    dict(sharding_strategy="ddp"),
    dict(use_rslora=True),
    dict(adapter="dora"),
    dict(lora_rank_pattern="q_proj=2", lora_alpha_pattern="v_proj=3"),
]


def logits_of(model, steps) -> torch.Tensor:
    batch = padded_batch(steps[0])
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.parametrize("kind", ["pissa", slow("olora")])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_saved_adapter_fits_the_original_base_in_plain_peft(folder, tmp_path, world_size, kind):
    cases = [dict(train_type="lora", init_lora_weights=kind) | case for case in SAVED]
    logits = run_ranks(train_and_save, world_size, folder, str(tmp_path), cases, STEPS[:2])[0]
    for i, (case, live) in enumerate(zip(cases, logits, strict=True)):
        config = json.loads((tmp_path / str(i) / "adapter_config.json").read_text())
        assert config["r"] == 2 * RANK and config["init_lora_weights"] is True
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = logits_of(PeftModel.from_pretrained(base, tmp_path / str(i)), STEPS)
        torch.testing.assert_close(found, live, rtol=1e-5, atol=2e-5, msg=str(case))
        assert (
            found - logits_of(peft_model(folder, True), STEPS)
        ).abs().max() > 0.01  # it was trained


def test_a_loftq_adapter_is_for_the_base_in_4_bits_as_bitsandbytes_has_it(folder, tmp_path):
    cases = [dict(init_lora_weights="loftq", sharding_strategy=s) for s in ("full_shard", "ddp")]
    logits = run_ranks(train_and_save, 2, folder, str(tmp_path), cases, STEPS[:2])[0]
    for i, live in enumerate(logits):
        base = reference_model(folder, "qlora").unload()
        reloaded = PeftModel.from_pretrained(base, tmp_path / str(i), is_trainable=True)
        torch.testing.assert_close(logits_of(reloaded, STEPS), live, rtol=1e-5, atol=2e-5)
        assert (
            load_file(tmp_path / str(i) / "adapter_model.safetensors")[
                "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
            ].shape[0]
            == RANK
        )


QUANTIZED = [
    dict(init_lora_weights="pissa"),
    dict(init_lora_weights="olora", adapter="dora"),
    dict(init_lora_weights="loftq", loftq_iter=2, absmax_dtype="int8"),
    dict(init_lora_weights="pissa_niter_4", quant="hqq", n_bits=3, use_rslora=True),
]


def test_a_quantized_base_is_made_again_by_merge_and_generate_as_the_adapter_knew_it(
    folder, tmp_path
):
    logits = run_ranks(train_and_save, 2, folder, str(tmp_path), QUANTIZED, STEPS[:2])[0]
    for i, (case, live) in enumerate(zip(QUANTIZED, logits, strict=True)):
        adapter, merged = tmp_path / str(i), tmp_path / f"merged-{i}"
        found = logits_of(load_for_inference(folder, adapter, dtype=torch.float32), STEPS)
        assert (found - live).norm() < 2e-3 * live.norm(), case
        merge_adapter(folder, adapter, merged, dtype="fp32")
        of_merged = logits_of(
            AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), STEPS
        )
        torch.testing.assert_close(of_merged, found, rtol=1e-4, atol=1e-4)
        original = load_for_inference(folder, adapter, "none", dtype=torch.float32)
        assert (logits_of(original, STEPS) - live).norm() > 5 * (found - live).norm(), case


# ---- resumed -----------------------------------------------------------------------------------


def checkpointed(folder: str, out: str, cases: list[dict], from_step: int | None) -> list[dict]:
    """Every parameter's bytes after one step and a checkpoint; or as it is built from that."""
    from pathlib import Path

    from fsdp_qlora.build import build_model
    from fsdp_qlora.checkpoint import saved_adapter
    from fsdp_qlora.checkpoint.folder import all_checkpoints
    from fsdp_qlora.dist import full_tensor
    from tests.distributed.test_resume import run_once, settings

    found = []
    for i, case in enumerate(cases):
        config = settings(folder, Path(out, str(i)), max_steps=1, **case)
        if from_step is None:
            run_once(config)
        (newest,) = all_checkpoints(Path(out, str(i), "checkpoints"))
        model = build_model(config, torch.device("cpu"), saved_adapter(newest))
        found.append(
            {
                n: full_tensor(p.detach()).contiguous().view(torch.uint8).clone()
                for n, p in model.named_parameters()
            }
        )
    return found


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_has_the_same_base_bit_by_bit(tmp_path):
    from tests.tokenizers import save_chat_model

    folder = save_chat_model(tmp_path / "model", hidden_size=192, intermediate_size=320)
    cases = [
        dict(train_type="lora", init_lora_weights="pissa", checkpoint_every=1),
        dict(init_lora_weights="loftq", loftq_iter=2, adapter_dtype="bf16", checkpoint_every=1),
    ]
    first = run_ranks(checkpointed, 2, folder, str(tmp_path / "out"), cases, None)[0]
    for world_size in (1, 3):
        later = run_ranks(checkpointed, world_size, folder, str(tmp_path / "out"), cases, 1)[0]
        for ours, expected in zip(later, first, strict=True):
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[n], expected[n]) for n in ours)


# ---- refused -----------------------------------------------------------------------------------


def test_weights_that_adapters_can_not_begin_from_are_refused(folder, tmp_path):
    from fsdp_qlora.build import planned_model
    from fsdp_qlora.config import RunConfig

    def refusal(model_name=folder, **settings):
        with pytest.raises(ValueError) as error:
            planned_model(
                RunConfig(**dict(model_name=str(model_name), lora_rank=RANK) | settings),
                torch.device("cpu"),
            )
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "has no 64 directions; use a --lora_rank" in refusal(
        init_lora_weights="olora", lora_rank=64
    )
    assert "add --quant nf4" in refusal(init_lora_weights="loftq", train_type="lora")
    assert "--init_lora_weights svd: choose" in refusal(init_lora_weights="svd")
    assert "--quantized_cache" in refusal(init_lora_weights="pissa", quantized_cache=str(tmp_path))
    tied = save_tiny(tmp_path / "tied", tie_word_embeddings=True)
    assert "this model's head is its embedding" in refusal(
        tied, init_lora_weights="pissa", lora_target_modules="q_proj,lm_head"
    )
    packed = reference_model(folder, "qlora").unload()
    packed.save_pretrained(tmp_path / "packed")
    assert "give the 16-bit model" in refusal(tmp_path / "packed", init_lora_weights="loftq")
