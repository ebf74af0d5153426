"""Write a checkpoint of random weights of a model's true shape, to measure loading and training.

python benchmarks/random_checkpoint.py meta-llama/Llama-3.1-8B /dev/shm/llama-8b [--layers N]
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.experts import stacked_weights
from fsdp_qlora.loading import expected_shapes, meta_model
from fsdp_qlora.loading.weight_files import RandomCheckpoint

FILE_BYTES = 5 * 10**9
WRITERS = 4  # files of a GPU's tensors at a time, each held in host memory while it is written


def write(folder: Path, config, device: torch.device):
    """The files of a bf16 checkpoint of `config` under `folder`; tensors are made on `device`."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    model = meta_model(config, torch.bfloat16)
    shapes, stacks = expected_shapes(model), stacked_weights(model)
    source, files = RandomCheckpoint(shapes, device), split(shapes)

    def stored(name: str) -> str:
        return stacks[name].stored_name if name in stacks else name

    def tensor(name: str) -> torch.Tensor:
        rows = source.rows(name, 0, shapes[name][0]).to(torch.bfloat16).cpu()
        return stacks[name].as_stored(rows) if name in stacks else rows

    def write_file(name: str):
        save_file({stored(n): tensor(n) for n in files[name]}, folder / name)

    with ThreadPoolExecutor(WRITERS if device.type == "cuda" else 1) as pool:
        list(pool.map(write_file, files))
    index = {
        "metadata": {},
        "weight_map": {stored(n): name for name, names in files.items() for n in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def split(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """File names, and the tensors of each: about FILE_BYTES in bf16."""
    groups, size = [[]], 0
    for name, shape in shapes.items():
        if size > FILE_BYTES:
            groups, size = [*groups, []], 0
        groups[-1].append(name)
        size += 2 * math.prod(shape)
    return {f"model-{i:05}.safetensors": names for i, names in enumerate(groups, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    settings = known_config(options.model, options.layers)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    write(options.folder, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
