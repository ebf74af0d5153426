"""Grids of runs to measure, in YAML: which settings, on how many GPUs, and what others published.

    title: Two cards, 7B
    defaults: {model_name: llama-2-7b, random_weights: true, gpus: 2, context_length: 2048}
    cells:
      - {name: "QLoRA {batch_size}x2048", batch_size: [4, 10]}
      - {name: LoRA 4x2048, train_type: lora, batch_size: 4, published: {peak_gib: 16.14}}

A cell has the settings of a run, by their names, and gpus, num_hidden_layers (a model cut short, of the
same width), gpu_memory_gib (a smaller card) and published. Lists make one cell for each combination.
Pure: no torch.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path

from ..catalog.arch import ModelShape
from ..catalog.known_models import bare_name, known_config
from ..catalog.shapes import model_shape
from ..config import AUTO, RunConfig
from ..config.settings import shown

_AUTO_NUMBERS = (("batch_size", "auto"), ("activation_budget_gib", "auto"))
PARTS = ("title", "source", "defaults", "cells")  # of a file
OWN = ("name", "gpus", "num_hidden_layers", "gpu_memory_gib", "published")


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str
    settings: dict  # fields of RunConfig
    gpus: int = 1
    num_hidden_layers: int | None = None  # None: all of the model's
    gpu_memory_gib: float | None = None  # None: all of the card's
    published: dict = field(default_factory=dict, hash=False)

    @property
    def config(self) -> RunConfig:
        """The run's configuration; the model by its name."""
        return RunConfig(**self.settings)

    @property
    def shape(self) -> ModelShape:
        """The model's shape, cut if asked."""
        shape = model_shape(self.settings["model_name"])
        return shape.cut(self.num_hidden_layers) if self.num_hidden_layers else shape

    def argv(self) -> list[str]:
        """The run's command line; the model is a folder with config.json alone."""
        folder = model_folder(self.settings["model_name"], self.num_hidden_layers)
        settings = self.settings | dict(model_name=str(folder))
        return [part for name, value in settings.items() for part in (f"--{name}", shown(value))]


@dataclass(frozen=True)
class Grid:
    """Cells with what they are about."""

    title: str
    source: str
    cells: list[Cell]


def read_grid(path: str | Path) -> Grid:
    """A grid from its file. Raises ValueError naming the file, the cell and what is wrong."""
    import yaml

    try:
        given = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"--grid {path}: {error.strerror}; give a YAML file, as those in benchmarks/grids"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(
            f"--grid {path}: not readable YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(given, dict) or not _is_list_of_cells(given.get("cells")):
        raise ValueError(f"--grid {path}: takes title, source, defaults and a list of cells")
    if unknown := [str(key) for key in given if key not in PARTS]:
        raise ValueError(
            f"--grid {path}: unknown {', '.join(unknown)}; takes title, source, defaults and cells"
        )
    defaults, cells = given.get("defaults") or {}, []
    if not isinstance(defaults, dict):
        raise ValueError(
            f"--grid {path}: defaults holds no settings; give one `name: value` a line"
        )
    for number, wanted in enumerate(given["cells"], 1):
        try:
            cells += _make_cells(defaults | wanted)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--grid {path}: cell {number}: {error}") from None
    names = [cell.name for cell in cells]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--grid {path}: several cells are named {sorted(twice)[0]!r}")
    return Grid(given.get("title", Path(path).stem), given.get("source", ""), cells)


def _is_list_of_cells(cells) -> bool:
    """Whether there are cells, each with settings."""
    return isinstance(cells, list) and bool(cells) and all(isinstance(cell, dict) for cell in cells)


def _as_number(value):
    """1e-4 as a number: YAML 1.1 reads it as a text, as it has no point."""
    is_one = isinstance(value, str) and re.fullmatch(r"-?\d+[eE][-+]?\d+", value)
    return float(value) if is_one else value


def _make_cells(wanted: dict) -> list[Cell]:
    """The cell of a dict, or one for each combination of its lists."""
    known = {f.name for f in fields(RunConfig)}
    if unknown := [key for key in wanted if key not in known and key not in OWN]:
        raise ValueError(f"unknown setting {', '.join(map(str, unknown))}")
    if missing := [key for key in ("name", "model_name") if key not in wanted]:
        raise ValueError(f"it has no {' and no '.join(missing)}; give it here or under defaults")
    lists = {key: value for key, value in wanted.items() if isinstance(value, list)}
    found = []
    for values in product(*lists.values()):
        chosen = wanted | dict(zip(lists, values, strict=True))
        settings = {
            key: AUTO if (key, value) in _AUTO_NUMBERS else _as_number(value)
            for key, value in chosen.items()
            if key not in OWN
        }
        if not {"global_batch_size", "bins_per_step"} & settings.keys():
            settings.setdefault("gradient_accumulation_steps", 1)  # as short a step as there is
        cell = Cell(
            str(wanted["name"]).format(**chosen),
            settings,
            int(chosen.get("gpus", 1)),
            chosen.get("num_hidden_layers"),
            chosen.get("gpu_memory_gib"),
            chosen.get("published") or {},
        )
        cell.config, cell.shape  # noqa: B018  wrong settings are said here
        found.append(cell)
    return found


def model_folder(name: str, layers: int | None = None) -> Path:
    """A folder with a model's config.json, cut to `layers` if given; one that exists stays as it is.

    Raises ValueError for a name that is neither a folder nor a known model's.
    """
    if Path(name).exists() and not layers:
        return Path(name)
    config = (
        json.loads((Path(name) / "config.json").read_text())
        if Path(name).exists()
        else known_config(name)
    )
    if layers:
        config["num_hidden_layers"] = layers
    folder = Path(
        tempfile.gettempdir(),
        "fsdp_qlora_shapes",
        str(config["num_hidden_layers"]),
        bare_name(name),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
