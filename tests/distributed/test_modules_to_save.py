"""Modules trained whole beside adapters: as PEFT trains its copies of them, saved as PEFT saves them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.lora_init import initial_a
from tests.distributed.test_load_and_save import train_and_save
from tests.distributed.test_lora_init import logits_of
from tests.distributed.test_parity import STEPS, assert_equal_run, train_cases
from tests.parts import in_parts, rest, slow
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, TARGETS, reference_model, reference_run, save_tiny

PLACES = [
    dict(sharding_strategy="full_shard"),
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="full_shard", use_cpu_offload=True),
    dict(sharding_strategy="shard_grad_op", use_gradient_checkpointing=False),
    dict(wrap_policy="attention_mlp", reentrant_checkpointing=True),
]
NAMES = ["lm_head", "embed_tokens", "embed_tokens,lm_head", "norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def pefts(folder: str, names: str, train_type: str = "lora", dtype=torch.float32, **more):
    """PEFT's model with copies of the modules in fp32, and our first values."""
    base = reference_model(folder, train_type, dtype)
    base = (
        base.unload()
        if train_type == "qlora"
        else AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    )
    model = get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=RANK,
            lora_alpha=8,
            target_modules=TARGETS,
            modules_to_save=names.split(","),
            **more,
        ),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.copy_(initial_a(name, SEED, p.shape))
    return model.train()


def renamed(reference):
    """A reference's weights under our names: without the copies of PEFT."""
    losses, norms, weights = reference
    return losses, norms, {n.replace(".modules_to_save.default", ""): w for n, w in weights.items()}


# All names in all places; every sixth has another name and another place.
ALL = [dict(modules_to_save=names) | place for names in NAMES for place in PLACES]


@pytest.mark.parametrize(
    "world_size, train_type, cases",
    [
        (2, "qlora", ALL[::6]),
        rest(2, "qlora", [case for i, case in enumerate(ALL) if i % 6]),
        slow(2, "lora", ALL),
        slow(1, "qlora", [case for i, case in enumerate(ALL) if i % 5 < 2]),
    ],
)
def test_training_equals_pefts_in_one_process(folder, world_size, train_type, cases):
    typed = [dict(train_type=train_type) | case for case in cases]
    results = run_ranks(train_cases, world_size, folder, STEPS, typed)
    references = {
        names: renamed(reference_run(pefts(folder, names, train_type), STEPS))
        for names in {case["modules_to_save"] for case in cases}
    }
    for case, *by_rank in zip(cases, *results, strict=True):
        assert_equal_run(by_rank[0], references[case["modules_to_save"]], 1e-5, case)
        assert len({r["checksums"][-1] for r in by_rank}) == 1


TIED = [
    dict(train_type="lora", modules_to_save=names) | place
    for names in ("lm_head", "embed_tokens,norm")
    for place in PLACES[:3]
]


@pytest.mark.parametrize("cases", in_parts(TIED, 0, 4, then=(1, 2, 3, 5)))
def test_both_ends_of_a_tied_model_are_trained_as_one(tied, cases):
    for case, result in zip(cases, run_ranks(train_cases, 2, tied, STEPS, cases)[0], strict=True):
        model = reference_model(tied, "lora")
        for name, p in model.named_parameters():
            if "embed_tokens" in name or "norm" in name and "norm" in case["modules_to_save"]:
                p.requires_grad_()
        # AdamW moves a row of no token, whose gradient is as good as zero, by its rounding.
        assert_equal_run(result, reference_run(model, STEPS), 1e-4, case)


@pytest.mark.slow
def test_dora_rslora_and_pissa_train_beside_whole_modules(folder):
    more = dict(modules_to_save="lm_head,norm", train_type="lora")
    cases = [dict(adapter="dora"), dict(use_rslora=True), dict(init_lora_weights="pissa")]
    settings = [dict(use_dora=True), dict(use_rslora=True), dict(init_lora_weights="pissa")]
    results = run_ranks(train_cases, 2, folder, STEPS, [more | case for case in cases])[0]
    for case, setting, result in zip(cases, settings, results, strict=True):
        model = pefts(folder, "lm_head,norm", **setting)
        if "pissa" in setting.values():
            model = get_peft_model(
                AutoModelForCausalLM.from_pretrained(folder),
                LoraConfig(
                    task_type="CAUSAL_LM",
                    r=RANK,
                    lora_alpha=8,
                    target_modules=TARGETS,
                    modules_to_save=["lm_head", "norm"],
                    **setting,
                ),
            )
        assert_equal_run(result, renamed(reference_run(model, STEPS)), 2e-5, case)


SAVED = [
    dict(modules_to_save=names, train_type=t) | place
    for t in ("lora", "qlora")
    for names in ("lm_head", "embed_tokens", "norm")
    for place in PLACES[:2]
]


