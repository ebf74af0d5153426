"""Write a checkpoint of random weights of a model's true shape, to measure loading and training.

    python benchmarks/random_checkpoint.py meta-llama/Llama-3.1-8B /dev/shm/llama-8b [--layers N]
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.loading import expected_shapes, meta_model
from fsdp_qlora.loading.weight_files import RandomCheckpoint

FILE_BYTES = 5 * 10**9


def write(folder: Path, config, device: torch.device):
    """The files of a bf16 checkpoint of `config` under `folder`; tensors are made on `device`."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shapes = expected_shapes(meta_model(config, torch.bfloat16))
    source, pending, size, files = RandomCheckpoint(shapes, device), {}, 0, {}
    for name, shape in [*shapes.items(), (None, None)]:
        if name is None or size > FILE_BYTES:
            path = folder / f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(pending, path)
            files.update(dict.fromkeys(pending, path.name))
            pending, size = {}, 0
        if name is not None:
            pending[name] = source.rows(name, 0, shape[0]).to(torch.bfloat16).cpu()
            size += pending[name].nbytes
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    settings = known_config(options.model)
    if options.layers: settings["num_hidden_layers"] = options.layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    write(options.folder, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
