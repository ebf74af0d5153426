"""GPUs: memory, speed, links and price, as estimates and the planner need them. Pure: no torch.

Speeds are the makers' dense figures (no sparsity) with fp32 accumulation, which is what training
uses; GeForce cards run it at half the rate that their advertisements quote. A datasheet is never
reached: `measured_*` holds what this project measured, and other cards are assumed to reach
`_TYPICAL_SHARE` of theirs. A card without measurements is *uncalibrated*, and says so.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from ..json_input import from_json

# Share of the datasheet that large products and long copies reach: the H100's measured shares
# (780 of 989 TFLOP/s, 3.0 of 3.35 TB/s, 329 of 450 GB/s), taken for all cards.
_TYPICAL_SHARE = dict(tflops=0.79, bandwidth=0.90, link=0.73)
PCIE_GB_S_PER_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one direction, after line coding
_UPLINKS = 2  # of PCIe, which the cards of a machine without NVLink boards share
_PCIE_SHARE = 0.80  # of the line rate, by pinned host copies


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Bandwidths are in GB/s (1e9 bytes), memory in GiB (2**30)."""

    name: str
    memory_gib: float  # as torch reports it; less than the box says
    bf16_tflops: float  # dense, fp32 accumulation
    fp8_tflops: float | None = None  # the same; None: no fp8 products
    bandwidth_gb_s: float  # of the GPU's own memory
    nvlink_gb_s: float = 0.0  # one direction, to all peers; 0: peers talk over PCIe
    bridge_gb_s: float = 0.0  # the same with an NVLink bridge, which is bought apart
    pcie_gen: int = 4
    pcie_lanes: int = 16
    has_bf16: bool = True  # False: only fp16 runs on tensor cores
    watts: float | None = None  # board power, by the datasheet
    price_per_hour: float | None = None  # US dollars; None: no source at hand
    price_source: str = ""
    source: str = ""  # of the speeds
    measured_bf16_tflops: float | None = None
    measured_fp8_tflops: float | None = None
    measured_bandwidth_gb_s: float | None = None  # bytes read and written, per second
    measured_unpack_gb_s: float | None = None  # the same, where 4-bit weights become 16-bit ones
    measured_host_gb_s: float | None = None  # of one direction, to or from pinned memory
    measured_link_gb_s: tuple[tuple[int, float], ...] = ()  # NCCL bus bandwidth by GPUs

    @property
    def calibrated(self) -> bool:
        """True if products and copies were measured on this card."""
        return bool(self.measured_bf16_tflops and self.measured_bandwidth_gb_s)

    @property
    def label(self) -> str:
        """The name, with a mark where the figures are only the datasheet's."""
        return self.name if self.calibrated else f"{self.name} (uncalibrated)"

    @property
    def reached_tflops(self) -> float:
        """bf16 TFLOP/s of large matrix products."""
        return self.measured_bf16_tflops or self.bf16_tflops * _TYPICAL_SHARE["tflops"]

    @property
    def reached_fp8_tflops(self) -> float | None:
        """The same in fp8; None where there is none."""
        if self.measured_fp8_tflops or not self.fp8_tflops:
            return self.measured_fp8_tflops
        return self.fp8_tflops * _TYPICAL_SHARE["tflops"]

    @property
    def reached_bandwidth_gb_s(self) -> float:
        """GB/s, read plus written, of long copies."""
        return self.measured_bandwidth_gb_s or self.bandwidth_gb_s * _TYPICAL_SHARE["bandwidth"]

    @property
    def host_gb_s(self) -> float:
        """GB/s of one direction between pinned host memory and the GPU."""
        if self.measured_host_gb_s:
            return self.measured_host_gb_s
        return PCIE_GB_S_PER_LANE[self.pcie_gen] * self.pcie_lanes * _PCIE_SHARE

    def shared_host_gb_s(self, gpus: int) -> float:
        """The same for each of `gpus` cards of one machine that copy at once.

        Cards without NVLink share their host's two uplinks, which switches split among them: on 4 and 8
        RTX A5000s CPU offload was slower than none, on two cards not
        (https://www.answer.ai/posts/2024-03-14-fsdp-qlora-deep-dive.html). Boards with NVLink have an
        uplink for each card.
        """
        if self.nvlink_gb_s:
            return self.host_gb_s
        return self.host_gb_s * min(1.0, _UPLINKS / gpus)

    def peer_gb_s(self, gpus: int = 2) -> float:
        """NCCL bus bandwidth among `gpus` cards of one machine.

        Without NVLink data go through the host, up and down: half of PCIe's rate.
        """
        known = dict(self.measured_link_gb_s)
        if known:
            return known[min(known, key=lambda n: abs(n - gpus))]
        return self.nvlink_gb_s * _TYPICAL_SHARE["link"] or self.host_gb_s / 2

    def without_nvlink(self) -> Gpu:
        """The same card where peers talk over PCIe (NCCL_P2P_DISABLE=1, or no bridge)."""
        return replace(
            self, name=f"{self.name} without NVLink", nvlink_gb_s=0.0, measured_link_gb_s=()
        )


