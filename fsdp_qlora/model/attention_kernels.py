"""Attention's kernels under the names that transformers knows them by, for padded and packed rows.

`varlen` is torch's variable-length attention, registered with transformers, which has no backend for
it. Its FlashAttention kernels are told where rows begin: nothing is computed between rows and no mask
is built. FlashAttention 4 (flash_attention_4.py) is `fa4`, and `fa4_packed` for packed rows. `fa4` leaves
to sdpa what it can't do: masks of rows padded on the left, cached keys.

`torch_fa` is torch's FlashAttention of rows alone, for what sdpa would need masks of T x T for: sliding
windows. Models with attention sinks take any of these kernels (sinks.py), and packed `torch_fa_packed`,
which has kernels for the CPU too. Values of a smaller size than keys, as latent attention has them, are
filled up with zeros, as transformers does for its own flash kernels.

Rows that another trainer padded are put in one line (padding_free.py); their attention has the kernels for
packed rows, and sdpa of the rows one below the other where those can't run.

Over long rows a backward's workspace is the peak of a step (`apply_attention_tiles`).

Shapes: B bins, T tokens of a bin, N rows of the batch, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..choices import POLICIES
from ..quantization.quantize import compute_input
from . import flash_attention_4
from .blocks import decoder_blocks
from .sinks import attention_with_sinks

VARLEN, FA4_PACKED = "varlen", "fa4_packed"  # for packed rows
TORCH_FA, TORCH_FA_PACKED = "torch_fa", "torch_fa_packed"  # by kernels that come with torch
FA4 = "fa4"
# sdpa of padded rows, and of rows in one line by kernels that are told where rows begin. BY_ROWS is sdpa
# here too: of the rows one below the other.
BY_ROWS = "by_rows"
PADDING_FREE = {name: f"padding_free_{name}" for name in (VARLEN, FA4_PACKED, BY_ROWS)}
UNMASKED = {  # the same where no mask is asked for
    "sdpa": "sdpa_causal",
    **{name: f"{name}_causal" for name in (FA4, TORCH_FA, *PADDING_FREE.values())},
}
# torch 2.11 takes fewer key-value heads as they come; since 2.12 it wants to be told.
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _packed_attention(
    name: str,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention within each row: (B, T, H, D) of query (B, H, T, D), key, value (B, K, T, D).

    name: of the kernels, VARLEN, FA4_PACKED or TORCH_FA_PACKED.
    cu_seq_lens_q (N + 1,) int32: where rows begin in the batch flattened to (B * T), and its end.
    max_length_q: tokens of the longest row. An int, as reading it from the GPU would wait for it.
    sliding_window: tokens that are seen, the present one included, as in transformers.
    s_aux (H,): the layer's sinks.
    Raises ValueError for a batch that does not say where its rows begin.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "a model built with --packing true needs cu_seq_lens_q and max_length_q in every batch, "
            "as collate_packed gives them; build it with --packing false for other batches"
        )
    assert not dropout and kwargs.get("softcap") is None
    q, k, v = (x.flatten(0, 1) for x in _token_major(query, key, value))
    rows = cu_seq_lens_q, max_length_q
    out = _attend(name, q, k, v, s_aux, *rows, scaling, sliding_window)
    return out[..., : value.shape[-1]].unflatten(0, (query.shape[0], query.shape[2])), None


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    borders: Tensor | None,
    longest: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of rows (B, T, H, D), or of packed rows (N, H, D) between borders, by `name`."""
    fa4 = name in (FA4, FA4_PACKED)
    if sinks is not None or not fa4 and name != VARLEN and not q.is_cuda:
        rows = [] if borders is None else [borders, borders]
        sinks = _sinks(sinks, q)
        return attention_with_sinks(q, k, v, sinks, rows, [longest] * 2, scale, window, fa4)[0]
    if fa4:  # not told the longest row: some lengths would be compiled for
        return flash_attention_4.flash_attention_4(q, k, v, borders, scale, window)[0]
    if borders is None:
        borders = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * longest
        out = _varlen(*(x.flatten(0, 1) for x in (q, k, v)), borders, longest, scale, window)
        return out.unflatten(0, q.shape[:2])
    return _varlen(q, k, v, borders, longest, scale, window)


