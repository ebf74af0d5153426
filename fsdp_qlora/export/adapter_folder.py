"""Read a PEFT adapter folder: what it does to each tensor of its base.

All of it follows from adapter_config.json and the names in adapter_model.safetensors, as in PEFT's
own merge. What is not known here is refused by name, never left out. The format:
https://huggingface.co/docs/peft/developer_guides/checkpoint

Shapes: I inputs, O outputs, R rank.  W (O, I), or (I, O) if transposed; A (R, I), B (O, R)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..catalog.known_models import hub_name
from ..experts import STACKS, is_target
from ..json_input import from_json
from ..loading import first_line
from ..loading.model_folder import looks_local

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

# Fields of a LoraConfig whose meaning is honoured here, and those that matter in training only.
_HONOURED = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_modules",
    "target_parameters",
    "init_lora_weights",
    "ensure_weight_tying",
}
_TRAINING_ONLY = {
    "peft_type",
    "task_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "exclude_modules",
    "megatron_core",
    "layers_to_transform",
    "layers_pattern",
    "loftq_config",
    "eva_config",
    "runtime_config",
    "qalora_group_size",
}
# Other ways to begin change the base too, which the saved adapter alone does not tell.
INITS = (True, False, None, "gaussian", "eva", "orthogonal")

_PART = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])"
    r"|(?P<bias>lora_B\.bias)|(?P<magnitude>lora_magnitude_vector(?:\.weight)?))"
)


@dataclass
class Change:
    """What an adapter does to one tensor of the base; strings are names in the adapter's file."""

    module: str
    replacement: str | None = None  # the tensor was trained whole
    parts: dict[str, str] = field(default_factory=dict)  # A, B and magnitude of a weight
    added: str | None = None  # a bias of B, added to the base's
    embedding: bool = False
    experts: int = 0  # whose weights lie below each other, expert by expert
    first_row: int = 0  # of them that the tensor holds
    transposed: bool = False  # which holds each as (I, O)
    scaling: float = 1.0


