"""Attention for packed rows: several rows in one line of tokens, each attending to itself alone.

`varlen` is torch's variable-length attention, registered with transformers, which has no backend for
it. Its FlashAttention kernels are told where rows begin: nothing is computed between rows and no mask
is built. Where it cannot run, `sdpa` gives the same result: transformers sees positions restart and
builds a block-diagonal causal mask (B, 1, T, T).

Rows that are not packed need neither. Padding is on the right, where causal attention does not look,
so without a mask SDPA takes its fast causal kernels (https://arxiv.org/abs/2307.08691). To know that
rows are not packed, transformers asks the GPU in every forward and waits: `rows_alone` spares that.

Over long rows a backward's workspace is the peak of a step (`apply_attention_tiles`).

FlashAttention 4 (flash_attention_4.py) does both where it is installed and fits, as `fa4` and
`fa4_packed`. `fa4` leaves to sdpa what it can't do: masks of rows padded on the left, cached keys.

Where it does not, `torch_fa` is torch's FlashAttention of rows alone, for what sdpa would need masks of
T x T for: sliding windows. Models with attention sinks take any of these kernels (sinks.py), and packed
`torch_fa_packed`, which has kernels for the CPU too. Values of a smaller size than keys, as latent attention
has them, are filled up with zeros, as transformers does for its own flash kernels.

Shapes: B bins, T tokens of a bin, N rows of the batch, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from ..catalog.families import WITH_SINKS
from ..choices import POLICIES
from ..quantization.quantize import compute_input
from . import flash_attention_4
from .blocks import decoder_blocks
from .sinks import attention_with_sinks

VARLEN, FA4_PACKED = "varlen", "fa4_packed"  # for packed rows
TORCH_FA, TORCH_FA_PACKED = "torch_fa", "torch_fa_packed"  # by kernels that come with torch
FA4, _FLASH_ATTENTION_4 = (
    "fa4",
    "flash_attention_4",
)  # a model's; what users and transformers call it
_UNMASKED = {  # the same where no mask is asked for
    "sdpa": "sdpa_causal",
    FA4: "fa4_causal",
    TORCH_FA: "torch_fa_causal",
}
_WITHOUT_MASKS = (VARLEN, FA4, FA4_PACKED, TORCH_FA, TORCH_FA_PACKED)
_WITHOUT_SOFTCAP = (
    "sdpa",
    VARLEN,
    _FLASH_ATTENTION_4,
)  # would leave the capping of scores out in silence
_WITH_SOFTCAP = {"cuda": "flex_attention", "cpu": "eager"}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}  # others carry a state along the tokens
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
}
# No function for AttentionMaskInterface: then transformers builds no mask. With one, it would ask
# the GPU in every forward whether positions restart, and wait for the answer.
for _name, _attend_rows in _KERNELS.items():
    AttentionInterface.register(_name, partial(in_tiles, _attend_rows))
for _name, _unmasked in _UNMASKED.items():
    AttentionInterface.register(_unmasked, partial(in_tiles, _KERNELS[_name]))
for _name in (FA4, TORCH_FA):  # outside of rows_alone a batch may need a mask
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def rows_alone(config: PretrainedConfig) -> Iterator[None]:
    """Within it, `sdpa`, `fa4` and `torch_fa` make no mask in models whose every layer does without.

    For forwards without attention_mask and position_ids alone. sdpa needs one for a sliding window.
    """
    config = config.get_text_config()
    name = config._attn_implementation
    if not makes_no_masks(config) or name not in _UNMASKED or not takes_backends(type(config)):
        yield
        return
    config._attn_implementation = _UNMASKED[name]
    try:
        yield
    finally:
        config._attn_implementation = name


def makes_no_masks(config: PretrainedConfig) -> bool:
    """Whether training on rows that are packed as the model was built makes no attention mask."""
    name = config._attn_implementation
    alone = name in _WITHOUT_MASKS and not layers_with_a_state(config)
    return alone or name == "sdpa" and not has_windows(config)


def masks_of_rows(
    config: PretrainedConfig,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    positions: Tensor | None,
) -> Tensor | dict[str, Tensor]:
    """Masks for a batch (B, T), by kind of layer where a model has several.

    positions (B, T): where they start again, a packed row begins; None of padded rows.
    """
    like = torch.empty(*shape, 1, dtype=dtype, device=device)
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    makers: dict[str, Callable] = dict(
        full_attention=create_causal_mask,
        sliding_attention=create_sliding_window_causal_mask,
        chunked_attention=partial(_chunked_mask, positions),
    )
    used = kinds or ["sliding_attention" if has_windows(config) else "full_attention"]
    masks = {
        kind: makers[kind](
            config=config,
            inputs_embeds=like,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        if kind in makers
        else None  # a mixer with a state takes no mask
        for kind in used
    }
    return masks if kinds else [*masks.values()][-1]


def _chunked_mask(positions: Tensor | None, *, config: PretrainedConfig, **rows) -> Tensor:
    """Attention within chunks of each row; transformers' own chunks are those of the line."""

    def in_same_chunk(batch, head, query, key):
        chunks = positions // config.attention_chunk_size
        return chunks[batch, query] == chunks[batch, key]

    if positions is None:
        return create_chunked_causal_mask(config=config, **rows)
    return create_causal_mask(config=config, and_mask_function=in_same_chunk, **rows)


