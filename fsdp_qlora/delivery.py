"""Commands that take a trained adapter further: merge it, convert it, check it, push it.

Each has settings of its own and none of RunConfig's. Pure: no torch before a command runs.
"""
from __future__ import annotations

from dataclasses import dataclass

from .flags import parse_alone
from .settings import opt


@dataclass
class MergeOptions:
    """Merge"""
    model_name: str | None = opt(None, "the base: folder or hub name; the adapter's own if left out",
                                 example="./SmolLM2-135M-Instruct")
    adapter_folder: str | None = opt(None, "adapter folder that training saved",
                                     example="output/adapter")
    output_dir: str = opt("merged", "new folder for the merged model")
    merge_base: str = opt(
        "auto", "original: the weights of --model_name; dequantized: these rounded to 4 bits and back, "
        "as QLoRA trained on them; auto = as the adapter was trained",
        choices=("auto", "original", "dequantized"))
    base_quant: str = opt("auto", "4-bit format of a dequantized base; auto = what the adapter's folder "
                          "says", choices=("auto", "nf4", "fp4"))
    merge_format: str = opt(
        "safetensors", "bnb4: linear weights in NF4, as transformers and bitsandbytes load them; "
        "without an adapter, the base itself", choices=("safetensors", "bnb4"))
    dtype: str = opt("bf16", "what the result is rounded to", choices=("bf16", "fp16", "fp32"))
    verbose: bool = opt(False, "print the traceback of an error")


def merge_command(argv: list[str]):
    """Merge an adapter into its base model."""
    options = parse_alone(argv, MergeOptions, "fsdp-qlora merge")
    from .adapter_folder import base_of
    from .merge import merge
    merge(options.model_name or base_of(options.adapter_folder), options.adapter_folder,
          options.output_dir, merge_base=options.merge_base, base_quant=options.base_quant,
          merge_format=options.merge_format, dtype=options.dtype)