@dataclass
class Delta:
    """A low-rank change in fp32: scaling B A, and DoRA's magnitude (O,) if there is one."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None
    transposed: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows can't be changed one by one: DoRA's norm is over all inputs of an output."""
        return self.transposed and self.magnitude is not None

    def apply(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Rows (start, stop) of the weight, changed. DoRA is arXiv:2402.09353, as PEFT computes it."""
        if self.transposed:
            change = (self.b @ self.a[:, start:stop]).t()
        else:
            change = self.b[start:stop] @ self.a
        rows = rows + change * self.scaling
        if self.magnitude is None:
            return rows
        if self.transposed:
            return rows * (self.magnitude / torch.linalg.norm(rows, dim=0))
        return rows * (self.magnitude[start:stop] / torch.linalg.norm(rows, dim=1))[:, None]


@dataclass
class _ExpertsDelta:
    """A low-rank change of each expert in fp32, for a tensor of all, or of rows of one of them."""

    a: Tensor  # (E, R, I)
    b: Tensor  # (E, O, R)
    scaling: float
    first_row: int = 0  # of all E O that the tensor holds
    transposed: bool = False
    needs_all_rows = False

    def apply(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Rows (start, stop) of the tensor, changed: experts where it is (E, O, I) or (E, I, O)."""
        if self.transposed:
            a, b = self.a[start:stop].transpose(1, 2), self.b[start:stop].transpose(1, 2)
            return torch.baddbmm(rows, a, b, alpha=self.scaling)
        if rows.dim() == 3:
            return torch.baddbmm(rows, self.b[start:stop], self.a[start:stop], alpha=self.scaling)
        expert, row = divmod(self.first_row + start, self.b.shape[1])
        return torch.addmm(
            rows, self.b[expert, row : row + len(rows)], self.a[expert], alpha=self.scaling
        )


@dataclass
class _Shift:
    """What is added to a bias."""

    by: Tensor
    needs_all_rows = False

    def apply(self, rows: Tensor, start: int, stop: int) -> Tensor:
        return rows + self.by[start:stop]


class AdapterFolder:
    """An adapter on disk. Raises ValueError, naming --adapter_folder and the fault."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_adapter_config(self.folder)
        _check_supported(self.folder, self.config)
        try:
            self.file = safe_open(self.folder / WEIGHTS_FILE, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"--adapter_folder {folder}: {WEIGHTS_FILE} can't be read "
                f"({first_line(error)}); save the adapter again"
            ) from error
        self.changes = self.read_changes()

    def tensor(self, key: str) -> Tensor:
        """A tensor of the adapter's file, in fp32."""
        return self.file.get_tensor(key).float()

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(key).get_shape())

    def refuse(self, fault: str):
        raise ValueError(f"--adapter_folder {self.folder}: {fault}")

    def read_changes(self) -> dict[str, Change]:
        """Name of a base tensor, as the model has it -> its change. Every tensor is used once."""
        changes: dict[str, Change] = {}

        def change_of(module: str, leaf: str) -> Change:
            return changes.setdefault(f"{module}.{leaf}", Change(module))

        for key in self.file.keys():
            name = key.removeprefix("base_model.model.")
            if found := _PART.fullmatch(name):
                module, kind = found["module"], found["linear"] or found["embedding"]
                if parameter := self.wrapped_parameter(module):
                    changes.setdefault(parameter, Change(parameter, experts=1)).parts[kind] = key
                elif found["bias"]:
                    change_of(module, "bias").added = key
                else:
                    change = change_of(module, "weight")
                    change.parts[kind or "magnitude"] = key
                    change.embedding |= bool(found["embedding"])
            else:
                module, _, leaf = name.replace(".base_layer.", ".").rpartition(".")
                module = module.removesuffix(".modules_to_save")
                if "lora_" in name or leaf not in ("weight", "bias"):
                    self.refuse(
                        f"it holds {key}, which is not part of a supported adapter; merge it with PEFT's "
                        "merge_and_unload"
                    )
                change_of(module, leaf).replacement = key
        for change in changes.values():
            self.complete(change)
        return changes

    def wrapped_parameter(self, module: str) -> str | None:
        """The parameter of experts that a wrapper of PEFT's is for; None for any other module.

        The last of those adapted is outermost (../experts/lora.py).
        """
        owner, targets = module.replace(".base_layer", ""), self.config["target_modules"] or ()
        is_module = (
            bool(re.fullmatch(targets, owner))
            if isinstance(targets, str)
            else any(is_target(owner, target) for target in targets)
        )
        ends = self.config["target_parameters"] or ()
        adapted = [
            name
            for name in (f"{owner}.{stack}" for stack in STACKS)
            if any(is_target(name, end) for end in ends)
        ]
        if is_module or not adapted:
            return None
        depth = module.count(".base_layer")
        if depth >= len(adapted):
            self.refuse(f"{module} wraps more than {CONFIG_FILE} says; save it again")
        return adapted[-1 - depth]

    def complete(self, change: Change):
        """Check that a change has its parts, and find its scaling."""
        if not change.parts and not change.added:
            return
        rank = self.config["rank_pattern"]
        rank = rank.get(get_pattern_key(rank.keys(), change.module), self.config["r"])
        alpha = self.config["alpha_pattern"]
        alpha = alpha.get(get_pattern_key(alpha.keys(), change.module), self.config["lora_alpha"])
        change.scaling = alpha / (rank**0.5 if self.config["use_rslora"] else rank)
        if not change.parts:
            return
        wanted = {"A", "B"} | ({"magnitude"} if self.config["use_dora"] else set())
        if missing := wanted ^ set(change.parts):
            what = "lacks" if missing <= wanted else "has, without use_dora,"
            self.refuse(f"{change.module} {what} {' and '.join(sorted(missing))}; save it again")
        if change.embedding and "magnitude" in change.parts:
            self.refuse(
                f"{change.module} is an embedding with DoRA, which this merge does not support"
            )
        stored = self.shape(change.parts["A"])[0], self.shape(change.parts["B"])[1]
        if change.experts:
            change.experts, rank = stored[0] // rank, stored[0] // rank * rank
        if stored != (rank, rank):
            self.refuse(
                f"{change.module} has rank {stored[0]} in A and {stored[1]} in B, and {CONFIG_FILE} "
                f"says {rank}; the two files belong to different adapters"
            )

    def effect(self, change: Change, shape: tuple[int, ...]) -> Delta | _Shift | None:
        """What a change does to the base's values, if it does not only replace them."""
        if change.added:
            return _Shift(self.tensor(change.added) * change.scaling)
        if change.experts:
            return self.experts_delta(change)
        return self.delta(change, shape) if change.parts else None

    def experts_delta(self, change: Change) -> _ExpertsDelta:
        """The low-rank changes of all experts; PEFT's B has an expert's columns apart."""
        a, b = (self.tensor(change.parts[kind]) for kind in "AB")
        return _ExpertsDelta(
            a.unflatten(0, (change.experts, -1)),
            b.unflatten(1, (-1, change.experts)).permute(2, 0, 1),
            change.scaling,
            change.first_row,
            change.transposed,
        )

    def check_shape(self, change: Change, shape: tuple[int, ...]):
        """Refuse a change of a tensor of another shape."""
        if not change.experts:
            self.is_transposed(change, shape)
            return
        out, wide = self.shape(change.parts["B"])[0], self.shape(change.parts["A"])[1]
        each = (wide, out) if change.transposed else (out, wide)
        if len(shape) == 3 and shape != (change.experts, *each) or shape[-1] != each[-1]:
            self.refuse(
                f"{change.module} is for {change.experts} experts of shape {(out, wide)}, but the base "
                f"has {shape}; give the model that the adapter was trained on"
            )

    def delta(self, change: Change, shape: tuple[int, ...]) -> Delta:
        """The low-rank change of a weight of `shape`."""
        parts = {kind: self.tensor(key) for kind, key in change.parts.items()}
        magnitude = parts["magnitude"].flatten() if "magnitude" in parts else None
        return Delta(
            parts["A"], parts["B"], change.scaling, magnitude, self.is_transposed(change, shape)
        )

    def is_transposed(self, change: Change, shape: tuple[int, ...]) -> bool:
        """Whether a weight of `shape` is (I, O), as GPT-2's are; a square one as fan_in_fan_out says.

        An embedding is (V, D) with A (R, V) and B (D, R), so it counts as transposed. Raises
        ValueError if the change is not for such a weight.
        """
        plain = self.shape(change.parts["B"])[0], self.shape(change.parts["A"])[1]
        square = plain[0] == plain[1] and bool(self.config["fan_in_fan_out"])
        transposed = change.embedding or square or shape != plain
        if shape != (plain[::-1] if transposed else plain):
            self.refuse(
                f"{change.module} is for a weight of shape {plain}, but the base's is {shape}; give the "
                "model that the adapter was trained on"
            )
        return transposed


