"""Products of frozen weights in fp8: close to full precision, refused where impossible."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora import apply_adapters, lora_config
from fsdp_qlora.adapters import apply_fp8
from fsdp_qlora.adapters.fp8_layers import cached_fp8_tensors
from fsdp_qlora.adapters.lora_ops import shared_fp8_linears, shared_frozen_backward
from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.estimate import (
    estimate,
    keeps_fp8_weights,
    resident_bytes,
    resolve,
    step_seconds,
)
from fsdp_qlora.loading import read_config
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.plan import Plan
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.planner import free_settings, propose
from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.formats import FrozenWeight, dequantize_rows, quantize_rows
from fsdp_qlora.quantization.fp8_weight_cache import Fp8WeightCache
from fsdp_qlora.training.step import train_step
from tests.tiny import padded_batch, save_tiny, tiny_rows

# e4m3 has 3 bits of mantissa: a value is off by up to 2^-4, and by 2^-4 / sqrt(3) in the mean square;
# both factors of a product are rounded, and errors of a sum are independent.
ROUNDING = 2**-4 / 3**0.5 * 2**0.5


def size_of(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def relative(ours, reference) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def frozen(weight, absmax=None) -> FrozenWeight:
    return FrozenWeight(weight, absmax, 256, "" if absmax is None else "nf4")


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    # Rows and tokens of very different size: one scale for all would lose the small ones.
    weight = normal(96, 256) * torch.logspace(-4, 0, 96)[:, None]
    x, dy = normal(40, 256) * torch.logspace(-3, 2, 40)[:, None], normal(40, 96)
    return x, dy, *quantize_rows(weight)


@pytest.mark.parametrize("quantized", [True, False])
def test_products_are_within_fp8_rounding_for_every_token(layer, quantized):
    x, dy, packed, absmax = layer
    dense = dequantize_rows(packed, absmax, 256, "nf4", torch.float32)
    w = frozen(packed, absmax) if quantized else frozen(dense)
    y = fp8.forward_product(x, w)
    dx = fp8.backward_product([dy], [w])
    for ours, reference in ((y, x @ dense.t()), (dx, dy @ dense)):
        assert relative(ours, reference) < ROUNDING
        assert all(relative(o, r) < 2 * ROUNDING for o, r in zip(ours, reference, strict=True))


def adapter(rank: int, size: float):
    """xA (N, R), B (O, R), dxA (N, R), A (R, I); B and dxA of a given size."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return (
        normal(40, rank),
        size * normal(96, rank),
        size * normal(40, rank),
        normal(rank, 256) / 16,
    )


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("rank", [16, 8, 24])
def test_the_adapters_part_is_within_rounding_whatever_its_size(rank, size):
    bound = 2 * ROUNDING
    xa, b, dxa, a = adapter(rank, size)
    x, dy, weight = torch.zeros(40, 256), torch.zeros(40, 96), torch.ones(96, 256)
    x[:, 0], dy[:, 0] = 4, 4  # they set the scale, and their product is known
    y = fp8.forward_product(x, frozen(weight), xa, b, 0.25) - x @ weight.t()
    assert relative(y, 0.25 * xa @ b.t()) < bound
    dx = fp8.backward_product([dy], [frozen(weight)], dxa, a) - dy @ weight
    assert relative(dx, dxa @ a) < bound


@pytest.mark.parametrize("times", [1, 30, 1000])
def test_an_adapter_as_large_as_the_weight_or_larger_leaves_the_sum_within_rounding(times):
    (xa, b, dxa, a), generator = adapter(16, 1.0), torch.Generator().manual_seed(2)
    x, dy, weight = (
        torch.randn(shape, generator=generator) for shape in ((40, 256), (40, 96), (96, 256))
    )
    y = fp8.forward_product(x, frozen(weight), xa, times * b, 1.0)
    assert relative(y, x @ weight.t() + times * xa @ b.t()) < 1.5 * ROUNDING
    dx = fp8.backward_product([dy], [frozen(weight)], 10 * times * dxa, a)
    assert relative(dx, dy @ weight + 10 * times * dxa @ a) < 1.5 * ROUNDING


