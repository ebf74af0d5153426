"""Rows of unequal length that another trainer has padded, computed without their padding.

Trainers give a model ids (B, T) and an attention mask with zeros where the shorter rows are filled up, on
either side. Computed so, padding costs what tokens do, and the mask of (B, 1, T, T) that transformers makes
of it rules flash attention out. So the decoder gets the real tokens alone: the rows one behind the other,
in one line that tells attention where each begins (attention_kernels.py). What it returns is put back to
where the tokens were, with zeros at padding, and heads and losses see the shapes that they know.

Right for code in which attention alone sees a second token, or also mixers that carry a state along a row and
are told where rows begin (row_mixers.py); any other model stays as it is.

Shapes: B rows, T tokens of the padded batch, N real tokens, W tokens of the line, D hidden.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..dist import print_main
from ..own_forward import compute_by
from .attention import (
    has_mixer_layers,
    padding_free_attention,
    rows_alone,
    rows_in_a_line,
    why_not_padding_free,
)
from .attention_kernels import PADDING_FREE
from .blocks import base_model
from .packing_probe import why_rows_meet
from .row_mixers import mix_lines_apart, row_mixers

_MULTIPLE = 64  # tokens; lines of few lengths suit kernels and the allocator
_OF_EACH_ROW = ("adapter_names", "alora_offsets")  # what PEFT tells layers of the rows of a batch


def apply_padding_free(model: nn.Module, device: torch.device) -> nn.Module:
    """Let a model's decoder compute padded rows without their padding, in place, and say so.

    In forwards that are given input_ids and a two-dimensional attention_mask, and neither a cache nor
    anything else for each token. A model for which that would not be exact stays as it is, and rank 0
    prints the reason.
    """
    config = base_model(model).config
    if reason := why_padded(model):
        print_main(f"padding_free has no effect: {reason}; padding is computed")
        return model
    kernels = padding_free_attention(config, device)
    config._attn_implementation = PADDING_FREE[kernels]
    decoder = base_model(model).get_decoder()
    if not hasattr(decoder, "argument_names"):
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        decoder.argument_names = names
        decoder.tuner_layer = [next((m for m in model.modules() if _is_tuner(m)), None)]
        compute_by(decoder, _without_padding)
        mix_lines_apart(base_model(model))
    print_main(f"padding_free: rows of a batch are computed without their padding ({kernels})")
    return model


def why_padded(model: nn.Module) -> str:
    """What keeps a model from computing rows without their padding; empty if nothing does."""
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None or not hasattr(base, "get_decoder"):
        return "it is no model of transformers"
    if config.get_text_config() is not config:
        return f"{config.model_type} has a language model inside"
    if any(hasattr(m, "balanced_by") for m in base.modules()):
        return "the balance of its routers counts padded rows"
    if reason := why_not_padding_free(config):
        return reason
    reason, mixers = why_rows_meet(base), row_mixers(base)
    if mixers and (reason or not has_mixer_layers(config)):
        return f"{type(next(iter(mixers.values()))).__name__} carries a state along a row"
    return reason


def _is_tuner(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


@dataclass
class _Line:
    """Where the real tokens of a padded batch are, and where rows begin among them."""

    index: Tensor  # (N,): of each real token, in the batch flattened to (B * T)
    positions: Tensor  # (1, W): of each token in its row
    borders: Tensor  # (rows + 1,) int32: where rows begin, and the end
    longest: int  # no row has more tokens

    @property
    def width(self) -> int:
        return self.positions.shape[1]

    def of(self, value: Tensor) -> Tensor:
        """The line (1, W, ...) of ids or what else each token has, (B, T, ...), filled up with zeros."""
        found = value.flatten(0, 1)[self.index]
        filler = found.new_zeros(self.width - len(found), *found.shape[1:])
        return torch.cat([found, filler])[None]

    def back(self, value: Any, shape: torch.Size) -> Any:
        """(B, T, ...) of (1, W, ...), and (B * T, ...) of (W, ...), with zeros at padding."""
        if isinstance(value, tuple):
            return tuple(self.back(part, shape) for part in value)
        if not isinstance(value, Tensor):
            return value
        flat = value[0] if value.shape[:2] == (1, self.width) else value
        if flat.shape[:1] != (self.width,):
            return value
        padded = flat.new_zeros(shape.numel(), *flat.shape[1:])
        padded = padded.index_copy(0, self.index, flat[: len(self.index)])
        return padded if flat is value else padded.unflatten(0, shape)


def _line_of(mask: Tensor) -> _Line | None:
    """The line of the rows of a mask (B, T); None where a row has a gap, or none has a token.

    Waits for the GPU once, for the number of tokens. A row that has all T has as many tokens in the line.
    """
    real = mask != 0
    begins = real & ~nn.functional.pad(real, (1, 0))[:, :-1]
    lengths = real.sum(1)
    numbers = torch.stack([lengths.sum(), begins.sum(1).max(), lengths.max()]).tolist()
    tokens, parts, most = (int(n) for n in numbers)
    if parts != 1:
        return None
    rows, longest = real.shape
    # Rotary scaling that goes by the greatest position finds that of padded rows at a token of the filler.
    filled = tokens + (most < longest)
    width = min(-(-filled // _MULTIPLE) * _MULTIPLE, rows * longest)
    index = real.flatten().logical_not().byte().argsort(stable=True)[:tokens]
    place = torch.arange(longest, device=real.device) - begins.byte().argmax(1, keepdim=True)
    filler = place.new_full((width - tokens,), longest - 1)
    positions = torch.cat([place.flatten()[index], filler])[None]
    ends = lengths.cumsum(0)
    more = [] if width == tokens else [ends.new_full((1,), width)]
    borders = torch.cat([ends.new_zeros(1), ends, *more]).int()
    return _Line(index, positions, borders, max(-(-longest // _MULTIPLE) * _MULTIPLE, len(filler)))


def _without_padding(decoder: nn.Module, own, *args, **kwargs):
    """A decoder's forward, of the real tokens of rows that are padded."""
    given = dict(zip(decoder.argument_names, args, strict=False)) | kwargs
    config, mask = decoder.config, given.get("attention_mask")
    if mask is None and given.get("cu_seq_lens_q") is not None:  # a line already
        with rows_in_a_line(config):
            return own(decoder, **given)
    line = _line_of(mask) if _can_be_a_line(decoder, given) else None
    if line is None:
        return own(decoder, **given)
    given |= dict(attention_mask=None, use_cache=False)
    ids = given["input_ids"]
    if len(line.index) == ids.numel():
        with rows_alone(config):
            return own(decoder, **given)
    rows = dict(cu_seq_lens_q=line.borders, cu_seq_lens_k=line.borders)
    most = dict(max_length_q=line.longest, max_length_k=line.longest)
    tokens = dict(input_ids=line.of(ids))
    if _adds_noise(decoder):
        tokens = dict(input_ids=None, inputs_embeds=line.of(decoder.get_input_embeddings()(ids)))
    out = decoder(**given | tokens | dict(position_ids=line.positions) | rows | most)
    for name, value in list(out.items()):
        out[name] = line.back(value, ids.shape)
    return out


