"""Stream a safetensors checkpoint into a model that is already sharded.

No rank ever holds the model: it is built on the meta device, and each rank reads only its own rows
of each tensor, quantizes them on its device and copies them into its shard. What is wrong with a
folder is found from its file headers, before any rank waits for another.
"""
from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .dist import local_rows
from .quantize import QuantLinear, quantize_rows

READ_AHEAD = 4  # tensors read before they are needed
READERS = 2     # threads that read them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_config(model_name: str) -> PretrainedConfig:
    """The config.json of a local folder or a hub name.

    Raises ValueError naming --model_name if it is not there.
    """
    folder = Path(model_name)
    if looks_local(model_name) and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ValueError(f"--model_name {model_name}: the folder {what}; give a folder in "
                         "transformers' format or a hub name such as org/model")
    try:
        return AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model_name {model_name}: {first_line(error)}") from error


def looks_local(model_name: str) -> bool:
    """True for a path; a hub name has at most one slash and does not exist as a folder."""
    return (Path(model_name).exists() or model_name.startswith((".", "/", "~"))
            or model_name.count("/") != 1)


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def checkpoint_folder(model_name: str) -> Path:
    """The local folder of a model; a hub name is fetched into the cache first."""
    if looks_local(model_name): return Path(model_name)
    from huggingface_hub import snapshot_download
    # Some repositories hold the weights twice: `model*` is what transformers would read.
    wanted = ["model*.safetensors", "*.json", "*.model", "*.jinja"]
    return Path(snapshot_download(model_name, allow_patterns=wanted))


def meta_model(config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str = "sdpa"
               ) -> nn.Module:
    """The model with its parameters on the meta device and its buffers real.

    Buffers such as rotary frequencies are in no checkpoint: they are computed here, once, and
    survive `materialize`. Raises ValueError if the attention kernel is unknown or not installed.
    """
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                     attn_implementation=attn_implementation)
    except (ValueError, ImportError) as error:
        if "attn" not in str(error).lower() and "attention" not in str(error).lower(): raise
        raise ValueError(f"--attn_implementation {attn_implementation}: {first_line(error)}") from error
    model.config.use_cache = False
    model.tie_weights()
    return model.train()


def materialize(model: nn.Module, device: torch.device, parameter_device: torch.device):
    """Give meta parameters uninitialised storage on `parameter_device`, move buffers to `device`."""
    model._apply(lambda t: torch.empty_like(t, device=parameter_device) if t.is_meta
                 else t.to(device))
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if any(not hasattr(p, "device_mesh") for p in causal.parameters()): causal.tie_weights()


class Checkpoint:
    """The tensors of a folder of safetensors files.

    Raises ValueError, naming the file, for a missing, truncated or foreign file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, Path] = {}
        for path in self.safetensors_files():
            for name, shape in read_header(path).items():
                self.shapes[name], self.files[name] = shape, path
        self.check_index()

    def safetensors_files(self) -> list[Path]:
        files = sorted(self.folder.glob("*.safetensors"))
        if files: return files
        bins = sorted(self.folder.glob("*.bin")) + sorted(self.folder.glob("*.pth"))
        remedy = (f"only {bins[0].name} and the like; convert with model.save_pretrained(folder, "
                  "safe_serialization=True)" if bins else "no *.safetensors file")
        raise ValueError(f"--model_name {self.folder}: it holds {remedy}")

    def check_index(self):
        """Every file that the index names must be there."""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file(): return
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({first_line(error)}); "
                             "it may be a pointer or an error page: download it again") from error
        for name in names:
            if not (self.folder / name).is_file():
                raise ValueError(f"{index} names {name}, which is missing; download it again")

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows (start, stop) of a tensor, on the host, as stored."""
        try:
            with safe_open(self.files[name], framework="pt") as file:
                part = file.get_slice(name)
                return part[start:stop] if self.shapes[name] else part[...]
        except SafetensorError as error:
            raise ValueError(f"{self.files[name]}: can't read {name}: {error}") from error


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one file; checks that the file is as long as its header says."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size: raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a safetensors file ({size} bytes: {first_line(error)}); "
                         "it may be a pointer or an error page: download it again") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} is truncated: {size} bytes where its header says "
                         f"{8 + length + end}; download it again")
    return shapes