_AMPERE = "NVIDIA GA102 whitepaper"
_AMPERE_PRO = "NVIDIA RTX A-series datasheets"
_ADA = "NVIDIA Ada whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell whitepaper"
A100 = "NVIDIA A100 datasheet"
_HOPPER = "NVIDIA H100/H200 datasheet"
_VOLTA = "NVIDIA V100 SXM2 datasheet"
_BLACKWELL_BOARDS = "NVIDIA HGX B200 and B300 datasheets"
_RENTED = "lowest RunPod price listed at deploybase.ai/articles/runpod-gpu-pricing, 2026-03"


_ARTICLE = "lowest price that 'Benchmarking QLoRA+FSDP' took from cloud-gpus.com, 2024-03"
_SERVERLESS = "RunPod's active serverless worker, docs.runpod.io/serverless/pricing, read 2026-11"
_COMMUNITY = "RunPod's community cloud by theneuralbase.com/runpod, read 2026-11"


def _priced(dollars: float, source: str = _RENTED) -> dict:
    return dict(price_per_hour=dollars, price_source=source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="RTX 3090",
            memory_gib=23.7,
            bf16_tflops=71.0,
            bandwidth_gb_s=936,
            watts=350,
            source=_AMPERE,
            bridge_gb_s=56.2,
            **_priced(0.22),
        ),
        Gpu(
            name="RTX 4080",
            memory_gib=15.7,
            bf16_tflops=97.5,
            fp8_tflops=194.9,
            bandwidth_gb_s=717,
            watts=320,
            source=_ADA,
            **_priced(0.29, _COMMUNITY),
        ),
        Gpu(
            name="RTX 4090",
            memory_gib=23.6,
            bf16_tflops=165.2,
            fp8_tflops=330.3,
            bandwidth_gb_s=1008,
            watts=450,
            source=_ADA,
            **_priced(0.34),
        ),
        Gpu(
            name="RTX 5090",
            memory_gib=31.4,
            bf16_tflops=209.5,
            fp8_tflops=419.0,
            bandwidth_gb_s=1792,
            pcie_gen=5,
            watts=575,
            source=_BLACKWELL,
            **_priced(0.69),
        ),
        Gpu(
            name="RTX PRO 6000",
            memory_gib=95.0,
            bf16_tflops=503.8,
            fp8_tflops=1007.6,
            bandwidth_gb_s=1792,
            pcie_gen=5,
            watts=600,
            source=_BLACKWELL,
            **_priced(0.89),
        ),
        Gpu(
            name="RTX A5000",
            memory_gib=23.7,
            bf16_tflops=111.1,
            bandwidth_gb_s=768,
            bridge_gb_s=56.2,
            watts=230,
            source=_AMPERE_PRO,
            **_priced(0.44, _ARTICLE),
        ),
        Gpu(
            name="RTX A6000",
            memory_gib=47.5,
            bf16_tflops=154.8,
            bandwidth_gb_s=768,
            bridge_gb_s=56.2,
            watts=300,
            source=_AMPERE_PRO,
            **_priced(0.86, _SERVERLESS),
        ),
        Gpu(
            name="RTX 6000 Ada",
            memory_gib=47.5,
            bf16_tflops=364.2,
            fp8_tflops=728.5,
            bandwidth_gb_s=960,
            watts=300,
            source="NVIDIA RTX 6000 Ada datasheet",
            **_priced(1.14, _ARTICLE),
        ),
        Gpu(
            name="A100 40GB",
            memory_gib=39.4,
            bf16_tflops=312,
            bandwidth_gb_s=1555,
            nvlink_gb_s=300,
            watts=400,
            source=A100,
            **_priced(1.80, _ARTICLE),
        ),
        Gpu(
            name="A100 80GB",
            memory_gib=79.1,
            bf16_tflops=312,
            bandwidth_gb_s=2039,
            nvlink_gb_s=300,
            watts=400,
            source=A100,
            **_priced(1.39),
        ),
        Gpu(
            name="H100 PCIe",
            memory_gib=79.1,
            bf16_tflops=756,
            fp8_tflops=1513,
            bandwidth_gb_s=2000,
            pcie_gen=5,
            bridge_gb_s=300,
            watts=350,
            source=_HOPPER,
            **_priced(1.99),
        ),
        Gpu(
            name="H100 SXM",
            memory_gib=79.1,
            bf16_tflops=989.4,
            fp8_tflops=1979,
            bandwidth_gb_s=3350,
            nvlink_gb_s=450,
            pcie_gen=5,
            watts=700,
            source=_HOPPER,
            **_priced(2.69),
            measured_bf16_tflops=780,
            measured_bandwidth_gb_s=3000,
            measured_link_gb_s=((2, 329.0), (4, 355.0)),
        ),
        Gpu(
            name="H200",
            memory_gib=139.7,
            bf16_tflops=989.4,
            fp8_tflops=1979,
            bandwidth_gb_s=4800,
            nvlink_gb_s=450,
            pcie_gen=5,
            watts=700,
            source=_HOPPER,
            **_priced(3.59),
            measured_bf16_tflops=718,
            measured_fp8_tflops=1356,
            measured_bandwidth_gb_s=4200,
            measured_unpack_gb_s=2320,
            measured_host_gb_s=55.3,
        ),
        Gpu(
            name="L40S",
            memory_gib=44.4,
            bf16_tflops=362.0,
            fp8_tflops=733,
            bandwidth_gb_s=864,
            watts=350,
            source="NVIDIA L40S datasheet",
            **_priced(0.79),
        ),
        Gpu(
            name="T4",
            memory_gib=14.6,
            bf16_tflops=65.0,
            has_bf16=False,
            bandwidth_gb_s=320,
            pcie_gen=3,
            watts=70,
            source="NVIDIA T4 datasheet",
        ),
        Gpu(
            name="V100 16GB",
            memory_gib=15.8,
            bf16_tflops=125.0,
            has_bf16=False,
            bandwidth_gb_s=900,
            nvlink_gb_s=150,
            pcie_gen=3,
            watts=300,
            source=_VOLTA,
        ),
        Gpu(
            name="V100 32GB",
            memory_gib=31.7,
            bf16_tflops=125.0,
            has_bf16=False,
            bandwidth_gb_s=900,
            nvlink_gb_s=150,
            pcie_gen=3,
            watts=300,
            source=_VOLTA,
            **_priced(0.29, _COMMUNITY),
        ),
        Gpu(
            name="L4",
            memory_gib=22.0,
            bf16_tflops=121.0,
            fp8_tflops=242.0,
            bandwidth_gb_s=300,
            watts=72,
            source="NVIDIA L4 datasheet",
            **_priced(0.44),
        ),
        Gpu(
            name="A10G",
            memory_gib=22.0,
            bf16_tflops=70.0,
            bandwidth_gb_s=600,
            watts=300,
            source="NVIDIA A10G figures of AWS EC2 G5",
        ),
        Gpu(
            name="RTX 3060",
            memory_gib=11.8,
            bf16_tflops=25.5,
            bandwidth_gb_s=360,
            watts=170,
            source=_AMPERE,
        ),
        Gpu(
            name="RTX 4070 Ti",
            memory_gib=11.7,
            bf16_tflops=80.2,
            fp8_tflops=160.4,
            bandwidth_gb_s=504,
            watts=285,
            source=_ADA,
        ),
        Gpu(
            name="RTX 4070 Ti SUPER",
            memory_gib=15.7,
            bf16_tflops=88.2,
            fp8_tflops=176.4,
            bandwidth_gb_s=672,
            watts=285,
            source=_ADA,
        ),
        Gpu(
            name="B200",
            memory_gib=178.4,
            bf16_tflops=2250,
            fp8_tflops=4500,
            bandwidth_gb_s=8000,
            nvlink_gb_s=900,
            pcie_gen=5,
            watts=1000,
            source=_BLACKWELL_BOARDS,
            **_priced(5.98),
        ),
        Gpu(
            name="B300",
            memory_gib=267.7,
            bf16_tflops=2250,
            fp8_tflops=4500,
            bandwidth_gb_s=8000,
            nvlink_gb_s=900,
            pcie_gen=6,
            watts=1100,
            source=_BLACKWELL_BOARDS,
        ),
        Gpu(
            name="GB200",
            memory_gib=184.4,
            bf16_tflops=2500,
            fp8_tflops=5000,
            bandwidth_gb_s=8000,
            nvlink_gb_s=900,
            pcie_gen=6,
            watts=1200,
            source="NVIDIA GB200 NVL72 datasheet; the link to the host is taken as PCIe 6 x16",
        ),
        Gpu(
            name="MI300X",
            memory_gib=191.7,
            bf16_tflops=1307.4,
            fp8_tflops=2614.9,
            bandwidth_gb_s=5300,
            nvlink_gb_s=448,
            pcie_gen=5,
            watts=750,
            source="AMD MI300X data sheet; the link is Infinity Fabric",
        ),
    )
}