def _adds_noise(decoder: nn.Module) -> bool:
    """Whether NEFTune is on, whose noise is the weaker the longer the row is that it sees."""
    return decoder.training and hasattr(decoder.get_input_embeddings(), "neftune_noise_alpha")


def _can_be_a_line(decoder: nn.Module, given: dict) -> bool:
    """Whether a forward is given ids, a mask of padding and settings alone, and returns states alone."""
    ids, mask, config = given.get("input_ids"), given.get("attention_mask"), decoder.config

    def asked(name: str) -> bool:
        value = given.get(name)
        return bool(getattr(config, name, False) if value is None else value)

    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return False
    if given.get("past_key_values") is not None or not asked("return_dict"):
        return False
    # Training reads no cache, though configurations say that one is filled.
    if asked("use_cache") and (given.get("use_cache") or not decoder.training):
        return False
    if asked("output_attentions") or asked("output_hidden_states"):
        return False
    if _adds_noise(decoder) and "per_layer_inputs" in decoder.argument_names:  # made of ids
        return False
    others = (value for value in given.values() if value is not ids and value is not mask)
    if any(isinstance(value, Tensor) and value.dim() for value in others):
        return False
    (layer,) = decoder.tuner_layer
    hooks = () if layer is None else layer._forward_pre_hooks.values()
    return not any(name in getattr(hook, "keywords", {}) for hook in hooks for name in _OF_EACH_ROW)
