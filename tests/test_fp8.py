"""Products of frozen weights in fp8: close to full precision, refused where impossible."""
from __future__ import annotations

import pytest
import torch

from fsdp_qlora.config import RunConfig
from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.formats import dense_weight, quantize_rows
from tests.tiny import padded_batch, save_tiny, tiny_rows

# e4m3 has 3 bits of mantissa: a value is off by up to 2^-4, and by 2^-4 / sqrt(3) in the mean square;
# both factors of a product are rounded, and errors of a sum are independent.
ROUNDING = 2**-4 / 3**0.5 * 2**0.5


def relative(ours, reference) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


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
    dense = dense_weight(packed, absmax, 256, "nf4", torch.float32)
    weight, scales = (packed, absmax) if quantized else (dense, None)
    y = fp8.forward_product(x, weight, scales, "nf4")
    dx = fp8.backward_product([dy], [weight], [scales], 256, "nf4")
    for ours, reference in ((y, x @ dense.t()), (dx, dy @ dense)):
        assert relative(ours, reference) < ROUNDING
        assert all(relative(o, r) < 2 * ROUNDING for o, r in zip(ours, reference, strict=True))


def adapter(rank: int, size: float):
    """xA (N, R), B (O, R), dxA (N, R), A (R, I); B and dxA of a given size."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return normal(40, rank), size * normal(96, rank), size * normal(40, rank), normal(rank, 256) / 16


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("rank", [16, 8, 24])
def test_the_adapters_part_is_within_rounding_whatever_its_size(rank, size):
    bound = 2 * ROUNDING
    xa, b, dxa, a = adapter(rank, size)
    x, dy, weight = torch.zeros(40, 256), torch.zeros(40, 96), torch.ones(96, 256)
    x[:, 0], dy[:, 0] = 4, 4  # they set the scale, and their product is known
    y = fp8.forward_product(x, weight, None, "", xa, b, 0.25) - x @ weight.t()
    assert relative(y, 0.25 * xa @ b.t()) < bound
    dx = fp8.backward_product([dy], [weight], [None], 256, "", dxa, a) - dy @ weight
    assert relative(dx, dxa @ a) < bound


def test_an_adapter_larger_than_the_weight_leaves_the_sum_within_rounding():
    (xa, b, dxa, a), generator = adapter(16, 1.0), torch.Generator().manual_seed(2)
    x, dy, weight = (torch.randn(shape, generator=generator) for shape in
                     ((40, 256), (40, 96), (96, 256)))
    y = fp8.forward_product(x, weight, None, "", xa, 30 * b, 1.0)
    assert relative(y, x @ weight.t() + 30 * xa @ b.t()) < 1.5 * ROUNDING
    dx = fp8.backward_product([dy], [weight], [None], 256, "", 300 * dxa, a)
    assert relative(dx, dy @ weight + 300 * dxa @ a) < 1.5 * ROUNDING


def test_layers_of_one_input_are_the_sum_of_each(layer):
    x, dy, packed, absmax = layer
    together = fp8.backward_product([dy, 3 * dy], [packed, packed], [absmax, absmax], 256, "nf4")
    dense = dense_weight(packed, absmax, 256, "nf4", torch.float32)
    assert relative(together, 4 * dy @ dense) < ROUNDING


def test_a_row_of_zeros_stays_zero(layer):
    x, _, packed, absmax = layer
    x[3], absmax[5] = 0, 0
    y = fp8.forward_product(x, packed, absmax, "nf4")
    assert torch.isfinite(y).all() and not y[3].any() and not y[:, 5].any()


def test_training_in_fp8_follows_training_in_full_precision(tmp_path):
    from fsdp_qlora.build import build_model
    from fsdp_qlora.dist import process_group
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step
    folder, steps, losses = save_tiny(tmp_path), tiny_rows(1, 4) * 8, {}
    with process_group(torch.device("cpu")):
        for dtype in ("auto", "fp8"):
            config = RunConfig(model_name=folder, precision="fp32", lora_rank=4, lora_dropout=0.0,
                               compute_dtype=dtype)
            model = build_model(config, torch.device("cpu"))
            optimizer = build_optimizer(model, "adamw", 1e-2)
            losses[dtype] = torch.tensor([train_step(model, optimizer, [padded_batch(rows)]).loss
                                          for rows in steps])
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.1
    torch.testing.assert_close(losses["fp8"], losses["auto"], rtol=2e-2, atol=0)
    assert not torch.equal(losses["fp8"], losses["auto"])


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
    from fsdp_qlora.build import build_model
    from fsdp_qlora.dist import process_group
    folder, device, found = save_tiny(tmp_path, hidden_size=64, intermediate_size=128), \
        torch.device("cpu"), {}
    ((row,),) = tiny_rows(steps=1, rows_per_step=1)
    with process_group(device, 1):
        for kind in ("bf16", "fp8"):
            config = RunConfig(model_name=folder, train_type=train_type, compute_dtype=kind,
                               lora_target_modules="q_proj", lora_rank=8, lora_dropout=0.0,
                               sharding_strategy="ddp", device="cpu")
            model = build_model(config, device)
            layers = {getattr(m, "product_dtype", None) for n, m in model.named_modules()
                      if n.endswith(("q_proj", "up_proj"))}
            assert layers <= ({"fp8"} if kind == "fp8" else {"", None})
            for name, p in trainable_parameters(model).items():
                if "lora_B" in name: torch.nn.init.constant_(p, 0.01)
            model(**padded_batch([row])).loss.backward()
            found[kind] = torch.cat([p.grad.flatten() for p in trainable_parameters(model).values()])
    assert 1e-4 < relative(found["fp8"], found["bf16"]) < 8 * ROUNDING