@lru_cache
def takes_backends(kind: type[PretrainedConfig]) -> bool:
    """Whether such a model's code looks for its attention under a name; Falcon's knows sdpa alone."""
    model = _class_of(kind)
    return bool(getattr(model, "_supports_attention_backend", False))


def _class_of(kind: type[PretrainedConfig]) -> type | None:
    """transformers' causal language model of a config, or the decoder of one that it has none of."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) or MODEL_MAPPING.get(kind, None)


def has_windows(config: PretrainedConfig) -> bool:
    """True if some layers see less than all tokens before."""
    layers = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) and "full_attention" not in layers
    return bool(window or layers - {"full_attention"})


def choose_attention(
    wanted: str, packing: bool, config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """The implementation to build a model with, and the reason.

    wanted: --attn_implementation. `auto` is FlashAttention 4 where that runs, or sdpa, or one that can
    cap scores. Of `sdpa`, packed rows take `varlen` where it runs.
    Raises ValueError where it can't run, or scores would not be capped.
    """
    config = config.get_text_config()
    if config.model_type in WITH_SINKS:
        return _choose_with_sinks(wanted, packing, config, device, dtype)
    caps = bool(getattr(config, "attn_logit_softcapping", None))
    if wanted == "auto" and caps:
        return _WITH_SOFTCAP[device.type], f"{config.model_type} caps its attention scores"
    model = _class_of(type(config))
    if wanted == "auto" and not getattr(model, "_supports_sdpa", True):
        return "eager", f"{config.model_type} has no sdpa"
    if caps and wanted in _WITHOUT_SOFTCAP:
        raise ValueError(
            f"--attn_implementation {wanted}: {config.model_type} caps its attention "
            "scores, which this leaves out; use eager or flex_attention"
        )
    attends = getattr(config, "num_attention_heads", None)
    if wanted in _WITHOUT_SOFTCAP and attends and not getattr(model, "_supports_sdpa", True):
        raise ValueError(
            f"--attn_implementation {wanted}: {config.model_type} has attention of its own, "
            "which this leaves out; use eager"
        )
    reason, asked, said = _why_not_varlen(config, device, dtype), wanted, ""
    if wanted in ("auto", _FLASH_ATTENTION_4):
        unfit = _why_not_fa4(config, device, dtype, packing)
        if not unfit:
            return FA4_PACKED if packing else FA4, "FlashAttention 4"
        if wanted == _FLASH_ATTENTION_4:
            raise ValueError(f"--attn_implementation {wanted}: {unfit}; use sdpa")
        wanted = "sdpa"
        if flash_attention_4.has_kernels_for(device):
            said = f"; FlashAttention 4 {unfit}"
    if wanted == VARLEN and reason:
        raise ValueError(f"--attn_implementation {VARLEN}: {reason}; use sdpa")
    if not packing and asked == "auto" and _sees_windows(config) and not reason:
        return TORCH_FA, "sliding windows, without a mask" + said
    if not packing:
        return wanted, "--attn_implementation" + said
    if wanted not in ("sdpa", VARLEN):
        return wanted, "--attn_implementation; a mask keeps rows apart"
    if reason:
        return "sdpa", f"a mask keeps packed rows apart: {VARLEN} {reason}{said}"
    return VARLEN, "packed rows, without a mask" + said


def _choose_with_sinks(
    wanted: str, packing: bool, config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """`choose_attention` of a model with attention sinks, which few kernels know."""
    if wanted in ("sdpa", VARLEN):
        raise ValueError(
            f"--attn_implementation {wanted}: {config.model_type} has attention sinks, which this "
            "leaves out; leave the flag out, or use eager"
        )
    if wanted not in ("auto", _FLASH_ATTENTION_4):
        return wanted, "--attn_implementation" + "; a mask keeps rows apart" * packing
    unfit = _why_not_fa4(config, device, dtype, packing)
    if not unfit:
        return FA4_PACKED if packing else FA4, "FlashAttention 4, with sinks"
    if wanted == _FLASH_ATTENTION_4:
        raise ValueError(f"--attn_implementation {wanted}: {unfit}; leave it out")
    if reason := _why_not_sinks(config, device, dtype):
        return "eager", f"{config.model_type} has sinks, with which torch's FlashAttention {reason}"
    said = f"; FlashAttention 4 {unfit}" * flash_attention_4.has_kernels_for(device)
    return TORCH_FA_PACKED if packing else TORCH_FA, f"{config.model_type} has sinks{said}"


def _why_not_sinks(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What keeps torch's kernels from attention with sinks; the CPU's take all sizes and dtypes."""
    if device.type == "cpu":
        return "has no attention dropout" if drops_scores(config) else ""
    return _why_not_varlen(config, device, dtype)


