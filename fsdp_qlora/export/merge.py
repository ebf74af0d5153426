"""Merge an adapter into its base, tensor by tensor: W + scaling B A in fp32, rounded once.

Neither model is ever whole in memory: rows of one tensor are changed at a time, and a file is written
whenever enough tensors have come together. The base is either the original checkpoint, or what its
weights became when the adapter was trained on 4-bit ones (QLoRA, arXiv:2305.14314): which one is
said, and the result is never quantized again unless that is asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from ..atomic_files import complete_folder
from ..choices import FormatName
from ..json_input import read_object
from ..loading import DTYPES, bnb_4bit
from ..redact import without_folders
from ..writable import check_folder
from .adapter_folder import AdapterFolder, Change
from .card import write_card
from .merge_base import BaseModel, choose_base, open_base
from .merged_files import write_other_files
from .save import RUN_FILE, ShardWriter

CHUNK_BYTES = 256 * 2**20  # of fp32 rows that are changed together
_MERGE_DTYPES = DTYPES | {"fp16": torch.float16}


@dataclass
class _Output:
    """One tensor of the merged model: the base's tensor that it is made from, and what changes it."""

    source: str
    change: Change | None = None


@dataclass
class _MergePlan:
    """All there is to do, found out before anything is written."""

    base: BaseModel
    adapter: AdapterFolder | None
    outputs: dict[str, _Output]
    dtype: torch.dtype
    packed: set[str]  # outputs that are written in 4 bits
    settings: dict  # entries of config.json that change; None takes one out

    @property
    def num_bytes(self) -> int:
        """Size of the merged weights."""
        sizes = {name: math.prod(self.shape(o)) for name, o in self.outputs.items()}
        return sum(
            bnb_4bit.stored_bytes(n) if name in self.packed else n * self.dtype.itemsize
            for name, n in sizes.items()
        )

    def shape(self, output: _Output) -> tuple[int, ...]:
        """Shape of a merged tensor."""
        trained = output.change and output.change.replacement
        return self.adapter.shape(trained) if trained else tuple(self.base.shapes[output.source])

    def refuse(self, fault: str):
        raise ValueError(
            f"--adapter_folder {self.adapter.folder}: {fault}; give the model that it was "
            "trained on"
        )


def merge_adapter(
    model_name: str,
    adapter_folder: str | Path | None,
    output_dir: str | Path,
    *,
    merge_base: Literal["auto", "original", "dequantized"] = "auto",
    base_quant: FormatName | Literal["auto"] = "auto",
    merge_format: Literal["safetensors", "bnb4"] = "safetensors",
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    revision: str | None = None,
) -> Path:
    """Write base and adapter as one model into a new folder, in transformers' format.

    merge_base: original, dequantized (the base as it was trained on), or auto, as it was trained on.
    base_quant: the format of a dequantized base; auto is what the adapter's folder says.
    merge_format: safetensors, or bnb4 for weights in NF4 that transformers and bitsandbytes load.
    Without an adapter, bnb4 writes the base itself in 4 bits.
    revision: of a hub name.

    Raises ValueError, naming the flag, for what does not fit together, before anything is written;
    the folder gets its name when all its files are complete.
    """
    started, output_dir = time.perf_counter(), Path(output_dir)
    if output_dir.exists():
        raise ValueError(f"--output_dir {output_dir} already exists; give a new folder")
    plan = _plan_merge(
        open_base(model_name, revision), adapter_folder, merge_base, base_quant, merge_format, dtype
    )
    check_folder("output_dir", output_dir, plan.num_bytes, "the merged model")
    print(f"base: {plan.base.describe()}", flush=True)
    with complete_folder(output_dir) as new:
        writer = ShardWriter(new)
        for name, tensor in _merged_tensors(plan):
            writer.add(name, tensor)
        writer.finish()
        write_other_files(new, plan.base.checkpoint.folder, adapter_folder, plan.settings)
        if adapter_folder:
            _write_merged_card(new, Path(adapter_folder), plan.base)
    print(_describe_result(plan, output_dir, time.perf_counter() - started))
    return output_dir


