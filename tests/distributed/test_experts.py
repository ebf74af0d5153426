"""Mixtures of experts whose tokens go to few of them, and to other ones on each rank.

The reference is transformers in one process, whose experts are parameters of three dimensions.
"""
from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import planned_model
from fsdp_qlora.config import RunConfig
from tests.distributed.test_parity import assert_equal_run, relative, train_model
from tests.families import MOE_FAMILIES, save_family
from tests.ranks import run_ranks
from tests.test_names import renamed_files
from tests.tiny import RANK, SEED, reference_run, tiny_rows, with_lora

STEPS = tiny_rows(steps=2, rows_per_step=6)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = [dict(sharding_strategy="ddp"), dict(wrap_policy="attention_mlp"),
         dict(wrap_policy="min_params", min_wrap_params=9000), dict(use_gradient_checkpointing=False),
         dict(use_cpu_offload=True), dict(activation_policy="keep_linears"), dict(compile=True)]


def train_cases(cases: list[dict], out: str) -> list[dict]:
    from fsdp_qlora.build import build_model
    from fsdp_qlora.export import save_trained
    results = []
    for i, case in enumerate(cases):
        config = RunConfig(**dict(precision="fp32", lora_rank=RANK, lora_alpha=8, lora_dropout=0.0,
                                  seed=SEED) | case)
        model = build_model(config, torch.device("cpu"))
        results.append(train_model(model, STEPS))
        if config.train_type == "full":
            with torch.no_grad(): results[-1]["logits"] = model.eval()(input_ids=IDS).logits
            save_trained(model, f"{out}/{i}")
    return results


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 experts of which a row of at most 20 tokens goes to 40 at most."""
    return save_family(tmp_path_factory.mktemp("mixtral"), "Mixtral", num_local_experts=64)


def test_every_way_to_shard_equals_one_process_where_experts_get_no_token(folder, tmp_path):
    cases = [dict(model_name=folder, train_type="lora") | case for case in CASES]
    results = run_ranks(train_cases, 2, cases, str(tmp_path))
    reference = reference_run(with_lora(plain(folder), ATTENTION), STEPS)
    for case, ours, other in zip(cases, *results, strict=True):
        assert_equal_run(ours, reference, 2e-5, case)
        assert ours["checksums"] == other["checksums"], case


@pytest.mark.parametrize("world_size", [1, 3])
def test_trained_whole_it_equals_transformers_and_is_saved_as_it_names_them(tmp_path, world_size):
    folders = [save_family(tmp_path / name, name) for name in MOE_FAMILIES]
    cases = [dict(model_name=f, train_type="full", sharding_strategy="full_shard") for f in folders]
    results = run_ranks(train_cases, world_size, cases, str(tmp_path / "out"))[0]
    for i, (f, ours) in enumerate(zip(folders, results, strict=True)):
        losses, norms, weights = reference_run(plain(f).train(), STEPS)
        assert relative(ours["losses"], losses) < 1e-5 and relative(ours["norms"], norms) < 1e-5
        saved = plain(tmp_path / "out" / str(i))
        for name, p in saved.named_parameters(): assert relative(p.detach(), weights[name]) < 1e-4, name
        with torch.no_grad():
            torch.testing.assert_close(saved.eval()(IDS).logits, ours["logits"], rtol=1e-4, atol=1e-4)


def test_experts_of_another_build_are_refused_under_quantization(tmp_path):
    from transformers import GptOssConfig
    config = GptOssConfig(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                          num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--quant nf4: model.layers.0.mlp.experts .GptOssExperts.*none"):
        planned_model(RunConfig(model_name=str(tmp_path)), torch.device("cpu"))


def test_an_expert_that_is_missing_is_noticed(tmp_path):
    folder = renamed_files(save_family(tmp_path, "Qwen3-MoE"), "none", "none",
                           drop=("model.layers.1.mlp.experts.3.up_proj.weight",))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up\.weight has shape"):
        planned_model(RunConfig(model_name=folder), torch.device("cpu"))


def test_a_name_of_experts_is_no_target(folder):
    with pytest.raises(ValueError, match="--lora_target_modules .*its experts stay frozen"):
        planned_model(RunConfig(model_name=folder, lora_target_modules="gate_up"), torch.device("cpu"))
