"""Which attention a run takes, and whether its rows need masks.

Rows that are packed lie in one line of tokens, each attending to itself alone. Kernels that are told where
rows begin (attention_kernels.py) need no mask; where none can run, `sdpa` gives the same result:
transformers sees positions restart and builds a block-diagonal causal mask (B, 1, T, T).

Rows that are not packed need neither. Padding is on the right, where causal attention does not look,
so without a mask SDPA takes its fast causal kernels (https://arxiv.org/abs/2307.08691). To know that
rows are not packed, transformers asks the GPU in every forward and waits: `rows_alone` spares that.

Shapes: B bins, T tokens of a bin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from ..catalog.families import WITH_SINKS
from . import flash_attention_4
from .attention_kernels import (
    BY_ROWS,
    FA4,
    FA4_PACKED,
    PADDING_FREE,
    TORCH_FA,
    TORCH_FA_PACKED,
    UNMASKED,
    VARLEN,
)

_FLASH_ATTENTION_4 = "flash_attention_4"  # what users and transformers call it
_BY_SDPA = ("sdpa", *PADDING_FREE.values())
_WITHOUT_MASKS = (VARLEN, FA4, FA4_PACKED, TORCH_FA, TORCH_FA_PACKED)
# They would leave the capping of scores out in silence.
_WITHOUT_SOFTCAP = ("sdpa", VARLEN, _FLASH_ATTENTION_4)
_WITH_SOFTCAP = {"cuda": "flex_attention", "cpu": "eager"}
# Layers that any kernel here computes, and those that mix no tokens; others carry a state along them, or
# attend in an order of their own.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_TOKENWISE_LAYERS = {"mlp", "moe"}
_MIXER_LAYERS = frozenset(["linear_attention", "conv", "mamba"])  # of row_mixers.py


@contextmanager
def rows_alone(config: PretrainedConfig) -> Iterator[None]:
    """Within it, `sdpa`, `fa4` and `torch_fa` make no mask in models whose every layer does without.

    For forwards without attention_mask and position_ids alone. sdpa needs one for a sliding window.
    """
    text = config.get_text_config()
    known = text._attn_implementation in UNMASKED and takes_backends(type(text))
    with rows_in_a_line(config) if known and makes_no_masks(text) else nullcontext():
        yield


@contextmanager
def rows_in_a_line(config: PretrainedConfig) -> Iterator[None]:
    """Within it, attention that UNMASKED has makes no mask: its kernels are told where rows begin."""
    config = config.get_text_config()
    name = config._attn_implementation
    config._attn_implementation = UNMASKED[name]
    try:
        yield
    finally:
        config._attn_implementation = name


def makes_no_masks(config: PretrainedConfig) -> bool:
    """Whether training on rows that are packed as the model was built makes no attention mask."""
    name = config._attn_implementation
    alone = name in _WITHOUT_MASKS and not layers_of_another_kind(config)
    return alone or name in _BY_SDPA and not has_windows(config)


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


def why_not_padding_free(config: PretrainedConfig) -> str:
    """What keeps attention from being told where rows begin in a line of them; empty if nothing does."""
    name, kind = config._attn_implementation, config.model_type
    if name not in _BY_SDPA:
        return f"its attention is {name}, not sdpa"
    if not getattr(config, "is_causal", True):
        return f"{kind} looks at tokens behind"
    if layers := layers_of_another_kind(config, but=_MIXER_LAYERS):
        return f"{kind} has layers of {layers}"
    # Code of hybrids does not say whether it looks for attention under a name: packing_probe.py tries it.
    named = takes_backends(type(config)) or has_mixer_layers(config)
    if not named or not _class_of(type(config))._supports_flash_attn:
        return f"attention can't be given to {kind}"
    caps = getattr(config, "attn_logit_softcapping", None)
    return f"{kind} caps its attention scores" if caps else ""


def padding_free_attention(config: PretrainedConfig, device: torch.device) -> str:
    """The kernels, of PADDING_FREE, for rows in one line on a device; in fp32 they are BY_ROWS."""
    name, _ = choose_attention("auto", True, config, device, torch.bfloat16)
    return name if name in PADDING_FREE else BY_ROWS


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
    return has_windows(config) and not layers_of_another_kind(config)


def layers_of_another_kind(config: PretrainedConfig, but: frozenset[str] = frozenset()) -> str:
    """Kinds of layers that mix tokens otherwise than by attention over a row or a window, with commas."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return ", ".join(sorted(kinds - _ATTENTION_LAYERS - _TOKENWISE_LAYERS - but))


def has_mixer_layers(config: PretrainedConfig) -> bool:
    """Whether some layers are mixers that can be told where rows begin, by their names in a config."""
    return not _MIXER_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())


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
    if layers := layers_of_another_kind(config):
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
