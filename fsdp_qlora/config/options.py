"""Every setting of a run, once: its name, default and help.

The command line, recipes, their schema and docs/flags.md are made from these fields, so a setting is
written in one place. Names follow the original fsdp_qlora script where it had them. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..choices import OPTIMIZERS, POLICIES, STRATEGIES
from ..choices.formats import N_BITS, QUANTS
from ..choices.optimizers import names_where
from . import without_effect as rules
from .lists import policy_names
from .settings import AUTO, DEFINES_WEIGHTS, MAY_CHANGE, MUST_MATCH, RUN_LENGTH, one_of, opt

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

# `all` is the original script's list, without o_proj; `all-linear` is every linear but the head.
OLD_ALL_TARGETS = ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj")

_SAMPLED = ("alpaca_sample", "dummy", "orca_math")  # of which --dataset_samples rows are taken


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
        "installed and runs (Hopper and newer), else sdpa, or a kernel with softcapping for "
        "models that need it; with --packing, sdpa uses torch's variable-length attention "
        "if that runs",
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
        least=0,
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


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    dataset: str = opt(
        "alpaca_sample",
        "a .jsonl, .json, .csv, .tsv or .parquet file, a folder or glob of them, a hub name, or "
        "one of alpaca, alpaca_sample, dummy, guanaco, sql, orca_math, text_to_sql; several joined "
        "by commas: name[:N] is the first N rows of one, name*2 and name*0.5 say how often an epoch "
        "has each of its rows",
        example="rows.jsonl",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    dataset_split: str = opt(
        "train",
        "split of a hub dataset",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("a dataset with splits", lambda c: c.dataset != "dummy"),
    )
    dataset_samples: int = opt(
        512,
        "rows to take from alpaca_sample, dummy or orca_math",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            f"--dataset {one_of(_SAMPLED)}", lambda c: {c.dataset, c.eval_dataset} & {*_SAMPLED}
        ),
    )
    context_length: int = opt(
        512,
        "maximum row length; longer rows are truncated, and the data report counts them",
        unit="tokens",
        on_resume=MUST_MATCH,
        least=1,
    )
    train_on: str = opt(
        "completion",
        "tokens with a loss: completion = only answers, all = every token",
        choices=("completion", "all"),
        on_resume=MUST_MATCH,
    )
    chat_template: str | None = opt(
        None,
        "how conversations are written, in place of the tokenizer's own template: a Jinja file, "
        "chatml, or a model whose template is taken; saved with the tokenizer",
        example="template.jinja",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    data_cache: str | None = opt(
        None,
        "folder that caches tokenized data between runs",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
        no_effect=rules.needs(
            "rows that are read before training, without --stream", lambda c: not c.stream
        ),
    )
    stream: bool = opt(
        False,
        "read and tokenize rows during training, for data larger than memory",
        on_resume=MUST_MATCH,
    )
    shuffle_buffer: int = opt(
        5000,
        "rows that each rank buffers to shuffle a stream; 1 keeps the order of the files",
        unit="rows",
        on_resume=MUST_MATCH,
        least=1,
        no_effect=rules.needs("--stream", lambda c: c.stream),
    )
    preview: int = opt(
        0,
        "print this many rows with their trained tokens marked; 3 without a number",
        unit="rows",
        bare=3,
        on_resume=MAY_CHANGE,
        least=0,
        per_rank=True,
    )


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    eval_dataset: str | None = opt(
        None,
        "held-out rows, in any form that --dataset takes",
        example="heldout.jsonl",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    eval_split: str | None = opt(
        None,
        "held-out split of --eval_dataset, or of --dataset",
        example="validation",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs(
            "a dataset with splits", lambda c: (c.eval_dataset or c.dataset) != "dummy"
        ),
    )
    eval_share: float = opt(
        0.0,
        "share of --dataset to hold out; always the same rows",
        unit="share of rows",
        example=0.05,
        on_resume=MAY_CHANGE,
    )
    eval_every: int = opt(
        AUTO,
        "optimizer steps between evaluations; -1 = only at the end",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    early_stopping_patience: int = opt(
        0,
        "end the run after so many evaluations in a row without a lower held-out loss, with the best "
        "weights beside the last ones; 0 = never",
        unit="evaluations",
        example=3,
        on_resume=MAY_CHANGE,
        least=0,
    )
    eval_command: str | None = opt(
        None,
        "command that scores the weights after each evaluation, on rank 0 while the others wait; it "
        "finds them in $FSDP_QLORA_WEIGHTS, and the number or JSON that it prints last is recorded",
        example="'lm_eval ...'",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    samples: int = opt(
        0,
        "generate answers to the prompts of this many held-out rows before training and at "
        "each evaluation; each token costs a forward pass",
        unit="rows",
        example=3,
        on_resume=MAY_CHANGE,
        least=0,
    )
    sample_prompts: str | None = opt(
        None,
        "text file with one prompt per line to answer instead: all, or the first --samples",
        example="prompts.txt",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    sample_tokens: int = opt(
        64,
        "maximum length of generated answers",
        unit="tokens",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs("--samples", lambda c: c.samples or c.sample_prompts),
    )


@dataclass(kw_only=True)
class BatchOptions:
    """Batch and steps"""

    batch_size: int = opt(
        1,
        "rows per GPU and micro-batch, or bins with --packing; auto = planned",
        unit="rows",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    gradient_accumulation_steps: int = opt(
        AUTO,
        "micro-batches per optimizer step; -1 = as many as make 8 rows (bins when packing) a step "
        "over all GPUs",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.of_gradient_accumulation,
    )
    global_batch_size: int = opt(
        AUTO,
        "rows per optimizer step over all GPUs; results are then the same on any number of "
        "GPUs, and accumulation is derived; -1 = batch_size x accumulation x GPUs",
        unit="rows",
        example=32,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    packing: bool = opt(
        False,
        "pack rows into bins of --context_length instead of padding them; --batch_size then "
        "counts full bins, while --global_batch_size still counts rows, which may leave "
        "bins nearly empty",
        on_resume=MUST_MATCH,
    )
    num_epochs: float = opt(
        1.0, "passes over the data; 0.5 is half of one", example=2.5, on_resume=RUN_LENGTH
    )
    max_steps: int = opt(
        AUTO,
        "stop after this many optimizer steps; -1 = never",
        on_resume=RUN_LENGTH,
        least=1,
        or_auto=True,
    )
    seed: int = opt(
        42, "seed of data order, adapter initialization and dropout", on_resume=MUST_MATCH
    )


@dataclass(kw_only=True)
class ShardingOptions:
    """Sharding and memory"""

    sharding_strategy: str = opt(
        "full_shard",
        "what is sharded over GPUs and when it is gathered; auto = planned together with "
        "the settings not given, then confirmed by a probe",
        choices=(*STRATEGIES, "auto"),
        on_resume=MAY_CHANGE,
    )
    shard_group_size: int = opt(
        AUTO,
        "GPUs per shard group with the hybrid strategies; -1 = all GPUs of a node, or half "
        "of a single node's",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.needs("a hybrid --sharding_strategy", lambda c: c.strategy.is_hybrid),
    )
    sequence_parallel: int = opt(
        1,
        "GPUs that share the tokens of their rows, for rows too long for one: each computes every "
        "layer for its part, and attention for its part of the heads (Ulysses)",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
    )
    wrap_policy: str = opt(
        "block",
        "unit that FSDP gathers at once: a decoder block, its attention and MLP separately, "
        "or modules of at least --min_wrap_params",
        choices=("block", "attention_mlp", "min_params"),
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    min_wrap_params: int = opt(
        100_000_000,
        "smallest unit with --wrap_policy min_params",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.of_min_wrap_params,
    )
    backward_prefetch: str = opt(
        "backward_pre",
        "when the backward gathers the next unit: before the current unit's backward, after "
        "it (beside the reduction of its gradients), or only when needed",
        choices=("backward_pre", "backward_post", "none"),
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    forward_prefetch: bool = opt(
        False,
        "gather the next unit before launching the current unit's forward; helps if the CPU "
        "is slow",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    gather_once: bool = opt(
        False,
        "keep gathered weights for all micro-batches of an optimizer step: less "
        "communication with accumulation, but every GPU holds the whole model",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gather_once,
    )
    use_gradient_checkpointing: bool = opt(
        True,
        "true = --activation_policy recompute_all, false = keep_all",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gradient_checkpointing,
    )
    activation_policy: str = opt(
        "auto",
        f"what each block keeps for the backward: {', '.join(POLICIES)}, or a number of blocks "
        "for each; auto = from --use_gradient_checkpointing",
        example="keep_linears:16,recompute_all:16",
        on_resume=MAY_CHANGE,
    )
    activation_budget_gib: float | None = opt(
        None,
        "GPU memory allocated by torch: chooses the fastest --activation_policy with a "
        "predicted peak within it; auto = all that the GPU has",
        unit="GiB",
        example=40,
        on_resume=MAY_CHANGE,
    )
    reentrant_checkpointing: bool = opt(
        False,
        "use torch's reentrant checkpointing, for old commands; no known benefit",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs(
            "blocks that are recomputed", lambda c: policy_names(c) != {"keep_all"}
        ),
    )
    mlp_tiles: int = opt(
        1,
        "compute the MLP of recomputed blocks in this many tiles of tokens, one after the "
        "other (tiled MLP): less memory for long rows, but each tile dequantizes the "
        "weights again; -1 = as few as fit --activation_budget_gib, or as many as save much "
        "by the estimate",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.of_mlp_tiles,
    )
    use_cpu_offload: bool = opt(
        False, "keep the shards of frozen weights in host memory", on_resume=MAY_CHANGE
    )
    use_trained_cpu_offload: bool | None = opt(
        None,
        "with --use_cpu_offload, also offload trained weights, their gradients and "
        "optimizer states; None = if they take more than an eighth of the GPU",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("--use_cpu_offload", lambda c: c.use_cpu_offload),
    )
    use_vocabulary_cpu_offload: bool | None = opt(
        None,
        "keep frozen embeddings and lm_head in host memory; None = as --use_cpu_offload",
        on_resume=MAY_CHANGE,
    )
    use_activation_cpu_offload: bool = opt(
        False,
        "offload the inputs of recomputed blocks to pinned host memory until their backward",
        on_resume=MAY_CHANGE,
    )
    no_sync: bool = opt(
        False,
        "reduce gradients only in the last micro-batch of a step: less communication, more memory",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_no_sync,
    )
    compile: bool | None = opt(
        None, "compile each decoder block with torch.compile; None = on a GPU", on_resume=MAY_CHANGE
    )
    cuda_graphs: bool | None = opt(
        None,
        "replay the forward and backward of a micro-batch as a CUDA graph, much faster for "
        "few tokens; None = on one GPU and with ddp, if it pays; true = also with sharded "
        "weights, including their collectives",
        on_resume=MAY_CHANGE,
    )
    deterministic: bool = opt(
        False,
        "make repeated runs bit-identical on a GPU, at some cost in speed",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("a GPU", lambda c: c.device != "cpu"),
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    optimizer: str = opt(
        "adamw",
        "optimizer of the trained weights; adamw_bf16 and adamw_8bit have smaller states and "
        "round bf16 weights stochastically, for full fine-tuning",
        choices=tuple(OPTIMIZERS),
        on_resume=DEFINES_WEIGHTS,
    )
    lr: float | None = opt(
        None,
        "peak learning rate; left out = 1.4 / hidden size for adapters (3.4e-4 at 4,096), and a tenth "
        "of that where whole weights are trained",
        example=2e-4,
        on_resume=MUST_MATCH,
        least=0,
    )
    wd: float = opt(
        0.0,
        "weight decay of the adamw optimizers",
        on_resume=MUST_MATCH,
        least=0,
        no_effect=rules.needs(
            f"--optimizer {one_of(names_where('decays'))}", lambda c: OPTIMIZERS[c.optimizer].decays
        ),
    )
    lr_scheduler: str | None = opt(
        None,
        "learning rate schedule; linear and cosine warm up, and cosine ends at a tenth of the "
        "peak; left out = cosine, or constant for a --stream without --max_steps",
        choices=("constant", "linear", "cosine"),
        on_resume=MUST_MATCH,
    )
    warmup_share: float = opt(
        0.03,
        "warmup of linear and cosine",
        unit="share of all steps",
        on_resume=MUST_MATCH,
        no_effect=rules.needs(
            "--lr_scheduler linear or cosine", lambda c: c.schedule != "constant"
        ),
    )
    lr_warmup_steps: int = opt(
        AUTO,
        "warmup steps of any schedule; -1 = from --warmup_share",
        unit="steps",
        example=100,
        on_resume=MUST_MATCH,
    )
    apply_gradient_clipping: bool = opt(True, "clip gradients to --grad_norm", on_resume=MUST_MATCH)
    grad_norm: float = opt(
        1.0,
        "maximum norm of all gradients together; larger ones are scaled down to it",
        on_resume=MUST_MATCH,
        no_effect=rules.needs("--apply_gradient_clipping", lambda c: c.apply_gradient_clipping),
    )


@dataclass(kw_only=True)
class OutputOptions:
    """Output"""

    output_dir: str = opt(
        "output",
        "folder for metrics, the loss plot, checkpoints and trained weights",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    save_model: bool = opt(
        True,
        "save the trained weights at the end: a PEFT adapter, or the model after full fine-tuning",
        on_resume=MAY_CHANGE,
    )
    log_to: str = opt(
        "tqdm",
        "one kind of terminal output (tqdm = a progress bar, or lines if there is no "
        "terminal; stdout = lines; jsonl = all records as JSON) and any trackers; "
        "metrics.jsonl is always written",
        several=True,
        choices=("tqdm", "stdout", "jsonl", "tensorboard", "wandb", "mlflow"),
        example="tqdm,wandb",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    log_every: int = opt(
        10,
        "steps averaged into one terminal line and one tracker point; metrics.jsonl has every step",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs("outputs in --log_to that show averages", rules.shows_averages),
    )
    price_per_hour: float | None = opt(
        None,
        "dollars per GPU hour, to show the cost so far; None = from the catalog",
        unit="dollars",
        example=2.5,
        least=0,
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    verbose: bool = opt(
        False,
        "print the sharded model and every derived setting; after an error, the traceback",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    project_name: str = opt(
        "fsdp_qlora",
        "project in wandb, experiment in mlflow",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.NAMED_TRACKERS,
    )
    name: str | None = opt(
        None,
        "run name in wandb or mlflow",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.NAMED_TRACKERS,
    )
    group: str | None = opt(
        None, "run group in wandb", on_resume=MAY_CHANGE, per_rank=True, no_effect=rules.WANDB
    )
    entity: str | None = opt(
        None, "team in wandb", on_resume=MAY_CHANGE, per_rank=True, no_effect=rules.WANDB
    )


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints and faults"""

    checkpoint_every: int = opt(
        AUTO,
        "optimizer steps between checkpoints; -1 = only --checkpoint_minutes counts",
        unit="steps",
        example=100,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    checkpoint_minutes: float = opt(
        15.0,
        "minutes between checkpoints; 0 = never",
        unit="minutes",
        on_resume=MAY_CHANGE,
        least=0,
    )
    keep_checkpoints: int = opt(
        2,
        "newest checkpoints to keep, in addition to the best",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            "--checkpoint_every or --checkpoint_minutes",
            lambda c: c.checkpoint_every != AUTO or c.checkpoint_minutes,
        ),
    )
    resume: str = opt(
        "auto",
        "auto = resume from the newest intact checkpoint in --output_dir, none = start "
        "over, or a folder: a checkpoint or a run",
        example="other_output",
        on_resume=MAY_CHANGE,
        is_path=True,
    )
    stop_grace_seconds: float = opt(
        25.0,
        "time to save after a stop signal before the run exits anyway; set it a few seconds "
        "below your scheduler's kill timeout",
        unit="seconds",
        example=280,
        on_resume=MAY_CHANGE,
    )
    stall_seconds: float = opt(
        600.0,
        "stop a run that makes no progress for this long, and name the rank that holds it "
        "up; 0 = never",
        unit="seconds",
        on_resume=MAY_CHANGE,
        least=0,
    )
    verify_frozen_minutes: float = opt(
        10.0,
        "minutes between checks of the frozen weights for bit flips; 0 = never",
        unit="minutes",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.needs(
            "frozen weights, and --train_type full has none",
            lambda c: c.adapter != "none" or c.only_modules,
        ),
    )
    max_bad_steps: int = opt(
        3,
        "consecutive steps with a NaN or infinite loss or gradient before --on_bad_steps "
        "applies; every rank skips such steps",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            "--on_bad_steps stop or rollback", lambda c: c.on_bad_steps != "skip"
        ),
    )
    on_bad_steps: str = opt(
        "stop",
        "after --max_bad_steps: stop, keep skipping, or roll back to the last checkpoint "
        "and leave their rows out",
        choices=("stop", "skip", "rollback"),
        on_resume=MAY_CHANGE,
    )


