"""Fine-tune large language models with 4-bit weights, LoRA and PyTorch FSDP2.

The names below are the library; each lives in the module named beside it and is imported on first
use, so that `import fsdp_qlora` needs no torch.
"""
from __future__ import annotations

import importlib
import logging

# bitsandbytes warns in every process that an optional CPU kernel for inference is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

PUBLIC = {
    "RunConfig": "config", "plan_batches": "config",
    "process_group": "dist", "rank_device": "dist", "ranks_from_env": "dist",
    "local_rows": "dist", "full_tensor": "dist",
    "build_model": "build",
    "Checkpoint": "weight_files", "read_config": "loading", "meta_model": "loading",
    "materialize": "loading", "load_weights": "loading",
    "QuantLinear": "quantize", "quantize_linears": "quantize",
    "lora_config": "adapters", "apply_adapters": "adapters", "init_adapters": "adapters",
    "trainable_parameters": "adapters",
    "apply_activation_policy": "activations", "apply_chunked_loss": "losses",
    "STRATEGIES": "sharding", "apply_sharding": "sharding", "make_mesh": "sharding",
    "set_gradient_sync": "sharding",
    "build_optimizer": "optim", "build_scheduler": "optim",
    "held_out_loss": "evaluate", "train_step": "step", "train": "trainer",
    "save_trained": "export", "save_adapter": "export", "load_adapter": "export",
    "merge_adapter": "merge", "convert_adapter": "convert", "check_adapter_folder": "serving",
    "push_folder": "hub",
}
__all__ = list(PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in PUBLIC: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{PUBLIC[name]}", __name__), name)
