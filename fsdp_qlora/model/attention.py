"""Attention for packed rows: several rows in one line of tokens, each attending to itself alone.

`varlen` is torch's variable-length attention, registered with transformers, which has no backend for
it. Its FlashAttention kernels are told where rows begin: nothing is computed between rows and no mask
is built. Where it cannot run, `sdpa` gives the same result: transformers sees positions restart and
builds a block-diagonal causal mask (B, 1, T, T).

Rows that are not packed need neither. Padding is on the right, where causal attention does not look,
so without a mask SDPA takes its fast causal kernels (https://arxiv.org/abs/2307.08691). To know that
rows are not packed, transformers asks the GPU in every forward and waits: `rows_alone` spares that.

Shapes: B bins, T tokens of a bin, N rows of the batch, H heads, K key-value heads, D head size.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..quantization.quantize import compute_input

VARLEN, CAUSAL = "varlen", "sdpa_causal"
WITHOUT_SOFTCAP = ("sdpa", VARLEN)  # both would leave the capping of scores out in silence
WITH_SOFTCAP = {"cuda": "flex_attention", "cpu": "eager"}
ROW_WISE_LAYERS = {"full_attention", "sliding_attention"}  # others carry a state along the tokens
# torch 2.11 takes fewer key-value heads as they come; since 2.12 it wants to be told.
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
                     dropout: float = 0.0, scaling: float | None = None,
                     sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
                     max_length_q: int | None = None, **kwargs) -> tuple[Tensor, None]:
    """Causal attention within each row: (B, T, H, D) of query (B, H, T, D), key, value (B, K, T, D).

    cu_seq_lens_q (N + 1,) int32: where rows begin in the batch flattened to (B * T), and its end.
    max_length_q: tokens of the longest row. An int, as reading it from the GPU would wait for it.
    sliding_window: tokens that are seen, the present one included, as in transformers.
    Raises ValueError for a batch that does not say where its rows begin.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "a model built with --packing true needs cu_seq_lens_q and max_length_q in every batch, "
            "as collate_packed gives them; build it with --packing false for other batches")
    assert not dropout and kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    # Under autocast q and k come in fp32, for rotation is no product.
    q, k, v = (compute_input(x).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1  # -1: back to the row's first token
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                      scale=scaling, window_size=(left, 0), **GQA)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


# No function for AttentionMaskInterface: then transformers builds no mask. With one, it would ask
# the GPU in every forward whether positions restart, and wait for the answer.
AttentionInterface.register(VARLEN, varlen_attention)
AttentionInterface.register(CAUSAL, sdpa_attention_forward)


@contextmanager
def rows_alone(config: PretrainedConfig) -> Iterator[None]:
    """Within it, `sdpa` of a model whose every layer sees all tokens before needs no mask.

    For forwards without attention_mask and position_ids alone.
    """
    config = config.get_text_config()
    if config._attn_implementation != "sdpa" or has_windows(config) or not takes_backends(type(config)):
        yield
        return
    config._attn_implementation = CAUSAL
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@lru_cache
def takes_backends(kind: type[PretrainedConfig]) -> bool:
    """Whether such a model's code looks for its attention under a name; Falcon's knows sdpa alone."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    return bool(getattr(model, "_supports_attention_backend", False))


def has_windows(config: PretrainedConfig) -> bool:
    """True if some layers see less than all tokens before."""
    layers = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) and "full_attention" not in layers
    return bool(window or layers - {"full_attention"})


def choose_attention(wanted: str, packing: bool, config: PretrainedConfig, device: torch.device,
                     dtype: torch.dtype) -> tuple[str, str]:
    """The implementation to build a model with, and the reason.

    wanted: --attn_implementation. `auto` is sdpa, or one that can cap scores. Of `sdpa`, packed rows
    take `varlen` where it runs.
    Raises ValueError where packed rows would not be kept apart, or scores not be capped.
    """
    config = config.get_text_config()
    if packing: check_packing(config)
    caps = bool(getattr(config, "attn_logit_softcapping", None))
    if wanted == "auto" and caps:
        return WITH_SOFTCAP[device.type], f"{config.model_type} caps its attention scores"
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if wanted == "auto" and not getattr(model, "_supports_sdpa", True):
        return "eager", f"{config.model_type} has no sdpa"
    if wanted == "auto": wanted = "sdpa"
    reason = why_not_varlen(config, device, dtype)
    if wanted == VARLEN and reason:
        raise ValueError(f"--attn_implementation {VARLEN}: {reason}; use sdpa")
    if caps and wanted in WITHOUT_SOFTCAP:
        raise ValueError(f"--attn_implementation {wanted}: {config.model_type} caps its attention "
                         "scores, which this leaves out; use eager or flex_attention")
    if not packing: return wanted, "--attn_implementation"
    if wanted not in ("sdpa", VARLEN): return wanted, "--attn_implementation; a mask keeps rows apart"
    if reason: return "sdpa", f"a mask keeps packed rows apart: {VARLEN} {reason}"
    return VARLEN, "packed rows, without a mask"


def check_packing(config: PretrainedConfig):
    """ValueError for a model in which packed rows would see each other."""
    layers = set(getattr(config, "layer_types", None) or ()) - ROW_WISE_LAYERS
    if layers or not takes_backends(type(config)):
        what = f" has layers of {', '.join(sorted(layers))}, which" if layers else ""
        raise ValueError(f"--packing true: {config.model_type}{what} can't keep packed rows apart; "
                         "use --packing false")


def why_not_varlen(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What keeps torch's variable-length attention from running; empty if nothing does."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type != "cuda": return "needs a GPU"
    if torch.cuda.get_device_capability(device) < (8, 0): return "needs an Ampere GPU or newer"
    if dtype not in (torch.bfloat16, torch.float16): return "computes in 16 bits only"
    if size % 8 or size > 256: return f"has no kernel for heads of {size}"
    if getattr(config, "kv_lora_rank", None): return "needs keys and values of one size"
    if getattr(config, "attention_dropout", 0.0): return "has no attention dropout"
    return ""
