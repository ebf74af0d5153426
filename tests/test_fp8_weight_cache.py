"""What fp8 products keep of frozen weights saves launches, changes no bit, and is never stale."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_qlora.adapters import apply_adapters, apply_fp8, keep_fp8_weights, lora_config
from fsdp_qlora.adapters.fp8_layers import cached_fp8_tensors
from fsdp_qlora.adapters.lora_ops import _scaled
from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.estimate import resident_bytes
from fsdp_qlora.loading import read_config
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.formats import FrozenWeight, quantize_rows
from fsdp_qlora.quantization.fp8_weight_cache import Fp8WeightCache, forget_fp8_weight
from fsdp_qlora.quantization.quantize import quantize_linears
from fsdp_qlora.training.step import train_step
from tests.families import save_family
from tests.tiny import padded_batch, save_tiny, tiny_rows

CPU = torch.device("cpu")
OF_SCALES = dict(amax=1, div=1, clamp=1)  # what finds those of rows, given the absmax of blocks


class Launches(TorchDispatchMode):
    """Counts the ops that reach the device: each is a launch on a GPU, but for views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def launches(product, *args) -> tuple[torch.Tensor, Counter]:
    with Launches() as seen:
        y = product(*args)
    return y, seen.counts


@pytest.fixture(params=["nf4", "nf4, absmax in int8", "bf16"])
def layer(request):
    """x (N, I), dY (N, O), W, xA (N, R), B (O, R), dxA (N, R), A (R, I)."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    weight, absmax = normal(96, 256) * torch.logspace(-4, 0, 96)[:, None], None
    if request.param == "bf16":
        weight = weight.bfloat16()
    else:
        weight, absmax = quantize_rows(weight, "nf4", "int8" if "int8" in request.param else "fp32")
    w = FrozenWeight(weight, absmax, 256, "nf4" if request.param != "bf16" else "")
    x, dy, xa, b = normal(40, 256), normal(40, 96), normal(40, 8), normal(96, 8)
    return x, dy, w, xa, b, normal(40, 8), normal(8, 256)


def test_scales_are_made_once_and_every_product_after_launches_less(layer):
    x, dy, w, xa, b, dxa, a = layer
    fp8.ones(256, CPU)  # made once for all layers
    forward = (fp8.forward_product, x, w, xa, b, 0.25)
    backward = (fp8.backward_product, [dy], [w], dxa, a)
    plain = (fp8.forward_product, x, w)
    anew = [launches(*each) for each in (forward, backward, plain)]
    keeper = Fp8WeightCache([w.weight], forms=False)
    with torch.inference_mode():
        first = fp8.forward_product(x, w, xa, b, 0.25)  # an evaluation may come first
    kept = [launches(*each) for each in (forward, backward, forward, backward, plain)]
    assert torch.equal(first, anew[0][0])
    pairs = zip(kept, [*anew[:2], *anew], strict=True)
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in pairs)
    of_a_row = OF_SCALES | (dict(abs=1, _to_copy=1) if w.absmax is None else {})
    beside_an_adapter = Counter(of_a_row) + Counter(amax=1, div=1, maximum=1)
    for saved, (_, with_scales), (_, without) in (
        (beside_an_adapter, kept[2], anew[0]),
        (of_a_row, kept[3], anew[1]),
        (of_a_row, kept[4], anew[2]),  # the same scales as in a backward
    ):
        assert without - with_scales == saved and not with_scales - without
    assert {use for use, _ in keeper.kept} == {"rows", "adapted rows"}
    assert sum(t.nbytes for t in keeper.tensors()) == 2 * 96 * 4


def test_scales_are_never_those_of_other_numbers(layer):
    """Of a weight that changes in place, moves, or whose place another one takes."""
    x, _, w, *_ = layer
    keeper = Fp8WeightCache([nn.Parameter(w.weight, requires_grad=False)], forms=False)
    (parameter,) = keeper.weights.values()
    made_anew = lambda w: fp8.forward_product(x, w._replace(weight=w.weight.clone()))  # noqa: E731
    of = lambda: w._replace(weight=parameter)  # noqa: E731
    fp8.forward_product(x, of())
    if w.absmax is None:
        changes = [
            lambda: parameter.copy_(7 * parameter),
            lambda: (parameter.data.mul_(3), forget_fp8_weight(parameter)),
            lambda: setattr(parameter, "data", 5 * parameter.data),
        ]
        for change in changes:
            before = fp8.forward_product(x, of())
            with torch.no_grad():
                change()
            after = fp8.forward_product(x, of())
            assert torch.equal(after, made_anew(of())) and not torch.equal(after, before)
    else:
        parameter.data = parameter.data.clone()
    # What is at the address of the weight that moved away is another weight now.
    for tensor in (w.weight, w.absmax):
        if tensor is not None:
            tensor.data.copy_(tensor.flip(0))
    assert torch.equal(fp8.forward_product(x, w), made_anew(w))


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("forms", [True, False])
def test_merged_adapters_and_copies_of_a_model_have_scales_of_their_own(tmp_path, quantized, forms):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path), dtype=torch.float32)
    if quantized:
        quantize_linears(model)
    model = apply_adapters(model, lora_config(rank=4, target_modules="all-linear"), torch.float32)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    apply_fp8(model, CPU)
    ((row,),) = tiny_rows(1, 1)
    logits = lambda model: model(**padded_batch([row])).logits  # noqa: E731
    anew = copy.deepcopy(model)
    keep_fp8_weights(model, forms)
    first = logits(model)
    of_copy = copy.deepcopy(model)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(model, change)()
        getattr(anew, change)()
        assert torch.equal(logits(model), logits(anew)), change
        assert torch.equal(logits(of_copy), first)
    assert bool(cached_fp8_tensors(model))


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", dict()),
        ("llama", dict(train_type="lora", lora_target_modules="q_proj,up_proj")),
        ("llama", dict(use_gradient_checkpointing=True, mlp_tiles=2, lora_dropout=0.1)),
        ("Qwen3-MoE", dict(lora_target_parameters="experts")),
        ("Qwen3-MoE", dict(train_type="lora")),
    ],
)
def test_training_with_kept_scales_is_the_same_in_the_memory_that_the_estimate_says(
    tmp_path, monkeypatch, family, settings
):
    if family == "llama":
        folder = save_tiny(tmp_path)
    else:
        folder = save_family(tmp_path, family, hidden_size=128, moe_intermediate_size=128)
    config = RunConfig(
        model_name=folder, precision="fp32", compute_dtype="fp8", compile=False, lora_rank=4,
        sharding_strategy="ddp", **dict(lora_dropout=0.0) | settings,
    )  # fmt: skip
    made, whole = Counter(), fp8._new_row_scale

    def counted(w, adapted):
        made[w.weight.data_ptr(), adapted] += 1
        return whole(w, adapted)

    monkeypatch.setattr(fp8, "_new_row_scale", counted)
    found = {}
    with process_group(CPU):
        for keeps in (True, False):
            if not keeps:
                monkeypatch.setattr("fsdp_qlora.build.keep_fp8_weights", lambda model, forms: None)
            made.clear()
            torch.manual_seed(0)
            model = build_model(config, CPU)
            optimizer = build_optimizer(model, "adamw", 1e-2)
            losses = [
                train_step(model, optimizer, [padded_batch(rows)]).loss for rows in tiny_rows(3, 4)
            ]
            found[keeps] = losses, size_of(cached_fp8_tensors(model)), Counter(made)
    (losses, size, once), (anew, none, often) = found[True], found[False]
    assert torch.equal(torch.tensor(losses), torch.tensor(anew)) and len(set(losses)) == 3
    shape = shape_from_config(read_config(folder).to_dict(), "tiny")
    assert size == resident_bytes(shape, draft_plan(config, 1))["fp8"] > none == 0
    assert set(once.values()) == {1} and len(once) == len(often) and min(often.values()) >= 3


def size_of(tensors) -> int:
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_b_is_scaled_and_rounded_in_one_launch(dtype, stored):
    b = torch.randn(96, 8).to(stored)
    for scaling in (0.0, 0.1, 1.0, 2 / 3):
        with Launches() as seen:
            scaled = _scaled(b, scaling, dtype)
        assert scaled.dtype == dtype and torch.equal(scaled, (b * scaling).to(dtype))
        assert seen.counts.keys() == {"empty_like", "mul"}
