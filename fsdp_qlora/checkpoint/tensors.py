"""A run's tensors on disk: each rank writes the rows it holds, any number of ranks read them back.

FSDP2 shards dim 0, so a shard is a range of rows and resharding is reading other ranges. The files
are safetensors whose header says which rows they hold. torch.distributed.checkpoint would write a
pickle as its index, and its planning needs collectives, which a background thread must not run
beside those of a step.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..adapters import trainable_parameters
from ..atomic_files import sync
from ..dist import is_first_copy, local_rows
from ..lora_init import taken_out
from ..memory.pinned_memory import host_tensors
from ..tensor_files import write_tensors


@dataclass
class TensorRows:
    """Rows `start`, `start` + 1, ... of a tensor that has `total`; 0 of a tensor without rows."""

    tensor: Tensor
    start: int = 0
    total: int = 0


def rows_of(tensor: Tensor) -> TensorRows | None:
    """What this rank has to save of a tensor; None where another rank does, or there is no row."""
    if not is_first_copy(tensor):
        return None
    if tensor.dim() == 0:
        return TensorRows(tensor.detach())
    local, start, _ = local_rows(tensor.detach())
    return TensorRows(local, start, tensor.shape[0]) if local.shape[0] else None


def weight_rows(model: nn.Module) -> dict[str, TensorRows]:
    """This rank's rows of the trained weights."""
    return {
        name: rows
        for name, p in trainable_parameters(model).items()
        if (rows := rows_of(p)) is not None
    }


def taken_rows(model: nn.Module) -> dict[str, TensorRows]:
    """This rank's rows of what the base lacks of each adapter, as `<parameter>|taken`."""
    found, parameters = {}, trainable_parameters(model)
    for name, tensor in taken_out(model).items():
        if (rows := rows_of(parameters[name])) is not None:
            found[f"{name}|taken"] = TensorRows(tensor, rows.start, rows.total)
    return found


def optimizer_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorRows]:
    """This rank's rows of the optimizer's states, as `<parameter>|<state>`, frozen parameters' too."""
    return {
        f"{name}|{key}": rows
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if value is not None and (rows := rows_of(value)) is not None
    }


class Staging:
    """Copies of tensors in host memory, so that a step can go on while they are written.

    The memory of a kind of tensors is one region, page-locked for a GPU, that is kept for the next
    time.
    """

    def __init__(self, device: torch.device):
        self.device, self.buffers = device, dict[str, dict[str, Tensor]]()

    def copy(self, kind: str, rows: dict[str, TensorRows]) -> dict[str, TensorRows]:
        """The same rows, on the host; `wait` before they are read."""
        buffers = self.buffers.get(kind, {})
        if described(buffers) != described({name: r.tensor for name, r in rows.items()}):
            made = host_tensors(
                [r.tensor for r in rows.values()], pinned=self.device.type == "cuda"
            )
            buffers = self.buffers[kind] = dict(zip(rows, made, strict=True))
        return {
            name: TensorRows(buffers[name].copy_(r.tensor, non_blocking=True), r.start, r.total)
            for name, r in rows.items()
        }

    def wait(self):
        """Until the copies are there."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def described(tensors: dict[str, Tensor]) -> list[tuple]:
    """Names, shapes and dtypes."""
    return [(name, t.shape, t.dtype) for name, t in tensors.items()]


# ---- random numbers ----------------------------------------------------------------------------


@dataclass
class RandomState:
    """Of one rank: what dropout and shuffling draw from next."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    python: list = field(default_factory=list)

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        tensors = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            tensors["cuda"] = torch.cuda.get_rng_state(device)
        return cls(tensors, random.getstate())

    def restore(self, device: torch.device):
        version, numbers, gauss = self.python
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(self.tensors["cpu"])
        if device.type == "cuda" and "cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["cuda"], device)


# ---- files -------------------------------------------------------------------------------------


def rank_file(folder: Path, rank: int) -> Path:
    """A rank's optimizer rows and random state."""
    return folder / f"rank-{rank:05}.safetensors"


def weights_file(folder: Path, rank: int) -> Path:
    """A rank's rows of the trained weights."""
    return folder / f"weights-{rank:05}.safetensors"


def write_rows(path: Path, rows: dict[str, TensorRows], random_state: RandomState | None = None):
    """Write rows, wait for the disk, and read them back. Raises OSError if they are not the same."""
    tensors = {name: r.tensor for name, r in rows.items()}
    metadata = {
        "format": "pt",
        "rows": json.dumps({n: [r.start, r.total] for n, r in rows.items()}),
    }
    if random_state is not None:
        tensors |= {f"random|{kind}": state for kind, state in random_state.tensors.items()}
        metadata["python_random"] = json.dumps(random_state.python)
    write_tensors(tensors, path, metadata)
    read_back(path, tensors)


