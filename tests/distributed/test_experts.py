"""Mixtures of experts whose tokens go to few of them, and to other ones on each rank.

The reference is transformers in one process, whose experts are parameters of three dimensions.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Qwen2MoeConfig,
)

from fsdp_qlora.adapters import apply_adapters, lora_config
from fsdp_qlora.adapters.lora import trainable_parameters
from fsdp_qlora.build import planned_model
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.experts import apply_stacked_experts
from fsdp_qlora.export import save_trained
from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.lora_init import initial_a
from tests.distributed.test_parity import assert_equal_run, build_and_train, relative
from tests.families import MOE_FAMILIES, SIZES, save_family
from tests.parts import in_parts, slow
from tests.ranks import run_ranks
from tests.test_key_mapping import renamed_files
from tests.test_merge import save_adapter
from tests.tiny import SEED, reference_run, tiny_rows, with_lora

STEPS = tiny_rows(steps=2, rows_per_step=6)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = [
    dict(sharding_strategy="ddp"),
    dict(wrap_policy="attention_mlp"),
    dict(wrap_policy="min_params", min_wrap_params=9000),
    dict(use_gradient_checkpointing=False),
    dict(use_cpu_offload=True),
    dict(activation_policy="keep_linears"),
]


ADAPTED = [  # experts under LoRA, with what PEFT is told
    (dict(train_type="lora"), {}),
    (
        dict(
            train_type="lora",
            sharding_strategy="ddp",
            lora_target_parameters="experts.down_proj",
            layers_to_transform="1",
        ),
        dict(target_parameters=["model.layers.1.mlp.experts.down_proj"], layers_to_transform=[1]),
    ),
    (
        dict(train_type="lora", compile=True, lora_alpha_pattern="gate_up_proj=3"),
        dict(alpha_pattern={"gate_up_proj": 3}),
    ),
    (
        dict(train_type="qlora", lora_rank_pattern="down_proj=6", activation_policy="keep_linears"),
        dict(rank_pattern={"down_proj": 6}),
    ),
    (
        dict(
            train_type="qlora",
            use_rslora=True,
            use_cpu_offload=True,
            wrap_policy="min_params",
            min_wrap_params=9000,
        ),
        dict(use_rslora=True),
    ),
]


def train_cases(cases: list[dict], out: str) -> list[dict]:
    from fsdp_qlora.adapters.peft_names import saved_names
    from fsdp_qlora.export import save_trained

    results = []
    for i, case in enumerate(cases):
        config, model, trained = build_and_train(case, STEPS)
        results.append(trained)
        if config.lora_target_parameters:  # under the names of PEFT's own model
            weights = results[-1]["weights"]
            results[-1]["weights"] = {
                key.replace(".weight", ".default.weight"): weights[name]
                for name, key in saved_names(model).items()
            }
        if config.train_type == "full" or config.lora_target_parameters:
            with torch.no_grad():
                results[-1]["logits"] = model.eval()(input_ids=IDS).logits
            save_trained(model, f"{out}/{i}")
    return results


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 experts of which a row of at most 20 tokens goes to 40 at most."""
    return save_family(tmp_path_factory.mktemp("mixtral"), "Mixtral", num_local_experts=64)


@pytest.mark.parametrize("cases", in_parts(CASES, 0, 4))
def test_every_way_to_shard_equals_one_process_where_experts_get_no_token(folder, tmp_path, cases):
    cases = [dict(model_name=folder, train_type="lora") | case for case in cases]
    results = run_ranks(train_cases, 2, cases, str(tmp_path))
    reference = reference_run(with_lora(plain(folder), ATTENTION), STEPS)
    for case, ours, other in zip(cases, *results, strict=True):
        assert_equal_run(ours, reference, 2e-5, case)
        assert ours["checksums"] == other["checksums"], case


def test_routers_are_balanced_by_the_mean_over_micro_batches_of_what_transformers_adds(tmp_path):
    """Of three on each of two ranks, whether routers are trained or only what lies below them."""
    folder, coefficient = save_family(tmp_path / "moe", "Qwen3-MoE"), 0.5
    common = dict(model_name=folder, router_aux_loss_coef=coefficient)
    cases = [
        common | dict(train_type="full", sharding_strategy="full_shard"),
        common | dict(train_type="lora", sharding_strategy="ddp"),
    ]
    results = run_ranks(train_cases, 2, cases, str(tmp_path / "out"))[0]
    for ours, model in zip(
        results, (plain(folder).train(), with_lora(plain(folder), ATTENTION)), strict=True
    ):

        def balance(batch, model=model):
            each = [
                model(input_ids=ids[mask > 0][None], output_router_logits=True).aux_loss
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ]
            return coefficient * torch.stack(each).mean()

        losses, norms, weights = reference_run(model, STEPS, balance)
        assert relative(ours["losses"], losses) < 2e-5 and relative(ours["norms"], norms) < 2e-5
        compared = [name for name in weights if name in ours["weights"]]  # experts are stacked here
        assert len(compared) >= 16
        for name in compared:
            assert relative(ours["weights"][name], weights[name]) < 1e-4, name


