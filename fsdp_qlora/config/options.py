"""Every setting of a run, once: its name, default and help.

The command line, recipes, their schema and docs/flags.md are made from these fields, so a setting is
written in one place. Names follow the original fsdp_qlora script where it had them. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..choices import OPTIMIZERS, POLICIES, STRATEGIES
from .settings import AUTO, opt

# Of a precision: what is stored, and what autocast multiplies in, if it is on.
PRECISIONS = {
    "bf16": ("bf16", None),
    "fp32": ("fp32", None),
    "bf16_autocast": ("fp32", "bf16"),
    "fp16_autocast": ("fp32", "fp16"),
    "bf16_buffers_autocast": ("bf16", "bf16"),
}

# What linear weights can have been rounded to in training: the formats of `quantization.formats`.
BASE_QUANTS = ("nf4", "fp4", "int8", "hqq8", "hqq4", "hqq3", "hqq2")

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


@dataclass(kw_only=True)
class ModelOptions:
    """Model"""

    model_name: str = opt(
        "meta-llama/Llama-2-7b-hf",
        "hub name, or a folder with config.json and safetensors files",
        example="./SmolLM2-135M-Instruct",
    )
    revision: str | None = opt(None, "branch, tag or commit of a model on the hub", example="main")
    trust_remote_code: bool = opt(
        False, "run the Python code of a model from the hub; needs the full commit as --revision"
    )
    train_type: str = opt(
        "qlora", "shorthand that sets --quant and --adapter", choices=tuple(TRAIN_TYPES)
    )
    quant: str = opt(
        "auto",
        "format of the frozen linear weights; auto = from --train_type",
        choices=("auto", "none", "nf4", "fp4", "int8", "hqq"),
    )
    absmax_dtype: str = opt(
        "fp32",
        "dtype of the scales of quantized blocks: int8 saves 8% of a 4-bit model's memory, "
        "and its rounding error is far below that of the 4-bit weights",
        choices=("fp32", "int8"),
    )
    precision: str = opt(
        "bf16",
        "dtype that stores and multiplies everything but quantized weights and adapters; "
        "the autocast kinds store fp32 (bf16_buffers_autocast: bf16), and fp16_autocast "
        "scales the loss",
        choices=tuple(PRECISIONS),
    )
    compute_dtype: str = opt(
        "auto",
        "dtype of matmuls with frozen weights: fp8 is faster on Hopper and newer; auto = "
        "--precision",
        choices=("auto", "bf16", "fp8"),
    )
    keep_fp8_weights: bool | None = opt(
        None,
        "with --compute_dtype fp8, convert weights to fp8 once and keep them, instead of "
        "for each matmul: faster for few tokens, and costs 2 bytes per weight; None = on "
        "one GPU and with ddp, if they fit beside the kept activations",
    )
    attn_implementation: str = opt(
        "auto",
        "attention kernel, by its transformers name; auto = flash_attention_4 if it is "
        "installed and runs (Hopper and newer), else sdpa, or a kernel with softcapping for "
        "models that need it; with --packing, sdpa uses torch's variable-length attention "
        "if that runs",
        example="eager",
    )
    device: str = opt(
        "auto", "device to train on; auto = cuda if there is a GPU", choices=("auto", "cpu", "cuda")
    )
    random_weights: bool = opt(
        False, "use random weights in the shape of config.json (for benchmarks)"
    )
    low_memory: bool = opt(True, "accepted for old commands: loading always streams")
    quantized_cache: str | None = opt(
        None,
        "folder that caches quantized weights: later starts, on any number of GPUs, read a "
        "quarter of the checkpoint's bytes",
        example="~/.cache/fsdp_qlora",
    )
    loading_workers: int = opt(AUTO, "reader threads per rank while loading; -1 = up to four")
    n_bits: int = opt(4, "bits per weight with --quant hqq", choices=(8, 4, 3, 2))


@dataclass(kw_only=True)
class AdapterOptions:
    """Adapter"""

    adapter: str = opt(
        "auto",
        "what to train; auto = from --train_type; dora = LoRA with a trained magnitude per "
        "output; llama_pro = new blocks between the base's; none = all weights",
        choices=("auto", "none", "lora", "dora", "llama_pro"),
    )
    llama_pro_blocks: int = opt(
        AUTO,
        "new blocks with --adapter llama_pro, spread evenly; -1 = one for every four",
        unit="blocks",
        example=8,
    )
    llama_pro_path: str | None = opt(
        None,
        "folder of weights that the original script expanded; its name gives the number of "
        "blocks before and after. Without it, blocks are added while the base loads",
        example="Llama-2-7b_blk_exp-32-35",
    )
    lora_rank: int = opt(64, "rank of the adapters")
    lora_alpha: int = opt(16, "adapters are scaled by lora_alpha / lora_rank")
    use_rslora: bool = opt(
        False, "scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA), for large ranks"
    )
    lora_rank_pattern: str | None = opt(
        None, "a different --lora_rank for some modules", example="q_proj=16,down_proj=128"
    )
    lora_alpha_pattern: str | None = opt(
        None, "a different --lora_alpha for some modules", example="q_proj=32"
    )
    init_lora_weights: str = opt(
        "default",
        "initial adapter weights: default (A random, B zero), pissa or olora (a part of W, "
        "subtracted from the base), pissa_niter_N (with a fast SVD), loftq (the "
        "quantization error)",
        example="pissa_niter_16",
    )
    loftq_iter: int = opt(1, "iterations of --init_lora_weights loftq")
    modules_to_save: str | None = opt(
        None,
        "modules to train in full beside the adapters, by the ends of their names",
        example="embed_tokens,lm_head",
    )
    trained_modules: str | None = opt(
        None,
        "with --train_type full, train only these modules, by the ends of their names",
        example="layers.30,layers.31,lm_head",
    )
    layers_to_transform: str | None = opt(
        None, "adapt only these blocks, counted from 0", example="0,24-31"
    )
    added_tokens: str | None = opt(
        None,
        "tokens to add to the tokenizer: separated by commas, or a file with one per line; "
        "trains embeddings and lm_head in full",
        example="<think>,</think>",
    )
    loraplus_lr_ratio: float = opt(
        1.0, "learning rate of B (and of DoRA's magnitudes) divided by --lr: LoRA+", example=16
    )
    lora_dropout: float = opt(0.1, "dropout on the input of adapters", unit="share")
    lora_target_modules: str = opt(
        "all-linear",
        "all-linear (every linear layer but lm_head), all (the six of the original script), "
        "default (PEFT's choice), or module names",
        example="q_proj,v_proj",
    )
    lora_target_parameters: str | None = opt(
        None,
        "expert weights of a mixture of experts to adapt, with A and B per expert: experts "
        "(all), or the ends of parameter names; needs --lora_dropout 0",
        example="gate_up_proj,down_proj",
    )
    bias: str = opt(
        "none",
        "biases to train: none, all, or those of adapted layers",
        choices=("none", "all", "lora_only"),
    )
    adapter_dtype: str = opt(
        "fp32",
        "dtype of adapters, --modules_to_save and new blocks, and of their gradients and "
        "optimizer states",
        choices=("fp32", "bf16"),
    )


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    dataset: str = opt(
        "alpaca_sample",
        "a .jsonl, .json or .parquet file, a folder or glob of them, a hub name, or "
        "one of alpaca, alpaca_sample, dummy, guanaco, sql, orca_math, text_to_sql",
        example="rows.jsonl",
    )
    dataset_split: str = opt("train", "split of a hub dataset")
    dataset_samples: int = opt(512, "rows to take from alpaca_sample, dummy or orca_math")
    context_length: int = opt(
        512,
        "maximum row length; longer rows are truncated, and the data report counts them",
        unit="tokens",
    )
    train_on: str = opt(
        "completion",
        "tokens with a loss: completion = only answers, all = every token",
        choices=("completion", "all"),
    )
    data_cache: str | None = opt(None, "folder that caches tokenized data between runs")
    stream: bool = opt(False, "read and tokenize rows during training, for data larger than memory")
    shuffle_buffer: int = opt(
        5000,
        "rows that each rank buffers to shuffle a stream; 1 keeps the order of the files",
        unit="rows",
    )
    preview: int = opt(
        0,
        "print this many rows with their trained tokens marked; 3 without a number",
        unit="rows",
        bare=3,
    )


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    eval_dataset: str | None = opt(
        None, "held-out rows, in any form that --dataset takes", example="heldout.jsonl"
    )
    eval_split: str | None = opt(
        None, "held-out split of --eval_dataset, or of --dataset", example="validation"
    )
    eval_share: float = opt(
        0.0,
        "share of --dataset to hold out; always the same rows",
        unit="share of rows",
        example=0.05,
    )
    eval_every: int = opt(
        AUTO, "optimizer steps between evaluations; -1 = only at the end", unit="steps"
    )
    samples: int = opt(
        0,
        "generate answers to the prompts of this many held-out rows before training and at "
        "each evaluation; each token costs a forward pass",
        unit="rows",
        example=3,
    )
    sample_prompts: str | None = opt(
        None,
        "text file with one prompt per line to answer instead: all, or the first --samples",
        example="prompts.txt",
    )
    sample_tokens: int = opt(64, "maximum length of generated answers", unit="tokens")


@dataclass(kw_only=True)
class BatchOptions:
    """Batch and steps"""

    batch_size: int = opt(
        1, "rows per GPU and micro-batch, or bins with --packing; auto = planned", unit="rows"
    )
    gradient_accumulation_steps: int = opt(1, "micro-batches per optimizer step")
    global_batch_size: int = opt(
        AUTO,
        "rows per optimizer step over all GPUs; results are then the same on any number of "
        "GPUs, and accumulation is derived; -1 = batch_size x accumulation x GPUs",
        unit="rows",
        example=32,
    )
    packing: bool = opt(
        False,
        "pack rows into bins of --context_length instead of padding them; --batch_size then "
        "counts full bins, while --global_batch_size still counts rows, which may leave "
        "bins nearly empty",
    )
    num_epochs: int = opt(1, "passes over the data")
    max_steps: int = opt(AUTO, "stop after this many optimizer steps; -1 = never")
    seed: int = opt(42, "seed of data order, adapter initialization and dropout")


@dataclass(kw_only=True)
class ShardingOptions:
    """Sharding and memory"""

    sharding_strategy: str = opt(
        "full_shard",
        "what is sharded over GPUs and when it is gathered; auto = planned together with "
        "the settings not given, then confirmed by a probe",
        choices=(*STRATEGIES, "auto"),
    )
    shard_group_size: int = opt(
        AUTO,
        "GPUs per shard group with the hybrid strategies; -1 = all GPUs of a node, or half "
        "of a single node's",
    )
    wrap_policy: str = opt(
        "block",
        "unit that FSDP gathers at once: a decoder block, its attention and MLP separately, "
        "or modules of at least --min_wrap_params",
        choices=("block", "attention_mlp", "min_params"),
    )
    min_wrap_params: int = opt(100_000_000, "smallest unit with --wrap_policy min_params")
    backward_prefetch: str = opt(
        "backward_pre",
        "when the backward gathers the next unit: before the current unit's backward, after "
        "it (beside the reduction of its gradients), or only when needed",
        choices=("backward_pre", "backward_post", "none"),
    )
    forward_prefetch: bool = opt(
        False,
        "gather the next unit before launching the current unit's forward; helps if the CPU "
        "is slow",
    )
    gather_once: bool = opt(
        False,
        "keep gathered weights for all micro-batches of an optimizer step: less "
        "communication with accumulation, but every GPU holds the whole model",
    )
    use_gradient_checkpointing: bool = opt(
        True, "true = --activation_policy recompute_all, false = keep_all"
    )
    activation_policy: str = opt(
        "auto",
        f"what each block keeps for the backward: {', '.join(POLICIES)}, or a number of blocks "
        "for each; auto = from --use_gradient_checkpointing",
        example="keep_linears:16,recompute_all:16",
    )
    activation_budget_gib: float | None = opt(
        None,
        "GPU memory allocated by torch: chooses the fastest --activation_policy with a "
        "predicted peak within it; auto = all that the GPU has",
        unit="GiB",
        example=40,
    )
    reentrant_checkpointing: bool = opt(
        False, "use torch's reentrant checkpointing, for old commands; no known benefit"
    )
    mlp_tiles: int = opt(
        1,
        "compute the MLP of recomputed blocks in this many tiles of tokens, one after the "
        "other (tiled MLP): less memory for long rows, but each tile dequantizes the "
        "weights again; -1 = as few as fit --activation_budget_gib, or as many as save much "
        "by the estimate",
        example=4,
    )
    use_cpu_offload: bool = opt(False, "keep the shards of frozen weights in host memory")
    use_trained_cpu_offload: bool | None = opt(
        None,
        "with --use_cpu_offload, also offload trained weights, their gradients and "
        "optimizer states; None = if they take more than an eighth of the GPU",
    )
    use_vocabulary_cpu_offload: bool | None = opt(
        None, "keep frozen embeddings and lm_head in host memory; None = as --use_cpu_offload"
    )
    use_activation_cpu_offload: bool = opt(
        False, "offload the inputs of recomputed blocks to pinned host memory until their backward"
    )
    no_sync: bool = opt(
        False,
        "reduce gradients only in the last micro-batch of a step: less communication, more memory",
    )
    compile: bool | None = opt(
        None, "compile each decoder block with torch.compile; None = on a GPU"
    )
    cuda_graphs: bool | None = opt(
        None,
        "replay the forward and backward of a micro-batch as a CUDA graph, much faster for "
        "few tokens; None = on one GPU and with ddp, if it pays; true = also with sharded "
        "weights, including their collectives",
    )
    deterministic: bool = opt(
        False, "make repeated runs bit-identical on a GPU, at some cost in speed"
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    optimizer: str = opt(
        "adamw",
        "optimizer of the trained weights; adamw_bf16 and adamw_8bit have smaller states and "
        "round bf16 weights stochastically, for full fine-tuning",
        choices=tuple(OPTIMIZERS),
    )
    lr: float = opt(1e-5, "peak learning rate")
    wd: float = opt(0.1, "weight decay of the adamw optimizers")
    lr_scheduler: str = opt(
        "constant",
        "learning rate schedule; linear and cosine warm up, and cosine ends at a tenth of the peak",
        choices=("constant", "linear", "cosine"),
    )
    warmup_share: float = opt(0.1, "warmup of linear and cosine", unit="share of all steps")
    lr_warmup_steps: int = opt(
        AUTO,
        "warmup steps of any schedule; -1 = from --warmup_share",
        unit="steps",
        example=100,
    )
    apply_gradient_clipping: bool = opt(False, "clip gradients to --grad_norm")
    grad_norm: float = opt(
        0.3, "maximum norm of all gradients together, with --apply_gradient_clipping"
    )


@dataclass(kw_only=True)
class OutputOptions:
    """Output"""

    output_dir: str = opt(
        "output", "folder for metrics, the loss plot, checkpoints and trained weights"
    )
    save_model: bool = opt(
        True,
        "save the trained weights at the end: a PEFT adapter, or the model after full fine-tuning",
    )
    log_to: str = opt(
        "tqdm",
        "one kind of terminal output (tqdm = a progress bar, or lines if there is no "
        "terminal; stdout = lines; jsonl = all records as JSON) and any trackers; "
        "metrics.jsonl is always written",
        several=True,
        choices=("tqdm", "stdout", "jsonl", "tensorboard", "wandb", "mlflow"),
        example="tqdm,wandb",
    )
    log_every: int = opt(
        10,
        "steps averaged into one terminal line and one tracker point; metrics.jsonl has every step",
        unit="steps",
    )
    price_per_hour: float | None = opt(
        None,
        "dollars per GPU hour, to show the cost so far; None = from the catalog",
        unit="dollars",
        example=2.5,
    )
    verbose: bool = opt(
        False, "print the sharded model and every derived setting; after an error, the traceback"
    )
    project_name: str = opt("fsdp_qlora", "project in wandb, experiment in mlflow")
    name: str | None = opt(None, "run name in wandb or mlflow")
    group: str | None = opt(None, "run group in wandb")
    entity: str | None = opt(None, "team in wandb")


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints and faults"""

    checkpoint_every: int = opt(
        AUTO,
        "optimizer steps between checkpoints; -1 = only --checkpoint_minutes counts",
        unit="steps",
        example=100,
    )
    checkpoint_minutes: float = opt(15.0, "minutes between checkpoints; 0 = never", unit="minutes")
    keep_checkpoints: int = opt(2, "newest checkpoints to keep, in addition to the best")
    resume: str = opt(
        "auto",
        "auto = resume from the newest intact checkpoint in --output_dir, none = start "
        "over, or a folder: a checkpoint or a run",
        example="other_output",
    )
    stop_grace_seconds: float = opt(
        25.0,
        "time to save after a stop signal before the run exits anyway; set it a few seconds "
        "below your scheduler's kill timeout",
        unit="seconds",
        example=280,
    )
    stall_seconds: float = opt(
        600.0,
        "stop a run that makes no progress for this long, and name the rank that holds it "
        "up; 0 = never",
        unit="seconds",
    )
    verify_frozen_minutes: float = opt(
        10.0,
        "minutes between checks of the frozen weights for bit flips; 0 = never",
        unit="minutes",
    )
    max_bad_steps: int = opt(
        3,
        "consecutive steps with a NaN or infinite loss or gradient before --on_bad_steps "
        "applies; every rank skips such steps",
        unit="steps",
    )
    on_bad_steps: str = opt(
        "stop",
        "after --max_bad_steps: stop, keep skipping, or roll back to the last checkpoint "
        "and leave their rows out",
        choices=("stop", "skip", "rollback"),
    )