def _sees_windows(config: PretrainedConfig) -> bool:
    """True of a model of attention alone, where some layers see a window."""
    return has_windows(config) and not layers_with_a_state(config)


def layers_with_a_state(config: PretrainedConfig) -> str:
    """Kinds of layers that are no attention but carry a state along a row, with commas."""
    return ", ".join(sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS))


def _why_not_varlen(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What keeps torch's variable-length attention from running; empty if nothing does."""
    model = _class_of(type(config))
    if not takes_backends(type(config)) or not model._supports_flash_attn:
        return f"can't be given to {config.model_type}"
    size = _head_size(config)
    if device.type != "cuda":
        return "needs a GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs an Ampere GPU or newer"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits only"
    if size % 8 or size > 256:
        return f"has no kernel for heads of {size}"
    if drops_scores(config):
        return "has no attention dropout"
    return ""


def drops_scores(config: PretrainedConfig) -> bool:
    """Whether training drops a share of the attention's weights, by any of transformers' names for it."""
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return any(getattr(config, name, None) for name in names)


def _why_not_fa4(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, packing: bool
) -> str:
    """What keeps FlashAttention 4 from running; empty if nothing does."""
    if layers := layers_with_a_state(config):
        return f"can't run layers of {layers}"
    if reason := _why_not_varlen(config, device, dtype):
        return reason
    window = getattr(config, "sliding_window", None) if has_windows(config) else None
    kinds = {"full_attention": None, "sliding_attention": window}
    windows = {kinds[layer] for layer in getattr(config, "layer_types", None) or ()} or {window}
    return flash_attention_4.why_not(
        device,
        dtype,
        _head_size(config),
        config.num_attention_heads // _key_value_heads(config),
        tuple(sorted(windows, key=bool)),
        packing,
    )


def _head_size(config: PretrainedConfig) -> int:
    """The largest of the layers': some models' differ. Of latent attention, that of queries and keys."""
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return max(
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layer_configs(config)
    )


def _key_value_heads(config: PretrainedConfig) -> int:
    """The fewest of the layers'."""
    return min(
        getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        for layer in layer_configs(config)
    )


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A configuration for each kind of layer: Gemma 4's have heads of two sizes."""
    return list(config.per_layer_config) if config.is_heterogeneous else [config]