def _varlen(q, k, v, borders: Tensor, longest: int, scale: float | None, window: int | None):
    """torch's FlashAttention of packed rows."""
    rows, seen = (borders, borders, longest, longest), (_left_of(window), 0)
    return varlen_attn(q, k, v, *rows, scale=scale, window_size=seen, **GQA)


def _sinks(given: Tensor | None, q: Tensor) -> Tensor:
    """A layer's sinks; of one without, sinks that take no share."""
    return q.new_full((q.shape[-2],), -torch.inf) if given is None else given


def _left_of(window: int | None) -> int:
    """How many tokens before the present one torch's kernels see; -1: back to the row's first."""
    return -1 if window is None else window - 1


def _token_major(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Each (B, T, H, D) of (B, H, T, D); values of a smaller size are filled up with zeros.

    Under autocast q and k come in fp32: rotation is no product. A token's heads are put side by side,
    where a rotation that joins halves has not left them so (gpt-oss): kernels lay out their output as q,
    and the layer behind would keep a copy of it in the order of tokens.
    """
    if more := query.shape[-1] - value.shape[-1]:
        value = torch.nn.functional.pad(value, (0, more))
    return [compute_input(x).transpose(1, 2).contiguous() for x in (query, key, value)]


def attend_span(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    start: int,
    row: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of a span of queries over the keys up to its end: (B, T', H, D).

    query (B, H, T', D): of tokens start to start + T' of rows of `row` tokens; key, value (B, K, start + T',
    D). cu_seq_lens_q, max_length_q: as in packed attention, of whole rows; None where each row is alone.
    """
    assert not kwargs.get("dropout") and kwargs.get("softcap") is None
    length, end = query.shape[2], key.shape[2]
    without_kernels = not query.is_cuda or compute_input(query).dtype == torch.float32
    if s_aux is None and without_kernels and cu_seq_lens_q is None and sliding_window is None:
        seen = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    if cu_seq_lens_q is None:
        rows = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        cu_seq_lens_q, max_length_q = rows * row, row
    q, k, v = (x.flatten(0, 1) for x in _token_major(query, key, value))
    borders = [span_borders(cu_seq_lens_q, row, *span) for span in ((start, end), (0, end))]
    longest = [min(max_length_q or row, length), min(max_length_q or row, end)]
    # Queries and keys of a row end at the same token, which is where the kernels' causal masks begin.
    if s_aux is not None or without_kernels:
        sinks = _sinks(s_aux, q)
        out, _ = attention_with_sinks(
            q, k, v, sinks, borders, longest, scaling, sliding_window, fa4=False
        )
    else:
        window = (_left_of(sliding_window), 0)
        out = varlen_attn(q, k, v, *borders, *longest, scale=scaling, window_size=window, **GQA)
    return out[..., : value.shape[-1]].unflatten(0, (query.shape[0], length)), None


def span_borders(borders: Tensor, row: int, start: int, end: int) -> Tensor:
    """Where packed rows begin among tokens start to end of each bin of `row` tokens, flattened.

    borders (N + 1,): where they begin in whole bins. A row without such a token has none here.
    """
    bins, place = borders // row, borders % row
    return bins * (end - start) + (place.clamp(start, end) - start)


def _attention_of_rows(
    name: str,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of rows of one length, (B, T, H, D), by FlashAttention 4 or torch's kernels.

    name: of the kernels, FA4 or TORCH_FA.
    With a mask, dropout or keys of tokens before (a cache) it is sdpa's, or eager where there are sinks.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or dropout or not causal or query.shape[2] != key.shape[2]:
        masked = sdpa_attention_forward if s_aux is None else _eager_attention
        return masked(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    assert kwargs.get("softcap") is None
    q, k, v = _token_major(query, key, value)
    out = _attend(name, q, k, v, s_aux, None, q.shape[1], scaling, sliding_window)
    return out[..., : value.shape[-1]], None


def _padding_free_attention(
    name: str,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of rows in one line by `name`, a key of PADDING_FREE, or where no borders are told, sdpa's.

    Flash kernels leave fp32 and dropout to sdpa of the rows one below the other.
    """
    if attention_mask is not None or kwargs.get("cu_seq_lens_q") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    fits = compute_input(query).dtype in (torch.bfloat16, torch.float16)
    if name == BY_ROWS or not fits or kwargs.get("dropout"):
        return _attention_by_rows(module, query, key, value, **kwargs)
    return _packed_attention(name, module, query, key, value, None, **kwargs)


def _attention_by_rows(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """`_packed_attention` by sdpa, of the rows one below the other and padded on the right.

    Causal attention does not look there, so only a window needs a mask, of the longest row.
    """
    assert kwargs.get("softcap") is None and kwargs.get("position_bias") is None
    bins, tokens = query.shape[0], query.shape[2]
    starts, ends = cu_seq_lens_q.long()[:-1], cu_seq_lens_q.long()[1:]
    offsets = torch.arange(max_length_q, device=query.device)
    places = starts[:, None] + offsets
    places = places.where(places < ends[:, None], starts[:, None]).clamp(max=bins * tokens - 1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2) for x in (query, key, value))
    seen = None
    if sliding_window:
        behind = offsets[:, None] - offsets
        seen = ((behind >= 0) & (behind < sliding_window))[None, None]
    out, _ = sdpa_attention_forward(module, q, k, v, seen, **kwargs)  # (N, L, H, D)
    line = torch.arange(bins * tokens, device=query.device)
    row = torch.searchsorted(ends, line, right=True)
    return out[row, line - starts[row]].unflatten(0, (bins, tokens)), None


def _eager_attention(module, query, key, value, attention_mask: Tensor | None, **kwargs):
    """The eager attention of the model's own code, under a mask that is boolean or added."""
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(
            ~attention_mask, lowest
        )
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query, key, value, attention_mask, **kwargs)


def in_tiles(
    attend: Callable,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """`attend`, for some key-value heads and their queries after the others where a module says so.

    Heads don't meet in attention, so the result is the same.
    """
    tiles = getattr(module, "attention_tiles", 1)
    while key.shape[1] % tiles:
        tiles -= 1
    by_head = attention_mask is not None and attention_mask.shape[1] > 1
    # Sinks are of all heads. Eager code, which masks and dropout need then, reads the module's own.
    sinks = kwargs.get("s_aux")
    is_eager = sinks is not None and (attention_mask is not None or bool(kwargs.get("dropout")))
    if tiles == 1 or by_head or is_eager or kwargs.get("position_bias") is not None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    kwargs.pop("s_aux", None)
    parts = zip(*(x.chunk(tiles, 1) for x in (query, key, value)), strict=True)
    own = [{}] * tiles if sinks is None else [dict(s_aux=part) for part in sinks.chunk(tiles)]
    outs = [
        attend(module, *part, attention_mask, **kwargs, **sink)[0]
        for part, sink in zip(parts, own, strict=True)
    ]
    return torch.cat(outs, 2), None


def apply_attention_tiles(model: nn.Module, tiles: int, policies: list[str]) -> nn.Module:
    """Let attention take `tiles` groups of key-value heads one after the other, in place.

    In the blocks whose MLP may be in tiles, by their activation policies: others would keep what it gives
    twice, in parts and joined.
    Flash kernels sum dQ in fp32 in their backward and, where heads share keys and values, make dK and dV
    for each of them: four times the size of q in Llama 3.1 8B, of one group at a time then. Attention
    of other kinds, such as eager, stays whole; layers with fewer heads have fewer tiles.
    """
    for block, policy in zip(decoder_blocks(model), policies, strict=True):
        if tiles > 1 and POLICIES[policy].reruns_mlp:
            for module in block.children():  # one of them attends
                module.attention_tiles = tiles
    return model


_KERNELS = {
    **{name: partial(_packed_attention, name) for name in (VARLEN, FA4_PACKED, TORCH_FA_PACKED)},
    "sdpa": sdpa_attention_forward,
    **{name: partial(_attention_of_rows, name) for name in (FA4, TORCH_FA)},
    **{name: partial(_padding_free_attention, by) for by, name in PADDING_FREE.items()},
}
# No function for AttentionMaskInterface: then transformers builds no mask. With one, it would ask
# the GPU in every forward whether positions restart, and wait for the answer.
for _name, _attend_rows in _KERNELS.items():
    AttentionInterface.register(_name, partial(in_tiles, _attend_rows))
for _name, _unmasked in UNMASKED.items():
    AttentionInterface.register(_unmasked, partial(in_tiles, _KERNELS[_name]))
for _name in (
    FA4,
    TORCH_FA,
    *PADDING_FREE.values(),
):  # outside of rows_alone a batch may need a mask
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