def names_in(folder) -> set[str]:
    """The names of all tensors of a model's files."""
    files = [safe_open(path, "pt") for path in Path(folder).glob("*.safetensors")]
    return {name for file in files for name in file.keys()}  # noqa: SIM118  no dict


@pytest.mark.parametrize("world_size", [slow(1), 3])
def test_trained_whole_it_equals_transformers_and_is_saved_as_it_names_them(tmp_path, world_size):
    folders = [save_family(tmp_path / name, name) for name in MOE_FAMILIES]
    cases = [dict(model_name=f, train_type="full", sharding_strategy="full_shard") for f in folders]
    results = run_ranks(train_cases, world_size, cases, str(tmp_path / "out"))[0]
    for i, (f, ours) in enumerate(zip(folders, results, strict=True)):
        losses, norms, weights = reference_run(plain(f).train(), STEPS)
        assert relative(ours["losses"], losses) < 1e-5 and relative(ours["norms"], norms) < 1e-5
        assert names_in(tmp_path / "out" / str(i)) == names_in(f)  # those that other programs know
        saved = plain(tmp_path / "out" / str(i))
        for name, p in saved.named_parameters():
            assert relative(p.detach(), weights[name]) < 1e-4, name
        with torch.no_grad():
            torch.testing.assert_close(
                saved.eval()(IDS).logits, ours["logits"], rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def rounded(model):
    """The model with linear weights, all but the head's, and experts as 4 bits stand for them."""
    for name, p in model.named_parameters():
        if "_proj" not in name:
            continue
        for weight in p if p.dim() == 3 else [p]:
            weight.copy_(dequantize_4bit(*quantize_4bit(weight.data, quant_type="nf4")))
    return model


def with_adapted_experts(model, more: dict):
    """A model under PEFT's `target_parameters`, whose first A are those of a run."""
    model = with_lora(
        model, ATTENTION, **dict(target_parameters=["gate_up_proj", "down_proj"]) | more
    )
    inner = (
        "gate_up_proj"
        if any("experts.base_layer.lora" in n for n, _ in model.named_parameters())
        else "down_proj"
    )
    for name, p in model.named_parameters():
        if "experts" not in name or ".lora_A." not in name:
            continue
        ours = name.replace("experts.lora", "experts.down_proj.lora")
        p.data.copy_(initial_a(ours.replace("base_layer.lora", f"{inner}.lora"), SEED, p.shape))
    return model


@pytest.mark.parametrize(
    "more", [{}, dict(exclude_modules=["k_proj"]), dict(exclude_modules=".*k_proj")]
)
def test_layers_that_are_called_as_the_experts_beside_them_are_adapted_and_those_not(more):
    """A dense block and a shared expert have gate_proj and down_proj too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2MoeConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[0],
        )
    )
    theirs = get_peft_model(copy.deepcopy(model), lora_config(rank=2, **more))
    config = lora_config(rank=2, **more)
    ours = apply_adapters(apply_stacked_experts(model), config)
    adapters = trainable_parameters(ours)
    assert adapters.keys() == trainable_parameters(theirs).keys()
    assert config.exclude_modules == lora_config(**more).exclude_modules
    with torch.no_grad():
        for p in adapters.values():
            p.normal_(std=0.1)
        theirs.load_state_dict(adapters, strict=False)
        torch.testing.assert_close(ours.eval()(IDS).logits, theirs.eval()(IDS).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapted", in_parts(ADAPTED, 3, then=(1,)))
def test_adapted_experts_equal_peft_in_one_process_and_load_there(folder, tmp_path, adapted):
    """Of 64 experts, most get no token in a micro-batch."""
    qwen = save_family(tmp_path / "qwen", "Qwen3-MoE")
    cases = [
        (dict(model_name=f, lora_target_parameters="experts") | ours, peft)
        for f, ours, peft in [*((folder, *case) for case in adapted), (qwen, *adapted[-1])]
    ]
    results = run_ranks(train_cases, 2, [ours for ours, _ in cases], str(tmp_path))
    for i, ((case, peft), mine, other) in enumerate(zip(cases, *results, strict=True)):

        def base(case=case):
            model = plain(case["model_name"])
            return rounded(model) if case["train_type"] == "qlora" else model

        model = with_adapted_experts(base(), peft)
        assert_equal_run(mine, reference_run(model, STEPS), 2e-5, case)
        assert mine["checksums"] == other["checksums"], case
        loaded = PeftModel.from_pretrained(base(), tmp_path / str(i)).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(IDS).logits, mine["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(
            target_parameters=["gate_up_proj", "down_proj"],
            rank_pattern={"down_proj": 3},
            use_rslora=True,
        ),
        dict(target_parameters=["experts.gate_up_proj"]),
    ],
)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_merge_rounds_experts_as_training_did_and_changes_each(family, settings, tmp_path):
    base = save_family(tmp_path / "base", family)
    if "rank_pattern" in settings:  # experts in one tensor, where published files have one of each
        save_file(
            plain(base).state_dict(), tmp_path / "base" / "model.safetensors", {"format": "pt"}
        )
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=ATTENTION, **settings)
    merged = merge_adapter(
        base, adapter, tmp_path / "merged", merge_base="dequantized", base_quant="nf4", dtype="fp32"
    )
    with torch.no_grad():
        expected = PeftModel.from_pretrained(rounded(plain(base)), adapter).eval()(IDS).logits
        for found in (
            plain(merged),
            load_for_inference(base, adapter, "nf4", "cpu", torch.float32),
        ):
            torch.testing.assert_close(found.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def load_tiny(folder: str) -> dict:
    """What is stored otherwise than as bf16 weights: tensors by name, on one rank."""
    from fsdp_qlora.build import build_model

    model = build_model(RunConfig(model_name=folder, train_type="lora"), torch.device("cpu"))
    kept = {
        n: p for n, p in model.named_parameters() if "lora_" not in n and p.dtype == torch.float32
    }
    return kept | {n: b for n, b in model.named_buffers() if "e_score" in n}


def test_routers_keep_fp32_and_corrections_where_the_model_does(tmp_path):
    sizes = dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=64,
    )
    ernie = Ernie4_5_MoeConfig(**sizes, moe_num_experts=4, moe_k=2, moe_layer_start_index=0)
    glm = Glm4MoeConfig(
        **sizes,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        head_dim=16,
    )
    for config in (ernie, glm):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, b in model.named_buffers():
            if "e_score" in name:
                b.copy_(torch.linspace(-1, 1, b.numel()).view_as(b))
        model.save_pretrained(tmp_path / config.model_type)
        expected = AutoModelForCausalLM.from_pretrained(
            tmp_path / config.model_type, dtype=torch.bfloat16
        )
        (found,) = run_ranks(load_tiny, 1, str(tmp_path / config.model_type))
        found = {n.removeprefix("base_model.model."): t for n, t in found.items()}
        wanted = {n: p for n, p in expected.named_parameters() if p.dtype == torch.float32}
        wanted |= {n: b for n, b in expected.named_buffers() if "e_score" in n}
        assert found.keys() == wanted.keys() and wanted, config.model_type
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def test_experts_of_another_build_are_refused_under_quantization(tmp_path):
    config = AutoConfig.for_model(
        "jetmoe", **SIZES, num_local_experts=4, num_experts_per_tok=2, kv_channels=16
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--quant nf4: model.layers.*JetMoeParallelExperts.*none"):
        planned_model(RunConfig(model_name=str(tmp_path)), torch.device("cpu"))


def test_an_expert_that_is_missing_is_noticed(tmp_path):
    folder = renamed_files(
        save_family(tmp_path, "Qwen3-MoE"),
        "none",
        "none",
        drop=("model.layers.1.mlp.experts.3.up_proj.weight",),
    )
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\.weight has shape"
    ):
        planned_model(RunConfig(model_name=folder), torch.device("cpu"))


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(lora_target_modules="gate_up_proj"),
            "--lora_target_modules gate_up_proj: .*_parameters",
        ),
        (
            dict(lora_target_parameters="w1", lora_dropout=0.0),
            "--lora_target_parameters w1: .*gate_up_proj",
        ),
    ],
)
def test_a_name_that_is_no_target_is_answered_with_those_there_are(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        planned_model(RunConfig(model_name=folder, **settings), torch.device("cpu"))


@pytest.mark.parametrize("family", ["gpt-oss", "Nemotron 3"])
def test_adapted_experts_with_biases_or_without_a_gate_load_in_peft_and_merge(family, tmp_path):
    folder = save_family(tmp_path / "base", family)
    case = dict(model_name=folder, train_type="lora", lora_target_parameters="experts")
    with process_group(torch.device("cpu"), timeout_minutes=1):
        _, model, _ = build_and_train(case, STEPS)
        save_trained(model, tmp_path / "adapter")
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
        wrapped = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter").eval()
        torch.testing.assert_close(wrapped(IDS).logits, logits, rtol=1e-4, atol=1e-4)
        merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
        merged = plain(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    assert (logits - plain(folder).eval()(IDS).logits).abs().max() > 1e-3
