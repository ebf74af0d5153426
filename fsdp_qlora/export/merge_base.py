"""The base of a merge: its checkpoint's tensors in fp32 rows, as stored or as rounded to 4 bits.

An adapter trained with QLoRA has learnt beside weights that were rounded to NF4; the base that it fits
is those, not the original ones. Both can be had here, and which one it is can be said in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..experts import stacked_weights
from ..loading import Checkpoint, bnb_4bit, checkpoint_folder, meta_model, read_config
from ..loading.key_mapping import parts_of_stacks, renamed, tower_tensors
from ..loading.prequantized import check_kind, kind_of, open_weights, quantization_of
from ..model.conv1d import transposed_weights
from ..model.wrappers import wrapper_of
from ..quantization.quantize import QuantLinear, quantize_linears
from .adapter_folder import Delta
from .quantized_base import BaseQuant, base_quant, taken_out_of, trained_quant


@dataclass
class BaseModel:
    """The base checkpoint, and what its architecture says of its tensors."""

    name: str
    checkpoint: Checkpoint
    config: PretrainedConfig  # the language model's
    linear_weights: set[str]  # those that training quantizes
    embedding: str  # names of the two ends' weights
    head: str
    kept_linears: list[str]  # layers that it leaves in 16 bits, lm_head among them
    round_to: BaseQuant | None = None  # linear weights are rounded so, and back
    trained_on: BaseQuant = BaseQuant()
    packed: dict = field(default_factory=dict)  # weights that the checkpoint itself has in 4 bits
    taken: dict[str, Delta] = field(default_factory=dict)  # what is not rounded of a weight
    transposed: set[str] = field(default_factory=set)  # that it holds as W^T, experts' among them
    experts: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # tensors of all experts' weights
    older: dict[str, str] = field(default_factory=dict)  # the checkpoint's names for the model's

    file_names: dict[str, str] = field(default_factory=dict)  # of a wrapper's tensors
    towers: set[str] = field(
        default_factory=set
    )  # tensors beside the language model, by those names

    def __post_init__(self):
        self.packed = bnb_4bit.packed_weights(self.checkpoint)
        self.shapes = {
            name: self.packed[name].shape if name in self.packed else shape
            for name, shape in self.checkpoint.shapes.items()
            if not any(name.startswith(f"{w}.") for w in self.packed)
        }

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are one tensor; an equal copy in the file counts for nothing."""
        embedding, head = self.find(self.embedding), self.find(self.head)
        if not self.config.tie_word_embeddings or embedding is None:
            return False
        files = self.checkpoint
        return not ({embedding, head} <= files.stored.keys() and files.differ(embedding, head))

    def find(self, name: str) -> str | None:
        """The checkpoint's name for the model's, which may be an older one, or lack a first `model.`."""
        if name in self.file_names:
            return self.file_names[name]
        shorter, older = name.partition(".")[2], self.older.get(name, name)
        return next(
            (
                n
                for n in (older, name, shorter, f"model.{name}", f"transformer.{name}")
                if n in self.shapes
            ),
            None,
        )

    def is_unchanged(self, name: str) -> bool:
        """Whether a tensor is copied as it is: a tower's, but for one in 4 bits."""
        return name in self.towers and name not in self.packed

    def must_be_whole(self, name: str) -> bool:
        """Whether a tensor can't be read by rows: blocks of bitsandbytes' weights run over them, and
        W^T is rounded by columns."""
        return (
            name in self.packed
            or not self.shapes[name]
            or (bool(self.round_to) and name in self.transposed and len(self.shapes[name]) == 2)
        )

    def whole(self, name: str) -> Tensor:
        """A tensor that can't be read by rows, in fp32; integers as they are."""
        if name in self.packed:
            return bnb_4bit.dense(self.checkpoint, name, self.packed[name]).float()
        if not self.shapes[name]:
            return _as_fp32(self.checkpoint.rows(name, 0, 0))
        whole = _as_fp32(self.checkpoint.rows(name, 0, self.shapes[name][0]))
        return self.round_to.round_rows(whole.t().contiguous(), taken=self.taken.get(name)).t()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows (start, stop) in fp32, rounded as in training; integers as they are."""
        rows = self.checkpoint.rows(name, start, stop)
        if not self.round_to or name not in self.linear_weights:
            return _as_fp32(rows)
        if rows.dim() == 3:  # experts
            rows = rows.transpose(1, 2) if name in self.transposed else rows
            rounded = self.round_to.round_rows(rows.flatten(0, 1)).view_as(rows)
            return rounded.transpose(1, 2) if name in self.transposed else rounded
        return self.round_to.round_rows(rows, taken=self.taken.get(name), start=start)

    def describe(self, name: str | None = None) -> str:
        """The base in words, under its own or another name."""
        name = name or self.name
        if self.packed:
            return f"{name}, whose weights are stored in 4 bits"
        if self.taken:
            return f"{name} rounded to {self.round_to} and back, all but what the adapter began as"
        if self.round_to:
            return f"{name} rounded to {self.round_to} and back"
        if self.trained_on.quant == "none":
            return f"the original weights of {name}"
        return (
            f"the original weights of {name}, though the adapter was trained on {self.trained_on}"
        )


def _as_fp32(tensor: Tensor) -> Tensor:
    """A float tensor in fp32; any other as it is."""
    return tensor.float() if tensor.is_floating_point() else tensor


def open_base(name: str, revision: str | None = None) -> BaseModel:
    """Open a model's checkpoint. Raises ValueError naming --model_name."""
    config = read_config(name, revision)
    check_kind(quantization := quantization_of(config), name)  # before anything is downloaded
    folder = checkpoint_folder(name, revision)
    meta = quantize_linears(meta_model(config, torch.bfloat16), "nf4")
    names = {id(m): n for n, m in meta.named_modules()}
    outer = wrapper.outer if (wrapper := wrapper_of(meta)) else str
    linear = {outer(f"{n}.weight") for n, m in meta.named_modules() if isinstance(m, QuantLinear)}
    kept = [outer(n) for n, m in meta.named_modules() if isinstance(m, torch.nn.Linear)]
    ends = [
        outer(f"{names[id(end)]}.weight")
        for end in (meta.get_input_embeddings(), meta.get_output_embeddings())
    ]
    is_bnb = kind_of(quantization) == "bitsandbytes"  # whose weights `packed` reads whole
    files = Checkpoint(folder) if is_bnb else open_weights(folder, quantization, name)
    base = BaseModel(name, files, meta.config, linear, *ends, kept)
    if wrapper:
        base.file_names = {
            outer(new): n
            for n, (new, part_of) in renamed(meta, files.shapes).items()
            if not part_of
        }
        base.towers = tower_tensors(meta, files)
    for key in base.checkpoint.stored | base.checkpoint.made:
        if key.endswith(".weight") and key not in base.packed:
            base.checkpoint.check_numbers(key)
    base.older = {
        new: old for old, (new, part_of) in renamed(meta, base.shapes).items() if part_of is None
    }
    base.linear_weights = {base.find(n) or n for n in linear}
    experts = parts_of_stacks(meta, base.checkpoint) if stacked_weights(meta) else {}
    base.experts = {outer(stack): parts for stack, parts in experts.items()}
    base.linear_weights |= {part for parts in base.experts.values() for part in parts}
    transposed = map(outer, transposed_weights(meta))
    base.transposed = {base.find(n) or n for n in transposed} - base.packed.keys()
    for stack in stacked_weights(meta).values():
        if stack.transposed:
            base.transposed |= {*base.experts.get(outer(stack.stored_name), ())}
    return base


def choose_base(base: BaseModel, merge_base: str, quant: str, adapter: str | Path | None):
    """Set what the base is rounded to: `merge_base` is auto, original or dequantized.

    auto is what the adapter was trained on. Raises ValueError if that base can't be had.
    """
    if base.packed:
        if merge_base == "original":
            raise ValueError(
                f"--merge_base original: {base.name} holds 4-bit weights only; give the "
                "16-bit model as --model_name, or use --merge_base dequantized"
            )
        return
    base.trained_on, wanted = trained_quant(adapter), base_quant(quant, adapter)
    if merge_base == "original" or merge_base == "auto" and wanted.quant == "none":
        return
    if not wanted.is_known:
        fault = (
            "the adapter folder does not say what it was trained on"
            if wanted.quant == "none"
            else f"it was trained on {wanted}, which can't be reproduced here"
        )
        raise ValueError(
            f"--merge_base {merge_base}: {fault}; add --base_quant nf4 (or another format), or use "
            "--merge_base original"
        )
    base.round_to = wanted
    base.taken = {base.find(name) or name: part for name, part in taken_out_of(adapter).items()}