@pytest.mark.parametrize("cases", in_parts(SAVED, 0, 9, then=(1, 2, 3, 4, 5, 6, 7, 8, 10, 11)))
def test_a_saved_folder_has_pefts_names_and_gives_peft_the_live_logits(folder, tmp_path, cases):
    logits = run_ranks(train_and_save, 2, folder, str(tmp_path), cases, STEPS[:2])[0]
    for i, (case, live) in enumerate(zip(cases, logits, strict=True)):
        reference = pefts(folder, case["modules_to_save"], case["train_type"])
        reference.save_pretrained(tmp_path / "reference")
        saved, expected = (
            load_file(tmp_path / f / "adapter_model.safetensors") for f in (str(i), "reference")
        )
        assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in expected.items()}
        base = (
            reference.unload()
            if case["train_type"] == "lora"
            else reference_model(folder, "qlora").unload()
        )
        reloaded = PeftModel.from_pretrained(base, tmp_path / str(i), is_trainable=True)
        torch.testing.assert_close(logits_of(reloaded, STEPS), live, rtol=1e-5, atol=2e-5)


def test_a_tied_model_reloads_in_peft_and_merges_into_a_tied_one(tied, tmp_path):
    cases = [dict(train_type="lora", modules_to_save=n) for n in ("lm_head", "embed_tokens")]
    logits = run_ranks(train_and_save, 2, tied, str(tmp_path), cases, STEPS[:2])[0]
    for i, live in enumerate(logits):
        base = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
        found = logits_of(PeftModel.from_pretrained(base, tmp_path / str(i)), STEPS)
        torch.testing.assert_close(found, live, rtol=1e-5, atol=2e-5)
        merge_adapter(tied, tmp_path / str(i), tmp_path / f"merged-{i}", dtype="fp32")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged-{i}", dtype=torch.float32)
        assert merged.config.tie_word_embeddings
        torch.testing.assert_close(logits_of(merged, STEPS), live, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("compiled", [False, rest(True)])
def test_a_bf16_model_computes_in_bf16_and_stores_whole_modules_in_fp32(folder, compiled):
    """Losses near those in fp32, with blocks compiled and not."""
    exact = reference_run(pefts(folder, "embed_tokens,lm_head,norm"), STEPS)
    case = dict(
        train_type="lora",
        modules_to_save="embed_tokens,lm_head,norm",
        precision="bf16",
        compile=compiled,
    )
    for result in run_ranks(train_cases, 2, folder, STEPS, [case])[0]:
        assert {w.dtype for w in result["weights"].values()} == {torch.float32}
        for ours, reference in zip(result["losses"], exact[0], strict=True):
            assert abs(ours - reference) < 0.01 * reference


def dtypes_of(folder: str, cases: list[dict]) -> list[dict]:
    """In each case what both ends of a model are stored in, and what goes into and out of the blocks."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.model.blocks import base_model, decoder_blocks, output_head

    found = []
    for case in cases:
        config = RunConfig(
            model_name=folder, device="cpu", train_type="lora", precision="bf16", **case
        )
        model, seen = build_model(config, torch.device("cpu")), {}
        ends = base_model(model).get_input_embeddings(), output_head(model)
        seen["stored"] = {end.weight.dtype for end in ends}
        decoder_blocks(model)[0].register_forward_pre_hook(
            lambda block, args, seen=seen: seen.update(blocks=args[0].dtype)
        )
        seen["logits"] = model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.dtype
        found.append(seen | dict(loss=output_head(model).compute_dtype))
    return found


def test_both_ends_of_a_tied_model_compute_in_its_dtype_whichever_is_named(tied):
    """Trained in fp32, they multiply in bf16, in the loss and in a forward that gives logits."""
    names = ("embed_tokens", "lm_head", "embed_tokens,lm_head")
    cases = [dict(modules_to_save=name) for name in names]
    expected = dict(stored={torch.float32}) | dict.fromkeys(
        ("blocks", "logits", "loss"), torch.bfloat16
    )
    assert run_ranks(dtypes_of, 1, tied, cases)[0] == [expected] * len(cases)


@pytest.mark.parametrize(
    "settings, part",
    [
        (dict(modules_to_save="lm_hea"), "did you mean lm_head"),
        (dict(modules_to_save="down_proj"), "down_proj is adapted"),
        (
            dict(modules_to_save="mlp", lora_target_modules="q_proj"),
            "quantized, or contains quantized layers",
        ),
    ],
)
def test_what_can_not_be_trained_whole_is_refused_by_name(folder, settings, part):
    from fsdp_qlora.build import planned_model
    from fsdp_qlora.config import RunConfig

    with pytest.raises(ValueError) as error:
        planned_model(RunConfig(model_name=folder, **settings), torch.device("cpu"))
    assert str(error.value).startswith("--modules_to_save ") and part in str(error.value)