def _plan_merge(
    base: BaseModel,
    adapter_folder: str | Path | None,
    merge_base: str,
    base_quant: str,
    merge_format: str,
    dtype: str,
) -> _MergePlan:
    """Read what is needed of base and adapter, and match them. Raises ValueError."""
    if adapter_folder is None and merge_format != "bnb4":
        raise ValueError(
            "--adapter_folder is missing; give the folder that training saved, or --merge_format "
            "bnb4 to save the base in 4 bits"
        )
    adapter = AdapterFolder(adapter_folder) if adapter_folder else None
    choose_base(base, merge_base, base_quant, adapter_folder)
    outputs, untied = _plan_outputs(base, adapter)
    plan = _MergePlan(base, adapter, outputs, _MERGE_DTYPES[dtype], set(), {})
    plan.settings = {"dtype": str(plan.dtype).removeprefix("torch."), "quantization_config": None}
    if untied:
        plan.settings["tie_word_embeddings"] = False
    _check_shapes(plan)
    if merge_format == "bnb4":
        experts = {part for parts in base.experts.values() for part in parts}
        plan.packed = base.linear_weights & outputs.keys() - experts
        if experts:
            dtype_name = plan.settings["dtype"]
            print(
                f"experts stay in {dtype_name}: transformers reads no stacks of experts in 4 bits"
            )
        skip = sorted({base.head.removesuffix(".weight"), *base.kept_linears})
        plan.settings["quantization_config"] = bnb_4bit.quantization_config("nf4", plan.dtype, skip)
    return plan


def _plan_outputs(
    base: BaseModel, adapter: AdapterFolder | None
) -> tuple[dict[str, _Output], bool]:
    """Every tensor of the merged model by name, and whether a tied head is one of its own now.

    Raises ValueError for a change of a tensor that the base does not have.
    """
    head, embedding = (base.find(name) or name for name in (base.head, base.embedding))
    tied = base.is_tied
    outputs = {name: _Output(name) for name in base.shapes if not (tied and name == head)}
    changes: dict[str, Change] = {}
    for name, change in (adapter.changes if adapter else {}).items():
        if change.experts:
            changes |= _changes_of_experts(adapter, name, change, base)
            continue
        found = head if tied and name == base.head else base.find(name)
        if found is None:
            _refuse_unknown(adapter, name, change, base)
        changes[found] = change
    untied = tied and not _stays_tied(adapter, changes.get(embedding), changes.get(head))
    if untied:
        outputs[head] = _Output(embedding)
    for name, change in changes.items():
        if name in outputs:
            outputs[name].change = change
    return outputs, untied


def _changes_of_experts(
    adapter: AdapterFolder, name: str, change: Change, base: BaseModel
) -> dict[str, Change]:
    """The change of all experts' weights as one of each tensor that holds some of them."""
    if name not in base.experts:
        _refuse_unknown(adapter, name, change, base)
    found, row, wide = {}, 0, adapter.shape(change.parts["A"])[1]
    for part in base.experts[name]:
        found[part] = replace(change, first_row=row, transposed=part in base.transposed)
        row += math.prod(base.shapes[part]) // wide
    if row != change.experts * (out := adapter.shape(change.parts["B"])[0]):
        adapter.refuse(
            f"{name} is for {change.experts} experts of {out} outputs, but the base's have {row} in "
            "total; give the model that it was trained on"
        )
    return found


def _refuse_unknown(adapter: AdapterFolder, name: str, change: Change, base: BaseModel):
    """Say which tensor is not there, and what may have been meant."""
    if change.added:
        adapter.refuse(
            f"{change.module} has a trained bias (lora_bias), but the base's layer has no bias to "
            "add it to; it can't be merged"
        )
    near = "".join(f" (it has {n})" for n in get_close_matches(name, base.shapes, 1))
    adapter.refuse(
        f"it changes {name}, which {base.name} does not have{near}; give the model that it "
        "was trained on"
    )