def why_no_adapter(folder: Path) -> str:
    """What a folder without adapter_config.json is, and what to give instead."""
    if (folder / "config.json").is_file():
        return "it is a whole model; give it as --model_name"
    inside = sorted(file.parent for file in folder.glob(f"*/{CONFIG_FILE}"))
    if inside:
        return f"no {CONFIG_FILE} there; give {inside[0]}"
    if (folder / "model" / "config.json").is_file():
        return f"no {CONFIG_FILE} there; give the whole model as --model_name {folder / 'model'}"
    return f"no {CONFIG_FILE} there; give the folder that training saved, such as output/adapter"


def read_adapter_config(folder: Path) -> dict:
    """adapter_config.json with PEFT's defaults for what it leaves out. Raises ValueError."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"--adapter_folder {folder}: {why_no_adapter(folder)}")
    try:
        config = from_json(path.read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            raise ValueError(f"peft_type is {config.get('peft_type')}, but only LORA is supported")
        config = {**LoraConfig().to_dict(), **config}
        _check_values(config)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"--adapter_folder {folder}: {CONFIG_FILE}: {first_line(error)}"
        ) from error
    return config


def _check_values(config: dict):
    """Refuse a value of adapter_config.json of another kind than the field takes. Raises ValueError."""

    def whole(value) -> bool:
        return type(value) is int and value > 0

    def number(value) -> bool:
        return type(value) in (int, float) and math.isfinite(value)

    def text(value) -> bool:
        return isinstance(value, str | None)

    def names(value) -> bool:
        return isinstance(value, str | list | None)

    def by_name(kind):
        return lambda value: (
            isinstance(value or {}, dict) and all(map(kind, (value or {}).values()))
        )

    kinds = dict(
        r=whole,
        lora_alpha=number,
        rank_pattern=by_name(whole),
        alpha_pattern=by_name(number),
        base_model_name_or_path=text,
        revision=text,
        target_modules=names,
        target_parameters=names,
        modules_to_save=names,
    )
    for name, fits in kinds.items():
        if not fits(config.get(name)):
            raise ValueError(f"{name} can't be {config[name]!r}; save the adapter again")


def _check_supported(folder: Path, config: dict):
    """Refuse a setting that changes the result in a way not known here, naming it."""
    defaults = LoraConfig().to_dict()
    for name, value in config.items():
        if name in _HONOURED | _TRAINING_ONLY or not value or value == defaults.get(name):
            continue
        raise ValueError(
            f"--adapter_folder {folder}: {CONFIG_FILE} sets {name}, which this merge does not "
            "support; use PEFT's merge_and_unload"
        )
    if config["init_lora_weights"] not in INITS:
        raise ValueError(
            f"--adapter_folder {folder}: it was initialized with {config['init_lora_weights']}, "
            "which also changed the base; save it with PEFT's "
            "path_initial_model_for_weight_conversion first"
        )


def base_of(folder: str | Path | None) -> tuple[str, str | None]:
    """The model that an adapter names as its base, and its revision.

    Raises ValueError if it names none, or a folder that is elsewhere now.
    """
    config = read_adapter_config(Path(folder)) if folder else {}
    name = config.get("base_model_name_or_path")
    if not name:
        raise ValueError("--model_name is missing; give the model that the adapter is for")
    if looks_local(hub_name(name)) and not Path(name).expanduser().exists():
        raise ValueError(
            f"--model_name is missing, and {name}, the base that {folder} names, is not there; give the "
            "folder where that model is now, or its hub name"
        )
    return name, config.get("revision")
