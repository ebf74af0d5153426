"""The adapted layer on a GPU: the adapter inside of the unpacked weight, layers of one input joined,
dropout from a seed.
"""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_qlora.adapters.dropout import (
    drop_inputs,
    dropout_seed,
    dropped,
    dropped_product,
    product_of_dropped,
)
from fsdp_qlora.adapters.lora_ops import (
    adapted_linear,
    adapted_linear_backward,
    shared_inputs_backward,
)
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.integrations.reference_pass import compute_as_trained
from fsdp_qlora.quantization.formats import FrozenWeight, dequantize_rows, quantize_rows
from fsdp_qlora.quantization.kernels import unpack_adapted
from tests.test_adapters import (
    test_gradients_under_dropout_are_those_of_the_formula_with_the_same_mask as formula_under_dropout,
)
from tests.test_shared_inputs import adapted_model, gradients
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
N, R, SCALING = 1000, 64, 0.25
SHAPES = [(512, 256), (200, 1024), (1024, 320)]  # (O, I)


def layer(rows: int, inputs: int, seed: int = 0):
    """x, packed W, absmax, A, B, dY and the fp32 W + scaling B A."""
    torch.manual_seed(seed)
    x, dy = torch.randn(N, inputs, device="cuda"), torch.randn(N, rows, device="cuda")
    packed, absmax = quantize_rows(torch.randn(rows, inputs, device="cuda") / inputs**0.5)
    a = torch.randn(R, inputs, device="cuda") / inputs**0.5
    b = torch.randn(rows, R, device="cuda") / 16
    whole = dequantize_rows(packed, absmax, inputs, "nf4", torch.float32) + SCALING * b @ a
    return x.bfloat16(), packed, absmax, a, b, dy.bfloat16(), whole


