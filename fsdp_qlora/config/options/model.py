"""The model: where its weights are from, their format, and the kernels that compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...choices.formats import N_BITS, QUANTS
from .. import without_effect as rules
from ..settings import AUTO, DEFINES_WEIGHTS, MAY_CHANGE, MUST_MATCH, opt

# Of a precision: what is stored, and what autocast multiplies in, if it is on.
PRECISIONS = {
    "bf16": ("bf16", None),
    "fp32": ("fp32", None),
    "bf16_autocast": ("fp32", "bf16"),
    "fp16_autocast": ("fp32", "fp16"),
    "bf16_buffers_autocast": ("bf16", "bf16"),
}

# A train_type of the original script is shorthand for (quant, adapter): the two are independent.
TRAIN_TYPES = {
    "full": ("none", "none"),
    "lora": ("none", "lora"),
    "custom_lora": ("none", "lora"),
    "qlora": ("nf4", "lora"),
    "custom_qlora": ("nf4", "lora"),
    "hqq_lora": ("hqq", "lora"),
    "bnb_dora": ("nf4", "dora"),
    "hqq_dora": ("hqq", "dora"),
    "bnb_llama_pro": ("nf4", "llama_pro"),
    "hqq_llama_pro": ("hqq", "llama_pro"),
}


@dataclass(kw_only=True)
class ModelOptions:
    """Model"""

    model_name: str = opt(
        "meta-llama/Llama-2-7b-hf",
        "hub name, or a folder with config.json and safetensors files",
        example="./SmolLM2-135M-Instruct",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    revision: str | None = opt(
        None,
        "branch, tag or commit of a model on the hub",
        example="main",
        on_resume=MUST_MATCH,
        no_effect=rules.needs(
            "a --model_name on the hub", lambda c: not Path(c.model_name).exists()
        ),
    )
    trust_remote_code: bool = opt(
        False,
        "run the Python code of a model from the hub; needs the full commit as --revision",
        on_resume=MUST_MATCH,
    )
    train_type: str = opt(
        "qlora",
        "shorthand that sets --quant and --adapter",
        choices=tuple(TRAIN_TYPES),
        on_resume=MAY_CHANGE,
    )
    quant: str = opt(
        "auto",
        "format of the frozen linear weights; auto = from --train_type",
        choices=("auto", "none", *QUANTS),
        on_resume=DEFINES_WEIGHTS,
    )
    absmax_dtype: str = opt(
        "fp32",
        "dtype of the scales of quantized blocks: int8 saves 8% of a 4-bit model's memory, "
        "and its rounding error is far below that of the 4-bit weights",
        choices=("fp32", "int8"),
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.needs("quantized weights", lambda c: c.quant != "none"),
    )
    precision: str = opt(
        "bf16",
        "dtype that stores and multiplies everything but quantized weights and adapters; "
        "the autocast kinds store fp32 (bf16_buffers_autocast: bf16), and fp16_autocast "
        "scales the loss",
        choices=tuple(PRECISIONS),
        on_resume=DEFINES_WEIGHTS,
    )
    compute_dtype: str = opt(
        "auto",
        "dtype of matmuls with frozen weights: fp8 is faster on Hopper and newer; auto = "
        "--precision",
        choices=("auto", "bf16", "fp8"),
        on_resume=MUST_MATCH,
    )
    keep_fp8_weights: bool | None = opt(
        None,
        "with --compute_dtype fp8, convert weights to fp8 once and keep them, instead of "
        "for each matmul: faster for few tokens, and costs 2 bytes per weight; None = on "
        "one GPU and with ddp, if they fit beside the kept activations",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("--compute_dtype fp8", lambda c: c.compute_dtype == "fp8"),
    )
    attn_implementation: str = opt(
        "auto",
        "attention kernel, by its transformers name; auto = flash_attention_4 if it is "
        "installed and runs (Hopper and newer), else sdpa, torch's FlashAttention for "
        "sliding windows and attention sinks, or a kernel with softcapping for models that "
        "need it; with --packing, sdpa uses torch's variable-length attention if that runs",
        example="eager",
        on_resume=MAY_CHANGE,
    )
    device: str = opt(
        "auto",
        "device to train on; auto = cuda if there is a GPU",
        choices=("auto", "cpu", "cuda"),
        on_resume=MAY_CHANGE,
    )
    random_weights: bool = opt(
        False,
        "use random weights in the shape of config.json (for benchmarks)",
        on_resume=MUST_MATCH,
    )
    low_memory: bool = opt(
        True,
        "accepted for old commands: loading always streams",
        on_resume=MAY_CHANGE,
        no_effect=rules.always("loading always streams"),
    )
    quantized_cache: str | None = opt(
        None,
        "folder that caches quantized weights: later starts, on any number of GPUs, read a "
        "quarter of the checkpoint's bytes",
        example="~/.cache/fsdp_qlora",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
        no_effect=rules.of_quantized_cache,
    )
    loading_workers: int = opt(
        AUTO,
        "reader threads per rank while loading; -1 = up to four",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        per_rank=True,
        no_effect=rules.needs(
            "weights from files, without --random_weights", lambda c: not c.random_weights
        ),
    )
    n_bits: int = opt(
        4, "bits per weight with --quant hqq", choices=N_BITS, on_resume=DEFINES_WEIGHTS
    )
