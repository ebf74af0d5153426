"""Formats and loading on a GPU: the values of the CPU, through pinned memory and the cache."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.build import build_model
from fsdp_qlora.choices import FORMATS
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.loading import rank_pieces
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("absmax_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("quant_type", FORMATS)
def test_bytes_of_the_cpu_give_the_same_values_and_rounding_loses_as_much(quant_type, absmax_dtype):
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    packed, scales = quantize_rows(weight, quant_type, absmax_dtype)
    exact = dequantize_rows(packed, scales, 1024, quant_type, torch.float32)
    moved = dequantize_rows(packed.cuda(), scales.cuda(), 1024, quant_type, torch.float32)
    torch.testing.assert_close(moved.cpu(), exact, rtol=1e-5, atol=1e-7)
    ours = dequantize_rows(
        *quantize_rows(weight.cuda(), quant_type, absmax_dtype), 1024, quant_type, torch.float32
    ).cpu()
    assert (ours - exact).norm() < 0.05 * (exact - weight).norm() + 1e-6


def loaded(folder, **settings) -> list[torch.Tensor]:
    """The bytes of every base parameter."""
    device = torch.device("cuda", 0)
    base = dict(model_name=folder, precision="bf16", lora_rank=2, compile=False)
    config = RunConfig(**base | settings)
    with process_group(device):
        model = build_model(config, device)
        return [
            t.contiguous().view(torch.uint8).cpu()
            for piece in rank_pieces(model)
            for t in (piece.local, piece.absmax)
            if t is not None
        ]


@pytest.mark.parametrize(
    "form",
    [dict(), dict(absmax_dtype="int8"), dict(quant="int8"), dict(quant="hqq", n_bits=3)],
    ids=str,
)
def test_pieces_readers_and_the_cache_give_the_same_bytes(tmp_path, monkeypatch, form):
    folder, cache = (
        save_tiny(tmp_path / "model", hidden_size=512, intermediate_size=1024),
        str(tmp_path / "cache"),
    )
    whole = loaded(folder, **form)
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", 5000)  # many pieces, few buffers
    for settings in (
        dict(loading_workers=8),
        dict(quantized_cache=cache),
        dict(quantized_cache=cache, loading_workers=3),
    ):
        again = loaded(folder, **form, **settings)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True)), settings