def read_back(path: Path, tensors: dict[str, Tensor]):
    """Compare a file with what it should hold, bit by bit, from the disk and not from the cache.

    tensors: on any device; one on a GPU is copied to the host when its turn comes.
    """
    sync(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    with safe_open(path, framework="pt") as file:
        same = set(file.keys()) == set(tensors) and all(
            _same_bits(file.get_tensor(name), tensor.cpu()) for name, tensor in tensors.items()
        )
    if not same:
        raise OSError(f"{path}: the disk returned different bytes than were written")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


class RowFiles:
    """Tensors whose rows lie in several files. A file without a list of rows holds whole tensors."""

    def __init__(self, paths: Iterable[Path]):
        self.parts = defaultdict(list)  # name -> (first row, rows there, total rows, file)
        for path in paths:
            file = safe_open(path, framework="pt")
            listed = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118  not a dict
                shape = file.get_slice(name).get_shape()
                start, total = listed.get(name, (0, shape[0] if shape else 0))
                self.parts[name].append((start, shape[0] if shape else 0, total, file))

    def total(self, name: str) -> int:
        """Rows of the whole tensor; 0 if it has none."""
        return self.parts[name][0][2]

    def lacks_rows(self) -> str | None:
        """A tensor of which some rows are in no file, if there is one."""
        for name, parts in self.parts.items():
            place = 0
            for first, count, *_ in sorted(parts, key=lambda part: part[0]):
                place = max(place, first + count) if first <= place else place
            if place < self.total(name):
                return name
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start to stop of a tensor. Raises ValueError if some are in no file."""
        if not (total := self.total(name)):
            return self.parts[name][0][3].get_tensor(name)
        place, stop, found = start, total if stop is None else stop, []
        for first, count, _, file in sorted(self.parts[name], key=lambda part: part[0]):
            if first <= place < min(first + count, stop):
                end = min(first + count, stop)
                found.append(file.get_slice(name)[place - first : end - first])
                place = end
        if place < stop:
            raise ValueError(f"checkpoint: rows {place} to {stop} of {name} are missing")
        if not found:
            return self.parts[name][0][3].get_slice(name)[0:0]
        return found[0] if len(found) == 1 else torch.cat(found)


# ---- into a model ------------------------------------------------------------------------------


def load_weights_into(model: nn.Module, files: RowFiles, keys: dict[str, str]):
    """Fill the trained weights, each rank its rows; `keys` names them as the files do."""
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            local, start, stop = local_rows(parameter)
            rows = files.read(keys[name], start, stop)
            local.copy_(rows[:, : local.shape[1]] if local.dim() == 2 else rows)


def load_optimizer_into(model: nn.Module, optimizer: torch.optim.Optimizer, files: RowFiles):
    """Fill the optimizer's states, sharded as the parameters are now."""
    names = {id(p): name for name, p in model.named_parameters()}
    saved = defaultdict(dict)
    for full in files.parts:
        name, _, key = full.rpartition("|")
        saved[name][key] = full
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for number, p in enumerate(parameters):
        if full_names := saved.get(names[id(p)]):
            empty = _empty_states(optimizer, p)
            states[number] = {
                key: filled(empty(key, files.total(full)), files, full)
                for key, full in full_names.items()
            }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})


def _empty_states(
    optimizer: torch.optim.Optimizer, p: nn.Parameter
) -> Callable[[str, int], Tensor | None]:
    """A function (state, its rows) -> a tensor to fill, placed as the optimizer would; None if whole.

    This project's optimizers make their own; torch's are like the weight.
    """
    if hasattr(optimizer, "new_state"):
        states = optimizer.new_state(p.detach())
        return lambda key, _: states.get(key)
    return lambda _, rows: torch.zeros_like(p.detach()) if rows == p.shape[0] else None


def filled(state: Tensor | None, files: RowFiles, name: str) -> Tensor:
    """A state with this rank's rows; one without a place of its own is whole on every rank."""
    if state is None:
        return files.read(name)
    local, start, stop = local_rows(state)
    local.copy_(files.read(name, start, stop))
    return state


def read_random_state(folder: Path, rank: int) -> RandomState:
    """The random state that a rank of the same world had."""
    with safe_open(rank_file(folder, rank), framework="pt") as file:
        tensors = {
            name.removeprefix("random|"): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
            if name.startswith("random|")
        }
        return RandomState(tensors, json.loads(file.metadata()["python_random"]))