class RandomCheckpoint:
    """Random weights of a model's shape, for benchmarks: any rows, without the rest."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device, seed: int = 0):
        self.shapes, self.device, self.seed = shapes, device, seed

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Normal values of standard deviation 0.02, ones for norms."""
        shape = (stop - start, *self.shapes[name][1:])
        if len(shape) == 1: return torch.ones(shape, device=self.device)
        seed = hash_seed(f"{self.seed}:{name}:{start}")
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(
            0, 0.02, generator=generator)


def hash_seed(text: str) -> int:
    """A seed from a text, equal in every process."""
    import hashlib
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


@dataclass
class Job:
    """One tensor of the checkpoint and where its rows go."""
    key: str
    local: Tensor
    rows: tuple[int, int]
    absmax: Tensor | None = None
    quant_type: str = ""
    absmax_dtype: str = "fp32"


def checkpoint_key(name: str) -> str:
    """A parameter's name in the checkpoint: without what PEFT put around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(checkpoint key, owner, leaf name, parameter) of every tensor that a checkpoint fills.

    A shared tensor comes once, under its first name; adapters and scales come from elsewhere.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if ".lora_" in name or leaf == "absmax" or id(parameter) in seen: continue
            seen.add(id(parameter))
            yield checkpoint_key(name), module, leaf, parameter


def is_packed(module: nn.Module, leaf: str) -> bool:
    """True for the bytes of a quantized weight."""
    return isinstance(module, QuantLinear) and leaf == "weight"


def load_jobs(model: nn.Module) -> Iterator[Job]:
    """What this rank must read, in the model's order."""
    for key, module, leaf, parameter in base_parameters(model):
        local, start, stop = local_rows(parameter)
        job = Job(key, local, (start, stop))
        if is_packed(module, leaf):
            job.absmax, job.quant_type = local_rows(module.absmax)[0], module.quant_type
            job.absmax_dtype = module.absmax_dtype
        yield job


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs from a checkpoint, with its unquantized shape."""
    return {key: (module.out_features, module.in_features) if is_packed(module, leaf)
            else tuple(parameter.shape)
            for key, module, leaf, parameter in base_parameters(model)}


def check_complete(model: nn.Module, checkpoint: Checkpoint):
    """Refuse a checkpoint that lacks a tensor of the model or has it in another shape.

    Raises ValueError, so that no weight is ever left uninitialised.
    """
    for key, shape in expected_shapes(model).items():
        found = checkpoint.shapes.get(key)
        if found is None:
            raise ValueError(f"{checkpoint.folder} has no tensor {key}; its files are not those of "
                             "config.json")
        if found != shape:
            raise ValueError(f"{checkpoint.folder}: {key} has shape {found}, config.json wants "
                             f"{shape}; the two are of different models")


def load_weights(model: nn.Module, checkpoint: Checkpoint | RandomCheckpoint, device: torch.device,
                 workers: int = READERS, progress: Callable | None = None):
    """Fill the model's frozen and trained base weights with this rank's rows, quantizing on `device`.

    Reads run ahead in `workers` threads, a few tensors at a time. `progress(bytes)` is told of every
    tensor.
    """
    jobs = load_jobs(model)
    with ThreadPoolExecutor(workers) as pool, torch.no_grad():
        for job, rows in read_ahead(pool, jobs, lambda j: checkpoint.rows(j.key, *j.rows)):
            place(job, rows, device)
            if progress: progress(rows.numel() * rows.element_size())


def read_ahead(pool: ThreadPoolExecutor, jobs: Iterator[Job], read: Callable) -> Iterator:
    """(job, rows) in order, with READ_AHEAD reads under way."""
    pending = [(job, pool.submit(read, job)) for job in islice(jobs, READ_AHEAD)]
    while pending:
        job, future = pending.pop(0)
        rows = future.result()
        for following in islice(jobs, 1): pending.append((following, pool.submit(read, following)))
        yield job, rows


def place(job: Job, rows: Tensor, device: torch.device):
    """Copy rows into a shard, quantized if the shard is."""
    if job.absmax is None:
        job.local.copy_(rows)
        return
    packed, absmax = quantize_rows(rows.to(device), job.quant_type, job.absmax_dtype)
    job.local.copy_(packed)
    job.absmax.copy_(absmax)