def test_a_row_of_the_weight_that_is_zero_takes_nothing_from_an_adapter(layer):
    (xa, b, *_), (x, _, packed, absmax) = adapter(16, 0.1), layer
    dense = dequantize_rows(packed, absmax, 256, "nf4", torch.float32)
    for i in (5, 90):
        dense[i] = 0
    y = fp8.forward_product(x, frozen(dense), xa, b, 0.25)
    expected = x @ dense.t() + 0.25 * xa @ b.t()
    assert relative(y, expected) < ROUNDING
    assert relative(y[:, [5, 90]], expected[:, [5, 90]]) < 2 * ROUNDING


@pytest.mark.parametrize("quantized", [True, False])
def test_kept_weights_give_the_same_bits_while_adapters_change(layer, quantized):
    x, dy, packed, absmax = layer
    dense = dequantize_rows(packed, absmax, 256, "nf4", torch.float32)
    weight, scales = (packed, absmax) if quantized else (dense, None)
    others = [weight.clone(), weight.flip(0)] if quantized else [weight.clone(), weight / 3]
    weights, dys = [weight, *others], [dy, 2 * dy, dy / 2]
    ws = [frozen(each, scales) for each in weights]

    def products(sizes):
        for size in sizes:
            xa, b, dxa, a = adapter(24, size)
            yield fp8.forward_product(x, ws[0], xa, b, 0.25)
            yield fp8.forward_product(x, ws[1])
            yield fp8.backward_product(dys, ws, dxa, (1 + size) * a)

    sizes = (0, 1e-5, 1e-2, 3, 1e-3)
    made_anew = [*products(sizes)]
    keeper = Fp8WeightCache(weights)
    with torch.inference_mode():
        kept = [*products(sizes[:1])]  # an evaluation may come first
    first = dict(keeper.kept)
    kept += products(sizes[1:])
    assert all(torch.equal(*pair) for pair in zip(kept, made_anew, strict=True))
    assert keeper.kept == first
    assert Counter(use for use, _ in first) == dict(
        forward=2, backward=3, rows=3, **{"adapted rows": 1}
    )
    # The same weight in another use: computed, not kept a second time.
    fp8.forward_product(x, ws[0])
    fp8.backward_product(dys[:1], ws[:1])
    assert keeper.kept == first and size_of(keeper.tensors()) == 2 * 96 * 256 + 32 * 96 + (
        256 * (32 + 3 * 96) + (3 + 1) * 96 * 4
    )


def test_forms_are_gone_with_their_keeper(layer):
    x, _, packed, absmax = layer
    keeper = Fp8WeightCache([packed])
    before = fp8.forward_product(x, frozen(packed, absmax))
    form, _ = next(made for (use, _), (_, made) in keeper.kept.items() if use == "forward")
    gone = weakref.ref(form)
    absmax *= 2
    assert torch.equal(fp8.forward_product(x, frozen(packed, absmax)), before)
    del keeper, form
    assert gone() is None and not torch.equal(
        fp8.forward_product(x, frozen(packed, absmax)), before
    )


def test_layers_of_one_input_are_the_sum_of_each(layer):
    x, dy, packed, absmax = layer
    together = fp8.backward_product([dy, 3 * dy], [frozen(packed, absmax)] * 2)
    dense = dequantize_rows(packed, absmax, 256, "nf4", torch.float32)
    assert relative(together, 4 * dy @ dense) < ROUNDING


