"""Llama-Pro: a base read as a model with more blocks, of which the new ones alone are trained.

A new block reads the tensors of the block that it copies, and zeros for its two output projections, so
the expanded model computes exactly what the base does until it is trained; no folder of expanded weights
is needed. Which blocks are new is said by `catalog.llama_pro`. LLaMA Pro is arXiv:2401.02415.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..catalog.llama_pro import Expansion
from ..model.blocks import attention_and_mlp, block_list, decoder_blocks, is_linear
from ..model.trained_dtype import train_in
from .weight_files import Checkpoint, FileSpan

# What families call the last linear layer of an attention or an MLP, whose output the block adds.
_OUTPUT_NAMES = (
    "o_proj",
    "down_proj",
    "c_proj",
    "out_proj",
    "fc_out",
    "dense",
    "dense_4h_to_h",
    "fc2",
)


def expanded_config(settings: PretrainedConfig, grown: Expansion) -> PretrainedConfig:
    """The settings of a model with the expansion's blocks; what is listed per block grows too."""
    settings = copy.deepcopy(settings)
    text = settings.get_text_config()
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == before:
            setattr(text, name, [value[source] for source in grown.sources])
    text.num_hidden_layers = len(grown.sources)
    return settings


def train_new_blocks(model: nn.Module, new: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Freeze all but the blocks at the places `new`, which are stored in `dtype`, in place."""
    model.requires_grad_(False)
    for place in new:
        train_in(decoder_blocks(model)[place], dtype)
    return model


class ExpandedCheckpoint(Checkpoint):
    """A checkpoint whose blocks are those of `base`, and the copies of an expansion.

    model: the expanded one, on meta, before layers are replaced in it.
    """

    def __init__(self, base: Checkpoint, model: nn.Module, grown: Expansion):
        self.base, self.folder, self.grown = base, base.folder, grown
        self.content = base.content
        self.prefix = block_list(model)[0]
        self.zeros = _output_projections(model)

    @property
    def stored(self) -> dict[str, FileSpan]:
        """The tensors in the files."""
        return self.base.stored

    def place(self, key: str) -> tuple[int, str] | None:
        """(block, name in it) of a tensor of the expanded model, if it is in a block."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}\.(\d+)\.(.+)", key)
        return found and (int(found[1]), found[2])

    def source(self, key: str) -> str:
        """The name of a tensor in the base."""
        place = self.place(key)
        return f"{self.prefix}.{self.grown.sources[place[0]]}.{place[1]}" if place else key

    def is_zero(self, key: str) -> bool:
        """Whether a tensor belongs to an output projection of a new block."""
        place = self.place(key)
        return (
            bool(place) and place[0] in self.grown.new and place[1].rsplit(".", 1)[0] in self.zeros
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the expanded model."""
        shapes, found = self.base.shapes, {}
        for key, shape in shapes.items():
            place = self.place(key)
            copies = [b for b, s in enumerate(self.grown.sources) if s == place[0]] if place else []
            found |= {f"{self.prefix}.{block}.{place[1]}": shape for block in copies} or {
                key: shape
            }
        return found

    @property
    def quantized_layers(self) -> set[str]:
        """Names of the layers whose weights are in 4 bits, of a base that has such."""
        return {
            name
            for key in self.shapes
            if (name := key.removesuffix(".weight")) != key
            and self.source(key).removesuffix(".weight") in self.base.quantized_layers
        }

    def check_numbers(self, key: str):
        """Refuse a tensor whose stored values are not its numbers."""
        self.base.check_numbers(self.source(key))

    def spans(self, piece) -> list[FileSpan]:
        """What must be read for a piece."""
        return [] if self.is_zero(piece.key) else self.base.spans(self.renamed(piece))

    def values(self, piece, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The piece's values, from what was read."""
        if self.is_zero(piece.key):
            return (torch.zeros_like(piece.local),)
        return self.base.values(self.renamed(piece), tensors)

    def read(self, span: FileSpan, buffer: Tensor | None = None) -> Tensor:
        """The values of a span."""
        return self.base.read(span, buffer)

    def placed(self, piece):
        """Told when a piece is in the model."""

    def renamed(self, piece):
        """The same piece under its name in the base."""
        return replace(piece, key=self.source(piece.key))


def zeros_of_new_blocks(model: nn.Module, grown: Expansion) -> set[str]:
    """Names of the weights of new blocks that begin as zeros, for which no file is read."""
    prefix, names = block_list(model)[0], _output_projections(model)
    return {f"{prefix}.{block}.{name}.weight" for block in grown.new for name in names}


def _output_projections(model: nn.Module) -> set[str]:
    """Names in a block of the two layers whose outputs it adds to its input.

    Raises ValueError for a model whose block is not built so.
    """
    block = decoder_blocks(model)[0]
    both = set(attention_and_mlp(block))
    parts = {name: part for name, part in block.named_children() if part in both}
    found = {
        f"{part}.{name}"
        for part, module in parts.items()
        for name, layer in module.named_modules()
        if is_linear(layer) and name.rsplit(".", 1)[-1] in _OUTPUT_NAMES
    }
    if len(parts) != 2 or {name.split(".")[0] for name in found} != set(parts):
        raise ValueError(
            f"--adapter llama_pro: the blocks of {type(model).__name__} are no attention "
            f"and an MLP that end in one of {', '.join(_OUTPUT_NAMES)}; use --adapter lora"
        )
    return found
