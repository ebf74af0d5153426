"""A GPU by its name, or from a user's JSON file. Pure: no torch."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from ..json_input import from_json
from .gpu import PCIE_GB_S_PER_LANE, Gpu
from .known_gpus import GPUS, PATTERNS

# Like-named cards with other figures, by what else is in the name.
_OTHER_CARDS = re.compile(r"laptop|mobile|\bnvl\b|\bti\b|super|max q|\bmig\b")
# Cards that are sold with another memory than the catalogue's, too: GB.
_OTHER_SIZES = {"RTX 4090": (48,), "RTX PRO 6000": (48,), "RTX 3060": (8,)}
_SIZE = re.compile(r"\b(\d{1,3}) ?gi?b\b")


def find_gpu(name: str) -> Gpu:
    """The card that `name` means, spelled as a user, `nvidia-smi` or torch would.

    `h100` is the SXM module and `a100` the one of 80 GB; a size in the name is honoured. Raises
    ValueError, listing the names, for a card that is not in the catalogue, also where a like-named one
    is, and for a size that a card does not have.
    """
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).strip().replace("rtx", "rtx ")
    words = re.sub(r"\b([ah]\d00)(?=[a-z])", r"\1 ", words)  # h100pcie
    for key, pattern in PATTERNS.items():
        if (found := re.search(pattern, words)) and not _OTHER_CARDS.search(
            words.replace(found[0], " ")
        ):
            return _sized(GPUS[key], name, _SIZE.search(words))
    by_lower = {key.lower(): key for key in GPUS}
    near = [by_lower[key] for key in get_close_matches(words, by_lower, 3, 0.6)]
    hint = f" (close: {', '.join(near)})" if near else ""
    raise ValueError(
        f"--gpu {name}: not in the catalogue{hint}, which has {', '.join(GPUS)}. "
        "Describe another card in a JSON file and give --gpu_spec FILE"
    )


def _sized(gpu: Gpu, name: str, size: re.Match | None) -> Gpu:
    """The card with the memory that is in its name, if there is one."""
    if size is None or 0.9 <= gpu.memory_gib / int(size[1]) <= 1.02:
        return gpu
    others = _OTHER_SIZES.get(gpu.name, ())
    if int(size[1]) in others:
        return replace(
            gpu, name=f"{gpu.name} {size[1]}GB", memory_gib=round(0.985 * int(size[1]), 1)
        )
    sold = ", or ".join([f"{gpu.memory_gib:g} GiB", *(f"{gb} GB" for gb in others)])
    raise ValueError(
        f"--gpu {name}: the {gpu.name} has {sold}; leave the size out, use less of it with "
        "--gpu_memory_gib, or describe another card in --gpu_spec FILE"
    )


CALIBRATION = "machine"  # what a calibration's file says besides a card's fields (calibration.py)


def load_gpu_spec(path: str | Path, flag: str = "") -> Gpu:
    """A card described by a JSON object with `Gpu`'s fields; `base` names a card to start from.

    {"base": "RTX 4090", "name": "my 4090 at 350 W", "measured_bf16_tflops": 120}
    A calibration's file is one too. Raises ValueError, naming the file and the field, for what is
    missing, unknown or out of range.
    """
    flag = flag or f"--gpu_spec {path}"
    given = read_object(path, flag, "a GPU's fields")
    given.pop(CALIBRATION, None)
    base = base_of(given, flag)
    names = [f.name for f in fields(Gpu)]
    if unknown := [key for key in given if key not in names]:
        raise ValueError(
            f"{flag}: unknown field {', '.join(unknown)}; there are {', '.join(names)}"
        )
    needed = ("name", "memory_gib", "bf16_tflops", "bandwidth_gb_s")
    if missing := [key for key in needed if given.get(key, base and "base's") is None]:
        raise ValueError(f"{flag}: needs {', '.join(missing)}, or a base")
    if "measured_link_gb_s" in given:
        given["measured_link_gb_s"] = _links(given["measured_link_gb_s"], flag)
    gpu = replace(base, **given) if base else Gpu(**dict(source=str(path)) | given)
    _check_gpu(gpu, flag)
    return gpu


def read_object(path: str | Path, flag: str, what: str) -> dict:
    """A JSON object from a user's file. Raises ValueError, beginning with `flag`, if it is none."""
    try:
        found = from_json(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(
            f"{flag}: {(error.strerror or str(error)).lower()}; give a JSON file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{flag}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag}: takes one JSON object with {what}")
    return found


def base_of(given: dict, flag: str) -> Gpu | None:
    """The card that a description starts from, taken out of it; None if it stands alone."""
    if "base" not in given:
        return None
    name = given.pop("base")
    try:
        return find_gpu(name) if isinstance(name, str) else find_gpu(repr(name))
    except ValueError as error:
        said = str(error).removeprefix("--gpu ").split(". Describe")[0]
        raise ValueError(
            f"{flag}: base {said}; give one of these, or all figures and no base"
        ) from None


def _links(given, flag: str) -> tuple[tuple[int, float], ...]:
    """GB/s by the number of GPUs, from a JSON object such as {"2": 329, "4": 355}."""
    try:
        pairs = tuple((int(gpus), float(rate)) for gpus, rate in given.items())
        if all(gpus > 1 and 0 < rate < float("inf") for gpus, rate in pairs):
            return pairs
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        f'{flag}: measured_link_gb_s must be GB/s by number of GPUs, {{"2": 329}}, '
        f"got {json.dumps(given)}"
    )


_TEXTS = ("name", "price_source", "source")


def _check_gpu(gpu: Gpu, where: str):
    """Refuse figures that no card has."""
    for f in fields(gpu):
        value = getattr(gpu, f.name)
        if f.name in _TEXTS and not (isinstance(value, str) and (value or f.name != "name")):
            raise ValueError(f"{where}: {f.name} must be a text, got {value!r}")
        if f.name == "has_bf16":
            if not isinstance(value, bool):
                raise ValueError(f"{where}: has_bf16 must be true or false, got {value!r}")
            continue
        if f.name in (*_TEXTS, "measured_link_gb_s") or value is None and f.default is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ValueError(f"{where}: {f.name} must be a number, got {value!r}")
        if (
            value < 0
            or value == 0
            and f.name not in ("nvlink_gb_s", "bridge_gb_s", "price_per_hour")
        ):
            raise ValueError(f"{where}: {f.name} must be above 0, got {value}")
    if gpu.pcie_gen not in PCIE_GB_S_PER_LANE:
        raise ValueError(
            f"{where}: pcie_gen {gpu.pcie_gen}: choose {', '.join(map(str, PCIE_GB_S_PER_LANE))}"
        )
