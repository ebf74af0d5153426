"""Adapters: LoRA and its kin, which layers get one, and what is trained beside them."""

from __future__ import annotations

from dataclasses import dataclass

from .. import without_effect as rules
from ..settings import AUTO, DEFINES_WEIGHTS, MUST_MATCH, opt

# `all` is the original script's list, without o_proj; `all-linear` is every linear but the head.
OLD_ALL_TARGETS = ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj")


@dataclass(kw_only=True)
class AdapterOptions:
    """Adapter"""

    adapter: str = opt(
        "auto",
        "what to train; auto = from --train_type; dora = LoRA with a trained magnitude per "
        "output; llama_pro = new blocks between the base's; none = all weights",
        choices=("auto", "none", "lora", "dora", "llama_pro"),
        on_resume=DEFINES_WEIGHTS,
    )
    llama_pro_blocks: int = opt(
        AUTO,
        "new blocks with --adapter llama_pro, spread evenly; -1 = one for every four",
        unit="blocks",
        example=8,
        on_resume=DEFINES_WEIGHTS,
        least=1,
        or_auto=True,
        no_effect=rules.LLAMA_PRO,
    )
    llama_pro_path: str | None = opt(
        None,
        "folder of weights that the original script expanded; its name gives the number of "
        "blocks before and after. Without it, blocks are added while the base loads",
        example="Llama-2-7b_blk_exp-32-35",
        on_resume=DEFINES_WEIGHTS,
        is_path=True,
        per_rank=True,
        no_effect=rules.LLAMA_PRO,
    )
    lora_rank: int = opt(
        64, "rank of the adapters", on_resume=DEFINES_WEIGHTS, least=1, no_effect=rules.LORA
    )
    lora_alpha: int = opt(
        32,
        "adapters are scaled by lora_alpha / lora_rank",
        on_resume=DEFINES_WEIGHTS,
        least=1,
        no_effect=rules.LORA,
    )
    use_rslora: bool = opt(
        False,
        "scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA), for large ranks",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    lora_rank_pattern: str | None = opt(
        None,
        "a different --lora_rank for some modules",
        example="q_proj=16,down_proj=128",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    lora_alpha_pattern: str | None = opt(
        None,
        "a different --lora_alpha for some modules",
        example="q_proj=32",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    init_lora_weights: str = opt(
        "default",
        "initial adapter weights: default (A random, B zero), pissa or olora (a part of W, "
        "subtracted from the base), pissa_niter_N (with a fast SVD), loftq (the "
        "quantization error)",
        example="pissa_niter_16",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    loftq_iter: int = opt(
        1,
        "iterations of --init_lora_weights loftq",
        on_resume=DEFINES_WEIGHTS,
        least=1,
        no_effect=rules.needs(
            "--init_lora_weights loftq", lambda c: c.init_lora_weights == "loftq"
        ),
    )
    modules_to_save: str | None = opt(
        None,
        "modules to train in full beside the adapters, by the ends of their names",
        example="embed_tokens,lm_head",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    trained_modules: str | None = opt(
        None,
        "with --train_type full, train only these modules, by the ends of their names",
        example="layers.30,layers.31,lm_head",
        on_resume=DEFINES_WEIGHTS,
    )
    layers_to_transform: str | None = opt(
        None,
        "adapt only these blocks, counted from 0",
        example="0,24-31",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    added_tokens: str | None = opt(
        None,
        "tokens to add to the tokenizer: separated by commas, or a file with one per line; "
        "trains embeddings and lm_head in full",
        example="<think>,</think>",
        on_resume=DEFINES_WEIGHTS,
        per_rank=True,
    )
    loraplus_lr_ratio: float = opt(
        1.0,
        "learning rate of B (and of DoRA's magnitudes) divided by --lr: LoRA+",
        example=16,
        on_resume=MUST_MATCH,
        no_effect=rules.LORA,
    )
    lora_dropout: float = opt(
        0.0,
        "dropout on the input of adapters",
        unit="share",
        on_resume=MUST_MATCH,
        no_effect=rules.LORA,
    )
    lora_target_modules: str = opt(
        "all-linear",
        "all-linear (every linear layer but lm_head), all (the six of the original script), "
        "default (PEFT's choice), or module names",
        example="q_proj,v_proj",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    lora_target_parameters: str | None = opt(
        None,
        "expert weights of a mixture of experts to adapt, with A and B per expert: experts "
        "(all), or the ends of parameter names; needs --lora_dropout 0",
        example="gate_up_proj,down_proj",
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    bias: str = opt(
        "none",
        "biases to train: none, all, or those of adapted layers",
        choices=("none", "all", "lora_only"),
        on_resume=DEFINES_WEIGHTS,
        no_effect=rules.LORA,
    )
    adapter_dtype: str = opt(
        "fp32",
        "dtype of adapters, --modules_to_save and new blocks, and of their gradients and "
        "optimizer states",
        choices=("fp32", "bf16"),
        on_resume=DEFINES_WEIGHTS,
    )
