"""Fine-tune large language models with 4-bit weights, LoRA and PyTorch FSDP2.

The names below are the library; each lives in the module named beside it and is imported on first
use, so that `import fsdp_qlora` needs no torch.
"""

from __future__ import annotations

import importlib
import logging
import warnings

# bitsandbytes warns in every process that an optional CPU kernel for inference is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

PUBLIC = {
    "RunConfig": "config",
    "Plan": "plan",
    "resolve": "estimate",
    "plan_batches": "config",
    "process_group": "dist",
    "rank_device": "dist",
    "ranks_from_env": "dist",
    "local_rows": "dist",
    "full_tensor": "dist",
    "build_model": "build",
    "Checkpoint": "loading.weight_files",
    "read_config": "loading",
    "meta_model": "loading",
    "materialize": "loading",
    "load_weights": "loading",
    "load_quantized": "integrations.streamed",
    "streamed_model": "integrations.streamed",
    "shard_and_load": "integrations.streamed",
    "TokenizedDataset": "data.tokenized",
    "QuantLinear": "quantization.quantize",
    "quantize_linears": "quantization.quantize",
    "dequantize_linears": "quantization.quantize",
    "lora_config": "adapters",
    "apply_adapters": "adapters",
    "init_adapters": "lora_init",
    "trainable_parameters": "adapters",
    "apply_activation_policy": "memory.checkpointing_policy",
    "apply_chunked_cross_entropy": "memory.chunked_cross_entropy",
    "STRATEGIES": "sharding",
    "apply_sharding": "sharding",
    "OnHost": "sharding",
    "make_mesh": "sharding",
    "set_gradient_sync": "sharding",
    "build_optimizer": "optim",
    "build_scheduler": "optim",
    "held_out_loss": "observe.evaluate",
    "train_step": "training.step",
    "train": "training.trainer",
    "save_trained": "export",
    "save_adapter": "export.save",
    "load_adapter": "export.save",
    "merge_adapter": "export.merge",
    "convert_adapter": "export.convert",
    "check_adapter_folder": "export.serving",
    "push_folder": "export.hub",
}
DEPRECATED = {"apply_chunked_loss": "apply_chunked_cross_entropy"}  # old names, with the new ones
__all__ = list(PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in DEPRECATED:
        warnings.warn(
            f"fsdp_qlora.{name} is now fsdp_qlora.{DEPRECATED[name]}",
            DeprecationWarning,
            stacklevel=2,
        )
        name = DEPRECATED[name]
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{PUBLIC[name]}", __name__), name)
