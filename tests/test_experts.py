"""Mixtures of experts in one process: how rows are counted, and what a run says of experts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.adapters import apply_fp8, trainable_parameters
from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.estimate.experts import PART_VALUES as estimated_values
from fsdp_qlora.estimate.experts import rerun_linears
from fsdp_qlora.experts import ExpertLoad, grouped_matmul, mixtures_of
from fsdp_qlora.experts.grouped_matmul import PART_VALUES, grouped_linear
from fsdp_qlora.experts.lora_ops import adapted_experts
from fsdp_qlora.experts.routing import route
from fsdp_qlora.experts.row_sums import sum_rows
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows
from fsdp_qlora.quantization.fp8 import fp8_problem
from fsdp_qlora.run_plan import plan_run
from fsdp_qlora.training.step import train_step

from .families import save_family
from .parts import slow
from .tokenizers import save_chat_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "settings", [{}, dict(use_gradient_checkpointing=False), slow(dict(compile=True))]
)
def test_shares_of_experts_are_those_of_what_transformers_routers_chose(settings, tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE", num_experts=64)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = plain(IDS, output_router_logits=True).router_logits
    counts = [block.topk(2).indices.flatten().bincount(minlength=64) for block in logits]
    config = RunConfig(model_name=folder, train_type="lora", precision="fp32", **settings)
    with process_group(CPU, timeout_minutes=1):
        model = build_model(config, CPU)
        load = ExpertLoad(mixtures_of(model), CPU)
        for ids in IDS.split(1):
            model(input_ids=ids, labels=ids).loss.backward()
        model.eval()(input_ids=IDS)  # rows that are not trained on do not count
        busiest, idle = load.take().tolist()
        nothing = load.take().tolist()
    assert busiest == pytest.approx(sum(c.max() / c.sum() for c in counts).item() / 2)
    assert idle == pytest.approx(sum((c == 0).sum() / 64 for c in counts).item() / 2) and idle > 0
    assert nothing == [0, 1]


@pytest.mark.parametrize("compile", [False, slow(True)])
def test_products_that_run_again_are_those_of_the_estimate(compile, tmp_path):
    """Two products a block, and their backwards; a compiled backward leaves the last one out."""
    folder = save_family(tmp_path, "Qwen3-MoE")
    config = RunConfig(
        model_name=folder,
        precision="fp32",
        activation_policy="recompute_all",
        compile=compile,
    )
    shape = shape_from_config(AutoConfig.from_pretrained(folder).to_dict(), "tiny")
    with process_group(CPU, timeout_minutes=1):
        again = rerun_linears(shape, plan_run(config, CPU), "recompute_all")
        model = build_model(config, CPU)
        model(input_ids=IDS, labels=IDS).loss.backward()
        with torch.profiler.profile() as profile:
            model(input_ids=IDS, labels=IDS).loss.backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    blocks = shape.layers
    assert counts["fsdp_qlora::grouped_linear"] == (2 + len(again)) * blocks
    assert counts["fsdp_qlora::grouped_linear_backward"] == 2 * blocks
    assert len(again) == (1 if compile else 2)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_records_how_even_experts_are_used_and_says_that_they_stay_frozen(
    adapted, tmp_path, capsys
):
    save_chat_model(tmp_path / "base")
    vocab = len(AutoTokenizer.from_pretrained(tmp_path / "base"))
    save_family(tmp_path / "base", "Qwen3-MoE", vocab_size=vocab)
    rows = [dict(prompt=f"{i}?", completion="yes " * (1 + i % 3)) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(
        model_name=tmp_path / "base", dataset=tmp_path / "rows.jsonl", device="cpu", world_size=1,
        precision="fp32", lora_rank=2, lora_dropout=0, compile="false", global_batch_size=4,
        output_dir=tmp_path / "out", log_every=1, save_model="false",
    )  # fmt: skip
    if adapted:
        flags["lora_target_parameters"] = "experts"
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert not main(["train", *arguments])
    said = "not adapted: the 4 experts in each of 2 blocks; --lora_target_parameters experts"
    assert (said in capsys.readouterr().out) == (not adapted)
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert steps and all(0.25 <= step["busiest_expert_share"] <= 0.5 for step in steps)
    assert all(0 <= step["idle_expert_share"] <= 0.5 for step in steps)


def test_the_estimate_unpacks_as_many_weights_at_a_time_as_a_run():
    assert estimated_values == PART_VALUES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_token_are_summed_in_fp32_wherever_they_lie(dtype):
    values = torch.randn(24, 40).to(dtype)
    rows = torch.randperm(24).view(8, 3)
    expected = values.float()[rows].sum(1).to(dtype)
    torch.testing.assert_close(sum_rows(values, rows), expected, rtol=2**-7, atol=2**-7)


E, O, I, N, K, R = 4, 128, 64, 30, 2, 4
ROUNDING = 2**-4 / 3**0.5 * 2**0.5  # of both factors of a product to e4m3, as in test_fp8.py


def relative(ours, reference) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("part_values", [2**29, 2**13], ids=["whole", "in parts"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("tokens_at", ["", "input", "output"])
def test_experts_products_in_fp8_are_within_its_rounding(
    monkeypatch, tokens_at, quantized, part_values
):
    monkeypatch.setattr(grouped_matmul, "PART_VALUES", part_values)
    torch.manual_seed(0)
    # Experts of very different size: one scale for all would lose the small ones.
    weight = torch.randn(E, O, I) / I**0.5 * torch.logspace(-3, 0, E)[:, None, None]
    packed, absmax = quantize_rows(weight.flatten(0, 1))
    dense = dequantize_rows(packed, absmax, I, "nf4", torch.float32)
    form = (packed, absmax) if quantized else (dense, None)
    routing, _ = route(torch.rand(N, E).topk(K).indices, E)
    routing = routing._replace(tokens_at=tokens_at)
    x = torch.randn(N if tokens_at == "input" else N * K, I)
    dy = torch.randn(N if tokens_at == "output" else N * K, O)
    a, b = torch.randn(E * R, I) / I**0.5, torch.randn(O, R * E) / 64
    adapter = 0.5 * b.view(O, R, E).permute(2, 0, 1) @ a.view(E, R, I)
    spans = grouped_matmul.spans(routing.ends)
    x_rows, dy_rows = routing.inputs(x), routing.output_gradients(dy)
    for adapted in (False, True):
        mine = x.clone().requires_grad_()
        if adapted:
            y = adapted_experts(mine, *routing, *form, a, b, 0.5, I, "nf4", "fp8")
        else:
            y = grouped_linear(mine, *routing, *form, I, "nf4", "fp8")
        y.backward(dy)
        w = dense.view(E, O, I) + adapted * adapter
        expected = torch.cat([x_rows[s] @ each.t() for s, each in zip(spans, w, strict=True)])
        dx = torch.cat([dy_rows[s] @ each for s, each in zip(spans, w, strict=True)])
        assert 1e-3 < relative(y, routing.outputs(expected)) < 1.2 * ROUNDING
        assert 1e-3 < relative(mine.grad, routing.input_gradients(dx)) < 1.2 * ROUNDING
        if not tokens_at and not adapted:  # of the smallest expert too
            found = mine.grad[spans[0]]
            assert relative(found, dx[spans[0]]) < 1.2 * ROUNDING


@pytest.mark.parametrize("adapted", [None, "experts"])
def test_a_mixture_in_fp8_multiplies_its_experts_in_fp8_and_learns_alike(adapted, tmp_path):
    folder = save_family(
        tmp_path, "Qwen3-MoE", hidden_size=64, moe_intermediate_size=64, head_dim=16
    )
    losses = {}
    for dtype in ("auto", "fp8"):
        config = RunConfig(
            model_name=folder, precision="fp32", compile=False, lora_dropout=0.0, lora_rank=4,
            sharding_strategy="ddp", compute_dtype=dtype, lora_target_parameters=adapted,
        )  # fmt: skip
        with process_group(CPU, timeout_minutes=1):
            model = build_model(config, CPU)
            optimizer = build_optimizer(model, "adamw", 3e-3)
            losses[dtype] = torch.tensor(
                [
                    train_step(model, optimizer, [dict(input_ids=IDS, labels=IDS)]).loss
                    for _ in range(6)
                ]
            )
    stacks = [getattr(m, name) for m in mixtures_of(model) for name in m.stacks]
    assert {getattr(s, "base_layer", s).product_dtype for s in stacks} == {"fp8"}
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.05
    torch.testing.assert_close(losses["fp8"], losses["auto"], rtol=3e-2, atol=0)
    assert not torch.equal(losses["fp8"], losses["auto"])


def test_adapters_of_experts_are_off_where_adapters_are_disabled(tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = RunConfig(
        model_name=folder, train_type="lora", precision="fp32", compile=False, lora_dropout=0.0,
        lora_rank=4, sharding_strategy="ddp", lora_target_parameters="experts",
    )  # fmt: skip
    with process_group(CPU, timeout_minutes=1), torch.no_grad():
        model = build_model(config, CPU).eval()
        for p in trainable_parameters(model).values():
            p.normal_()
        adapted = model(input_ids=IDS).logits
        with model.disable_adapter():
            off = model(input_ids=IDS).logits
        assert torch.equal(model(input_ids=IDS).logits, adapted)
        torch.testing.assert_close(off, base(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, off, rtol=1e-2)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_experts_in_fp8_are_refused_where_torch_has_no_kernel(monkeypatch, capability, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr("fsdp_qlora.quantization.fp8.triton", "there")
    device = torch.device("cuda")
    assert fp8_problem(device) is None  # other models run there
    config = RunConfig(model_name=save_family(tmp_path, "Qwen3-MoE"), compute_dtype="fp8")
    model, _ = planned_model(config, CPU)
    with pytest.raises(ValueError) as refused:
        apply_fp8(model, device)
    assert str(refused.value) == (
        "--compute_dtype fp8: torch multiplies experts in fp8 on Hopper alone, and this is a "
        "Some GPU; use --compute_dtype bf16"
    )
