"""Padded rows in one line on a GPU: its kernels give what sdpa gives of the padded rows; one GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SIZES = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
)
FAMILIES = {"llama": {}, "mistral": dict(sliding_window=100), "qwen3": dict(head_dim=128)}
WIDTHS = (700, 350, 513, 640, 90, 100)


def gradients(model, width: int, side: str) -> torch.Tensor:
    """All gradients of rows that are padded to a width on a side."""
    device = next(model.parameters()).device
    lengths = torch.tensor([width, width // 9, width // 2, 1])[:, None]
    ids = torch.randint(3, 97, (4, width), generator=torch.Generator().manual_seed(width))
    place = torch.arange(width)
    mask = place < lengths if side == "right" else place >= width - lengths
    model.zero_grad()
    mask = mask.to(device)
    out = model(input_ids=ids.to(device), attention_mask=mask.long(), use_cache=False)
    out.logits[mask].float().square().mean().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_one_line_agree_with_padded_rows(family, device=None):
    """fp32 to rounding; in bf16 a line may not be further from fp32 than padded rows are, nearly."""
    from torch._dynamo.utils import counters

    from fsdp_qlora.build import compile_blocks
    from fsdp_qlora.model.padding_free import apply_padding_free

    device = device or torch.device("cuda", 0)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    free = apply_padding_free(copy.deepcopy(plain), device)
    half, free_half = (copy.deepcopy(m).bfloat16() for m in (plain, free))
    compiled = copy.deepcopy(free_half)
    compile_blocks(compiled, dynamic=True)
    torch._dynamo.reset()
    graphs = []
    for width in WIDTHS:
        for side in ("right", "left"):
            expected = gradients(plain, width, side)
            assert relative_error(gradients(free, width, side), expected) < 1e-4
            rounding = relative_error(gradients(half, width, side), expected)
            for model in (free_half, compiled):
                error = relative_error(gradients(model, width, side), expected)
                print(family, width, side, error, rounding)
                assert error < 1.5 * rounding
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) <= 2  # not one for each width
