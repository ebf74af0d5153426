"""FlashAttention 4 as an operator: causal attention of rows of one length, and of packed rows.

Its kernels come from the package flash-attn-4 (`pip install "fsdp_qlora[fa4]"`), which compiles them
at first use: https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute. torch has a switch
for it, `activate_flash_attention_impl("FA4")`, but torch 2.11's does not fit the package's current
version. So this is an operator of our own: opaque to torch.compile, and one whose output an activation
policy can keep.

What the kernels are compiled for are dtype, head size, query heads per key-value head, and whether
there are windows and borders. Lengths are not part of it, as long as the longest row is not told: more
than 256 rows in a batch, or rows shorter than a tile, are the only other cases.

Shapes: B rows, T tokens of a row, or N tokens of all packed rows; H heads, K key-value heads,
D head size.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor

from ..config.run import has_flash_attention_4

GPUS = (9, 10, 11)  # major compute capabilities: Hopper and data-centre Blackwell
_LEAST_HEAD = 64


@cache
def kernels():
    """The module with the package's kernels; what they are compiled to is kept beside torch's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", f"{cache_dir()}/flash_attention_4")
    # Of its own compiler, at each kernel; it is no fault.
    warnings.filterwarnings("ignore", "Argument aux_data ", UserWarning)
    from flash_attn.cute import interface

    return interface


@torch.library.custom_op("fsdp_qlora::flash_attention_4", mutates_args=())
def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor | None, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention's output, shaped as q, and its log-sum-exp in fp32, (B, H, T) or (H, N).

    q (B, T, H, D), k and v (B, T, K, D); with borders q (N, H, D), k and v (N, K, D).
    borders: int32 (rows + 1,), where rows begin among the N tokens, and their end; rows may be empty.
    scale: of the scores, D ** -0.5 if None. window: tokens that are seen, the present one included.
    """
    with torch.cuda.device_of(q):
        out, lse, *_ = kernels()._flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            softmax_scale=scale,
            causal=True,
            window_size_left=_left_of(window),
            return_lse=True,
        )
    return out, lse


@torch.library.custom_op("fsdp_qlora::flash_attention_4_backward", mutates_args=())
def flash_attention_4_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    borders: Tensor | None,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the output's; bit-equal in repeats if torch was told to be."""
    dq, dk, dv = map(_empty_as, (q, k, v))
    with torch.cuda.device_of(q):
        kernels()._flash_attn_bwd(
            q,
            k,
            v,
            out,
            d_out.contiguous(),
            lse,
            softmax_scale=scale,
            causal=True,
            window_size_left=_left_of(window),
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
        )
    return dq, dk, dv


def _left_of(window: int | None) -> int | None:
    """How many tokens before the present one are seen."""
    return None if window is None else window - 1


def _empty_as(x: Tensor) -> Tensor:
    """A new tensor of x's shape, contiguous whether x is or not."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@flash_attention_4.register_fake
def _(q, k, v, borders, scale, window):
    tokens, heads = q.shape[:-2], q.shape[-2]
    lse = (*tokens[:-1], heads, tokens[-1])
    return _empty_as(q), q.new_empty(lse, dtype=torch.float32)


@flash_attention_4_backward.register_fake
def _(d_out, q, k, v, out, lse, borders, scale, window):
    return _empty_as(q), _empty_as(k), _empty_as(v)


def _save(ctx, inputs, output):
    *tensors, borders, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output, borders)
    ctx.set_materialize_grads(False)  # nothing asks for the gradient of lse


def _gradients(ctx, d_out, _):
    gradients = flash_attention_4_backward(d_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *gradients, None, None, None


flash_attention_4.register_autograd(_gradients, setup_context=_save)


# ---- whether it runs ---------------------------------------------------------------------------


def has_kernels_for(device: torch.device) -> bool:
    """Whether the package has kernels for this GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in GPUS


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    heads_per_kv: int,
    windows: tuple[int | None, ...],
    packed: bool,
) -> str:
    """What keeps it from running on a GPU, after a trial; empty if nothing does."""
    if not has_kernels_for(device):
        return "needs a Hopper GPU or a Blackwell GPU of a data centre"
    if not has_flash_attention_4():
        return 'is not installed (pip install "fsdp_qlora[fa4]")'
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if (
        head_size % 8
        or head_size < _LEAST_HEAD
        or head_size > 256
        or not (hopper or head_size <= 128 or head_size == 256)
    ):
        return f"has no kernel for heads of {head_size} on this GPU"
    return trial(device, dtype, head_size, heads_per_kv, windows, packed)


@cache
def trial(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    heads_per_kv: int,
    windows: tuple[int | None, ...],
    packed: bool,
) -> str:
    """Compile the kernels of a run and use them once; what goes wrong, or nothing.

    They would be compiled in the first step anyway. A package that is broken, or too new or too old for
    this driver, is found before any weight is read.
    """
    rows, tokens = ((1024,), 512) if packed else ((2, 512), 512)
    q, k = (
        torch.zeros(*rows, heads, head_size, dtype=dtype, device=device)
        for heads in (2 * heads_per_kv, 2)
    )
    borders = (
        torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32, device=device) if packed else None
    )
    try:
        for window in windows:
            out, lse = flash_attention_4(q, k, k, borders, None, window)
            made = flash_attention_4_backward(out, q, k, k, out, lse, borders, None, window)
            if not all(x.isfinite().all() for x in (out, lse, *made)):
                return "gives no numbers here"
    except Exception as error:  # of an import, a compiler or a kernel, which share no class
        first = str(error).strip().splitlines() or [""]
        return f"does not run here: {type(error).__name__}: {first[0][:200]}"
    return ""