def error(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("rank", [8, 24, 64])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_the_weight_with_its_adapter_is_rounded_once(rows, inputs, quant_type, rank):
    _, _, _, a, b, _, _ = layer(rows, inputs)
    a, b = a[:rank], b[:, :rank]
    packed, absmax = quantize_rows(
        torch.randn(rows, inputs, device="cuda") / inputs**0.5, quant_type
    )
    whole = dequantize_rows(packed, absmax, inputs, quant_type, torch.float32) + SCALING * b @ a
    found = unpack_adapted(FrozenWeight(packed, absmax, inputs, quant_type), a, b, SCALING)
    once = error(whole.bfloat16(), whole)
    assert found.shape == whole.shape and error(found, whole) < 1.1 * once + 2**-11


@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_outputs_and_gradients_are_as_near_to_fp32_as_with_separate_products(rows, inputs):
    x, packed, absmax, a, b, dy, whole = layer(rows, inputs)
    xa, form = x @ a.bfloat16().t(), (SCALING, inputs, "nf4", "")
    args = (x, x, xa, packed, absmax, None)
    y = x.float() @ whole.t()
    together, apart = (adapted_linear(*args, each, b, *form) for each in (a, None))
    assert error(together, y) < 1.2 * error(apart, y)
    dx, da, db = adapted_linear_backward(
        dy, x, xa, packed, absmax, a, b, None, SCALING, 0.0, *form[1:]
    )
    assert error(dx, dy.float() @ whole) < 2**-7
    assert error(da, (SCALING * dy.float() @ b).t() @ x.float()) < 2**-7
    assert error(db, SCALING * dy.float().t() @ (x.float() @ a.t())) < 2**-7


@pytest.mark.parametrize("product_dtype, bound", [("", 2**-7), ("fp8", 0.06)])
@pytest.mark.parametrize("count", [2, 3])
def test_joined_backward_is_the_sum_of_each(product_dtype, bound, count):
    layers = [layer(rows, 512, seed) for seed, rows in enumerate((256, 128, 1024)[:count])]
    x = layers[0][0]
    _, packed, absmax, a, b, dy, whole = (list(column) for column in zip(*layers, strict=True))
    xa = [x @ each.bfloat16().t() for each in a]
    found = shared_inputs_backward(
        dy, x, xa, packed, absmax, a, b, [SCALING] * count, 512, "nf4", product_dtype
    )
    expected = sum(d.float() @ w for d, w in zip(dy, whole, strict=True))
    assert error(found[0], expected) < bound
    for i in range(count):
        alone = adapted_linear_backward(
            dy[i],
            x,
            xa[i],
            packed[i],
            absmax[i],
            a[i],
            b[i],
            None,
            SCALING,
            0.0,
            512,
            "nf4",
            product_dtype,
        )
        assert error(found[1 + i], alone[1]) < 1e-3
        assert error(found[1 + count + i], alone[2]) < 1e-3


@pytest.mark.parametrize(
    "policy, dropout", [("keep_linears", 0.0), ("recompute_all", 0.0), ("recompute_all", 0.5)]
)
def test_a_compiled_model_gives_the_gradients_of_the_plain_one(policy, dropout, tmp_path):
    model = adapted_model(save_tiny(tmp_path), policy, "all-linear", dropout).cuda()
    plain = gradients(copy.deepcopy(model))
    compile_blocks(model)
    torch.testing.assert_close(gradients(model), plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("product_dtype", ["", "fp8"])
def test_what_a_young_adapter_gives_is_not_lost_in_rounding(product_dtype):
    """Its part is far below half a step of the output's bf16; on the average it must be there."""
    torch.manual_seed(0)
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    packed, absmax = quantize_rows(torch.randn(2048, 512, device="cuda") / 512**0.5)
    a, b = torch.randn(R, 512, device="cuda") / 512**0.5, 1e-4 * torch.randn(2048, R, device="cuda")
    args = (x, x, x @ a.bfloat16().t(), packed, absmax, None, a)
    found, without = (
        adapted_linear(*args, each, 1.0, 512, "nf4", product_dtype).double()
        for each in (b, torch.zeros_like(b))
    )
    part = (x.double() @ a.double().t()) @ b.double().t()
    assert part.std() < 2**-10 * without.std()
    share = ((found - without) * part).sum() / part.square().sum()
    assert share.item() == pytest.approx(1, abs=0.1)


# ---- dropout -----------------------------------------------------------------------------------


def seed_of(value: int):
    return torch.tensor(value, device="cuda")


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, device="cuda", dtype=dtype)


def within(share, expected: float, count: int) -> bool:
    """Whether a share of so many draws is as near to what is expected as four standard errors."""
    return abs(share.item() - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_seed_says_which_share_of_the_inputs_is_dropped(dtype, p):
    torch.manual_seed(0)
    x = torch.randn(1003, 517, device="cuda").to(dtype)
    keep, other = (dropped(torch.ones_like(x), seed_of(s), p) != 0 for s in (2**61 + 1, 2**61 + 2))
    assert within(keep.double().mean(), 1 - p, x.numel())
    assert within((keep == other).double().mean(), p**2 + (1 - p) ** 2, x.numel())
    for each in (x, x.t().contiguous().t()):
        found = dropped(each, seed_of(2**61 + 1), p)
        assert torch.equal(found, (x.float() * keep * (1 / (1 - p))).to(dtype))
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    (dx,) = torch.autograd.grad(drop_inputs(leaf, seed_of(2**61 + 1), p), leaf, dy)
    assert torch.equal(dx, dropped(dy, seed_of(2**61 + 1), p))


def test_no_two_rows_or_columns_and_no_two_seeds_drop_alike():
    """Of two million pairs, none is correlated by more than 7 standard errors."""
    centred = torch.cat([dropped(ones(1024, 1024), seed_of(s), 0.5) - 1 for s in (0, 1)])
    for rows in (centred, centred.t()):
        correlations = rows @ rows.t() / rows.shape[1]
        assert correlations.fill_diagonal_(0).abs().max() < 7 / rows.shape[1] ** 0.5


def test_more_inputs_than_32_bits_count_are_dropped_to_the_last():
    found, part = dropped(ones(2**17 + 1, 2**14, dtype=torch.bfloat16), seed_of(0), 0.5), 2**20
    found = found.view(-1)
    keep, first = found[-part:] == 2, found[:part] == 2
    assert ((found[-part:] == 0) | keep).all()
    assert within(keep.double().mean(), 0.5, part)
    assert within((keep == first).double().mean(), 0.5, part)


def test_a_replayed_graph_draws_the_seeds_of_the_host_and_drops_by_them():
    x, given, graph = ones(64, 256), seed_of(3), torch.cuda.CUDAGraph()

    def draw():
        seed = dropout_seed(x, x)
        return seed, dropped(x, seed, 0.3), dropped(x, given, 0.3)

    torch.manual_seed(0)
    expected = [draw() for _ in range(3)]
    with torch.cuda.graph(graph):
        static = draw()
    torch.manual_seed(0)
    for seed, by_seed, by_given in expected:
        graph.replay()
        assert torch.equal(static[0], seed) and torch.equal(static[1], by_seed)
        assert torch.equal(static[2], by_given)
    assert len({seed.item() for seed, *_ in expected}) == 3
    given.fill_(4)
    graph.replay()
    assert torch.equal(static[2], dropped(x, seed_of(4), 0.3))


@pytest.mark.parametrize("rank", [4, 16, 64, 128])
@pytest.mark.parametrize("n, width", [(1000, 512), (70, 200), (4096, 4096)])
def test_products_drop_the_places_that_the_seed_says(n, width, rank):
    torch.manual_seed(0)
    x, a, y = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((n, width), (rank, width), (n, rank))
    )
    seed = seed_of(2**61 + 3)
    keep = dropped(ones(n, width), seed, 0.3).double()
    found = product_of_dropped(x, a, seed, 0.3)
    assert found.shape == (n, rank) and error(found, (x * keep) @ a.double().t()) < 2**-8
    found = dropped_product(y, a, seed, 0.3)
    expected = (y.double() @ a.double()) * keep
    assert not found[keep == 0].any() and error(found, expected) < 2**-8
    assert (expected[found == 0].abs() < 1e-5).all()  # but for a sum that is zero by itself


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_gradients_under_dropout_are_those_of_the_formula(base):
    formula_under_dropout(base, "cuda", tolerance=1e-4)


@pytest.mark.parametrize("compiled, dropout", [(False, 0.0), (False, 0.5), (True, 0.0)])
def test_a_model_whose_adapters_are_off_has_the_bits_of_one_whose_adapters_are_zero(
    compiled, dropout, tmp_path
):
    """As the reference policy of DPO: W unpacked without an adapter would be rounded otherwise."""
    folder = save_tiny(tmp_path, hidden_size=256, intermediate_size=512)
    model = adapted_model(folder, "recompute_all", "all-linear", dropout).to("cuda", torch.bfloat16)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.zero_()
    torch._dynamo.reset()
    if compiled:
        compile_blocks(model, dynamic=True)
        compute_as_trained(model)
    ids = torch.arange(96, device="cuda").view(2, 48)
    policy = model(input_ids=ids).logits.detach()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, policy)