# How a card is spelled, tried in order on lower-case words with one space between.
PATTERNS = {
    "RTX PRO 6000": r"pro ?6000\b",
    "RTX 6000 Ada": r"6000 ?ada\b",
    "H100 PCIe": r"\bh100\b.*pcie",
    "H100 SXM": r"\bh100\b",
    "H200": r"\bh200\b",
    "A100 40GB": r"\ba100\b.*\b40",
    "A100 80GB": r"\ba100\b",
    "L40S": r"\bl40s\b",
    "L4": r"\bl4\b",
    "T4": r"\bt4\b",
    "V100 32GB": r"\bv100s?\b.*\b32",
    "V100 16GB": r"\bv100\b",
    "A10G": r"\ba10g\b",
    "MI300X": r"\bmi300x\b",
    "GB200": r"\bgb200\b",
    "B200": r"\bb200\b",
    "B300": r"\bb300\b",
    "RTX A6000": r"\ba6000\b",
    "RTX A5000": r"\ba5000\b",
    "RTX 3060": r"\b3060\b",
    "RTX 3090": r"\b3090\b",
    "RTX 4070 Ti SUPER": r"\b4070 ?ti (super\b|.*\b16)",
    "RTX 4070 Ti": r"\b4070 ?ti\b",
    "RTX 4080": r"\b4080\b",
    "RTX 4090": r"\b4090\b(?! d\b)",
    "RTX 5090": r"\b5090\b(?! d\b)",
}
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