@dataclass(kw_only=True)
class LaunchOptions:
    """Launch (without torchrun)"""

    world_size: int = opt(
        AUTO,
        "ranks to start; -1 = one per visible GPU, or one on the CPU (for estimate and "
        "plan, use --gpus and --nodes)",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    master_addr: str = opt(
        "localhost",
        "rendezvous address of the ranks",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.SEVERAL_RANKS,
    )
    master_port: str = opt(
        "12355",
        "rendezvous port of the ranks",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.SEVERAL_RANKS,
    )
    timeout_minutes: float = opt(
        30.0,
        "how long a rank waits for the others",
        unit="minutes",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )


@dataclass(kw_only=True)
class ProfileOptions:
    """Profiling"""

    profile: bool = opt(
        False,
        "trace some steps: where time goes and how much communication is exposed; on a GPU "
        "also a memory snapshot",
        on_resume=MAY_CHANGE,
    )
    profile_memory: bool = opt(
        False,
        "print where GPU memory goes in the second step, beside the estimate, and plot it "
        "as memory.png in --output_dir",
        on_resume=MAY_CHANGE,
    )
    profiling_output: str = opt(
        "profiles",
        "folder for traces",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
        no_effect=rules.PROFILE,
    )
    with_stack: bool = opt(
        False, "record Python stacks", on_resume=MAY_CHANGE, no_effect=rules.PROFILE
    )
    with_shapes: bool = opt(
        False, "record input shapes of operators", on_resume=MAY_CHANGE, no_effect=rules.PROFILE
    )
    export_trace: bool = opt(
        True,
        "accepted for old commands: --profile always exports traces",
        on_resume=MAY_CHANGE,
        no_effect=rules.always("--profile decides"),
    )
    export_memory_timeline: bool = opt(
        False,
        "accepted for old commands: --profile writes a memory snapshot on a GPU",
        on_resume=MAY_CHANGE,
        no_effect=rules.always("--profile decides"),
    )
    wait_steps: int = opt(
        3,
        "steps before the profiler warms up; the first ones compile",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.PROFILE,
    )
    warmup_steps: int = opt(
        1,
        "warmup steps of the profiler",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.needs(
            "--profile; for the learning rate, use --lr_warmup_steps", lambda c: c.profile
        ),
    )
    active_steps: int = opt(
        2, "steps in a recording", on_resume=MAY_CHANGE, least=1, no_effect=rules.PROFILE
    )
    repeat: int = opt(
        1,
        "number of recordings; 0 = until the run ends",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.PROFILE,
    )
    profiling_frequency: int = opt(
        10,
        "steps from the start of one recording to the start of the next",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.PROFILE,
    )