@pytest.mark.parametrize("quantized", [True, False])
def test_products_of_one_input_are_those_of_each_alone(layer, quantized):
    x, _, packed, absmax = layer
    (xa, b, *_), (other_xa, other_b, *_) = adapter(8, 0.1), adapter(24, 3.0)
    dense = dequantize_rows(packed, absmax, 256, "nf4", torch.float32)
    weights, scales = ([packed] * 2, [absmax] * 2) if quantized else ([dense, dense / 2], [])
    bias = torch.linspace(-1, 1, 96)
    args = (
        x,
        [xa, other_xa],
        weights,
        scales,
        [bias, -bias],
        [b, other_b],
        [0.25, 2.0],
        256,
        "nf4",
    )
    first, second = shared_fp8_linears(*args)
    assert relative(first, x @ dense.t() + 0.25 * xa @ b.t() + bias) < 1.5 * ROUNDING
    half = dense if quantized else dense / 2
    assert relative(second, x @ half.t() + 2 * other_xa @ other_b.t() - bias) < 1.5 * ROUNDING
    alone = (x.view(4, 10, 256), [], weights, scales, [], [], [], 256, "nf4")
    for y, weight, its_scales in zip(
        shared_fp8_linears(*alone), weights, scales or [None] * 2, strict=True
    ):
        assert torch.equal(y.view(40, 96), fp8.forward_product(x, frozen(weight, its_scales)))
    for each in (args, alone):
        torch.library.opcheck(shared_fp8_linears, each)
    dys = [torch.randn(4, 10, 96), torch.randn(4, 10, 96)]
    for kind in ("", "fp8"):
        sums = (dys, weights, scales, 256, "nf4", kind)
        expected = dys[0] @ dense + dys[1] @ half
        assert relative(shared_frozen_backward(*sums), expected) < (ROUNDING if kind else 1e-5)
        torch.library.opcheck(shared_frozen_backward, sums)


def test_a_row_of_zeros_stays_zero(layer):
    x, _, packed, absmax = layer
    x[3], absmax[5] = 0, 0
    y = fp8.forward_product(x, frozen(packed, absmax))
    assert torch.isfinite(y).all() and not y[3].any() and not y[:, 5].any()


def test_training_in_fp8_follows_training_in_full_precision(tmp_path):
    """And with weights kept in fp8 it is the same training, in the memory that the estimate says."""
    folder, losses, device = save_tiny(tmp_path), {}, torch.device("cpu")
    plain = RunConfig(
        model_name=folder,
        precision="fp32",
        lora_rank=4,
        lora_dropout=0.0,
        compile=False,
        sharding_strategy="ddp",
    )
    in_fp8 = replace(plain, compute_dtype="fp8")
    kept = replace(in_fp8, keep_fp8_weights=True)
    with process_group(device):
        for name, config in dict(plain=plain, fp8=in_fp8, kept=kept).items():
            model = build_model(config, device)
            optimizer = build_optimizer(model, "adamw", 1e-2)
            losses[name] = torch.tensor(
                [
                    train_step(model, optimizer, [padded_batch(rows)]).loss
                    for rows in tiny_rows(1, 4) * 8
                ]
            )
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.1
    torch.testing.assert_close(losses["fp8"], losses["plain"], rtol=2e-2, atol=0)
    assert not torch.equal(losses["fp8"], losses["plain"])
    assert torch.equal(losses["kept"], losses["fp8"])
    shape = shape_from_config(read_config(folder).to_dict(), "tiny")
    assert (
        size_of(cached_fp8_tensors(model)) == resident_bytes(shape, draft_plan(kept, 1))["fp8"] > 0
    )


def test_weights_are_kept_in_fp8_where_they_stay_and_activations_leave_room():
    shape = model_shape("meta-llama/Llama-3.1-8B")
    plan = Plan().change(
        strategy="ddp",
        compute_dtype="fp8",
        activation_policy="keep_all",
        compile=True,
        context_length=4096,
        lora_dropout=0.0,
        cuda_graphs=True,
    )
    kept = plan.change(keep_fp8_weights=True)
    weights = 2 * sum(out * wide for out, wide in shape.linears().values()) * shape.layers
    assert weights < resident_bytes(shape, kept)["fp8"] < 1.1 * weights
    assert keeps_fp8_weights(shape, plan, 70) and not keeps_fp8_weights(shape, plan, 40)
    assert not keeps_fp8_weights(shape, plan.change(context_length=16384), 70)
    assert not keeps_fp8_weights(shape, plan.change(strategy="full_shard", world_size=2), 70)
    assert not keeps_fp8_weights(shape, plan.change(compute_dtype="bf16"), 70)
    h100 = find_gpu("h100")
    anew, once = (step_seconds(shape, h100, each).parts for each in (plan, kept))
    assert once == anew | dict(dequantization=0) and anew["dequantization"] > 0
    machine = Machine(gpu=h100, gpus=1, memory_gib=h100.memory_gib)
    asked = dict(model_name="m", compute_dtype="fp8", lora_dropout=0.0, context_length=2048)
    answer = estimate(shape, machine, RunConfig(**asked))
    assert answer.config.keep_fp8_weights and answer.memory.parts["fp8"] > 12
    assert not estimate(shape, replace(machine, gpus=2), RunConfig(**asked)).config.keep_fp8_weights
    free = free_settings(RunConfig(**asked), set(), everything=True)
    assert propose(shape, machine, RunConfig(**asked), free).changes["keep_fp8_weights"] is True
    decided = RunConfig(**asked, keep_fp8_weights=False)
    assert "keep_fp8_weights" not in free_settings(decided, set(), everything=True)