@dataclass(kw_only=True)
class LaunchOptions:
    """Launch (without torchrun)"""

    world_size: int = opt(
        AUTO,
        "ranks to start; -1 = one per visible GPU, or one on the CPU (for estimate and "
        "plan, use --gpus and --nodes)",
    )
    master_addr: str = opt("localhost", "rendezvous address of the ranks")
    master_port: str = opt("12355", "rendezvous port of the ranks")
    timeout_minutes: float = opt(30.0, "how long a rank waits for the others", unit="minutes")


@dataclass(kw_only=True)
class ProfileOptions:
    """Profiling"""

    profile: bool = opt(
        False,
        "trace some steps: where time goes and how much communication is exposed; on a GPU "
        "also a memory snapshot",
    )
    profile_memory: bool = opt(
        False,
        "print where GPU memory goes in the second step, beside the estimate, and plot it "
        "as memory.png in --output_dir",
    )
    profiling_output: str = opt("profiles", "folder for traces")
    with_stack: bool = opt(False, "record Python stacks")
    with_shapes: bool = opt(False, "record input shapes of operators")
    export_trace: bool = opt(True, "accepted for old commands: --profile always exports traces")
    export_memory_timeline: bool = opt(
        False, "accepted for old commands: --profile writes a memory snapshot on a GPU"
    )
    wait_steps: int = opt(3, "steps before the profiler warms up; the first ones compile")
    warmup_steps: int = opt(1, "warmup steps of the profiler")
    active_steps: int = opt(2, "steps in a recording")
    repeat: int = opt(1, "number of recordings; 0 = until the run ends")
    profiling_frequency: int = opt(
        10, "steps from the start of one recording to the start of the next"
    )