def _stays_tied(
    adapter: AdapterFolder | None, embedding: Change | None, head: Change | None
) -> bool:
    """Whether the two ends of a tied model are still the same tensor after their changes."""
    if embedding is None and head is None:
        return True
    if adapter.config["ensure_weight_tying"]:
        return embedding is not None
    if embedding is None or head is None or embedding.parts or head.parts:
        return False
    return torch.equal(*(adapter.tensor(c.replacement) for c in (embedding, head)))


def _check_shapes(plan: _MergePlan):
    """Every change must be for a tensor of that shape; only the vocabulary may have grown."""
    base, ends = plan.base, {}
    for name, output in plan.outputs.items():
        shape, expected = plan.shape(output), tuple(base.shapes[output.source])
        if output.change and output.change.parts:
            plan.adapter.check_shape(output.change, shape)
        if name in (base.find(base.embedding), base.find(base.head), base.head):
            ends[name] = shape[0]
        elif shape != expected:
            plan.refuse(f"{name} has shape {shape}, but the base's is {expected}")
    if len(set(ends.values())) > 1:
        plan.refuse(" and ".join(f"{name} has {rows} rows" for name, rows in ends.items()))
    if ends and (rows := ends.popitem()[1]) != base.config.vocab_size:
        plan.settings["vocab_size"] = rows


def _merged_tensors(plan: _MergePlan) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the merged checkpoint, one after the other."""
    for name, output in tqdm(plan.outputs.items(), "merging", unit=" tensors", disable=None):
        tensor = _merged_tensor(plan, output)
        if name in plan.packed:
            if output.source in plan.base.transposed:
                tensor = tensor.t()  # bitsandbytes holds W
            yield from bnb_4bit.stored_tensors(name, tensor, "nf4").items()
        else:
            yield name, tensor


@torch.no_grad()
def _merged_tensor(plan: _MergePlan, output: _Output) -> Tensor:
    """One tensor of the merged model, computed in fp32 by chunks of rows and rounded once."""
    shape, change, base = plan.shape(output), output.change, plan.base
    if base.is_unchanged(output.source):
        return base.checkpoint.whole(output.source)
    if change and change.replacement:
        whole = plan.adapter.tensor(change.replacement)
    else:
        whole = base.whole(output.source) if base.must_be_whole(output.source) else None
    effect = plan.adapter.effect(change, shape) if change else None
    if not shape:
        return rounded(whole, plan.dtype)
    per_chunk = max(1, CHUNK_BYTES // (4 * math.prod(shape[1:]) or 1))
    if effect and effect.needs_all_rows:
        per_chunk = shape[0]
    merged: Tensor | None = None
    for start in range(0, shape[0], per_chunk):
        stop = min(start + per_chunk, shape[0])
        rows = base.rows(output.source, start, stop) if whole is None else whole[start:stop]
        if effect:
            rows = effect.apply(rows, start, stop)
        if merged is None:
            merged = rounded(rows.new_empty(0), plan.dtype).new_empty(shape)
        merged[start:stop] = rows
    assert merged is not None  # every tensor has a row
    return merged


def _write_merged_card(folder: Path, adapter: Path, base: BaseModel):
    """A model card, if the adapter's folder tells of the run that it comes from."""
    if not (adapter / RUN_FILE).is_file():
        return
    run = read_object(adapter / RUN_FILE)
    if "about" not in run:
        return  # a converted adapter, or one with settings of its own
    write_card(
        folder,
        run,
        adapter.parent / "metrics.jsonl",
        merged=(adapter, base.describe(without_folders(base.name))),
    )


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float tensor in `dtype`; any other as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _describe_result(plan: _MergePlan, folder: Path, seconds: float) -> str:
    """What was written, in one line."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    changed = sum(o.change is not None for o in plan.outputs.values())
    form = (
        "linear weights rounded to nf4, unlike base and adapter"
        if plan.packed
        else str(plan.dtype).removeprefix("torch.")
    )
    untied = "; lm_head is now a separate tensor" if "tie_word_embeddings" in plan.settings else ""
    return (
        f"merged model in {folder}: {size / 1e9:.2f} GB, {changed} of {len(plan.outputs)} tensors "
        f"changed, {form}, {seconds:.0f} s{untied}"
    )