@pytest.mark.parametrize(
    "settings, gpus",
    [
        (dict(compute_dtype="bf16"), 1),
        (dict(), 2),
        (dict(sharding_strategy="hybrid_full_shard"), 4),
        (dict(use_cpu_offload=True), 1),
    ],
)
def test_weights_that_do_not_stay_are_not_kept_in_fp8(settings, gpus):
    with pytest.raises(ValueError, match="--keep_fp8_weights.*; (use|leave)"):
        config = RunConfig(**dict(compute_dtype="fp8") | settings, keep_fp8_weights=True)
        resolve(config, None, Machine(gpu=find_gpu("H100"), gpus=gpus, memory_gib=80))


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert "A100 has no fp8" in fp8.fp8_problem(torch.device("cuda"))


def test_fp8_without_frozen_weights_is_refused():
    with pytest.raises(ValueError, match="--compute_dtype fp8"):
        RunConfig(train_type="full", compute_dtype="fp8")


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_layers_without_an_adapter_are_multiplied_in_fp8_too(tmp_path, train_type):
    """Only q is adapted: its gradient comes through every other layer of the blocks above."""
    from fsdp_qlora.adapters import trainable_parameters

    folder, device, found = (
        save_tiny(tmp_path, hidden_size=64, intermediate_size=128),
        torch.device("cpu"),
        {},
    )
    ((row,),) = tiny_rows(steps=1, rows_per_step=1)
    with process_group(device, 1):
        for kind in ("bf16", "fp8"):
            config = RunConfig(
                model_name=folder,
                train_type=train_type,
                compute_dtype=kind,
                lora_target_modules="q_proj",
                lora_rank=8,
                lora_dropout=0.0,
                sharding_strategy="ddp",
                device="cpu",
            )
            model = build_model(config, device)
            layers = {
                getattr(m, "product_dtype", None)
                for n, m in model.named_modules()
                if n.endswith(("q_proj", "up_proj"))
            }
            assert layers <= ({"fp8"} if kind == "fp8" else {"", None})
            for name, p in trainable_parameters(model).items():
                if "lora_B" in name:
                    torch.nn.init.constant_(p, 0.01)
            model(**padded_batch([row])).loss.backward()
            found[kind] = torch.cat(
                [p.grad.flatten() for p in trainable_parameters(model).values()]
            )
    assert 1e-4 < relative(found["fp8"], found["bf16"]) < 8 * ROUNDING


def test_a_layer_whose_bias_is_trained_multiplies_in_fp8_as_one_whose_bias_is_not(tmp_path):
    """Biases in fp32 beside bf16 weights, added after the product."""
    folder, rows, found = save_tiny(tmp_path, "qwen2"), torch.randn(2, 8, 64).bfloat16(), []
    for bias in ("none", "all"):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        config = lora_config(rank=4, target_modules=["o_proj"], bias=bias)
        model = apply_adapters(base, config, torch.float32)
        layer = model.get_base_model().model.layers[0].self_attn.k_proj
        exact = layer(rows)
        found.append((apply_fp8(model, torch.device("cpu")), layer(rows)))
        assert layer.bias.requires_grad == (bias == "all")
        assert 1e-3 < relative(found[-1][1], exact) < ROUNDING
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=2**-7, atol=2**-7)
    found[1][1].sum().backward()
    assert layer.bias.grad.dtype == torch.float32 and (layer.bias.grad == 16).all()
