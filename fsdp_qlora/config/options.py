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
        "folder with config.json and safetensors, or a hub name",
        example="./SmolLM2-135M-Instruct",
    )
    revision: str | None = opt(None, "branch, tag or commit of a model on the hub", example="main")
    trust_remote_code: bool = opt(
        False, "run Python code that the model brings; only with the full commit as --revision"
    )
    train_type: str = opt(
        "qlora", "shorthand for --quant and --adapter", choices=tuple(TRAIN_TYPES)
    )
    quant: str = opt(
        "auto",
        "format of the frozen linear weights; auto = from --train_type",
        choices=("auto", "none", "nf4", "fp4", "int8", "hqq"),
    )
    absmax_dtype: str = opt(
        "fp32",
        "scales of quantized blocks: int8 saves 8% of a 4-bit model, and "
        "its rounding is far below the weights' own",
        choices=("fp32", "int8"),
    )
    precision: str = opt(
        "bf16",
        "storage and products of all but quantized weights and adapters; the autocast kinds "
        "store fp32 (bf16_buffers_autocast bf16), and fp16_autocast scales the loss",
        choices=tuple(PRECISIONS),
    )
    compute_dtype: str = opt(
        "auto",
        "products of frozen weights: fp8 is faster on Hopper and newer; auto = --precision",
        choices=("auto", "bf16", "fp8"),
    )
    keep_fp8_weights: bool | None = opt(
        None,
        "with --compute_dtype fp8, make fp8 weights once and keep them, not anew for each "
        "product: faster with few tokens, at 2 bytes a weight; None = on one GPU and in ddp, where "
        "they fit beside the activations that are kept",
    )
    attn_implementation: str = opt(
        "auto",
        "attention kernel, as transformers names it; auto = flash_attention_4 where it is "
        "installed and runs (Hopper and newer), else sdpa, or one that caps scores for a model that "
        "does; with --packing, sdpa is torch's variable-length attention where that runs",
        example="eager",
    )
    device: str = opt("auto", "auto = cuda where there is a GPU", choices=("auto", "cpu", "cuda"))
    random_weights: bool = opt(
        False, "fill the model with random weights of config.json's shape (benchmarks)"
    )
    low_memory: bool = opt(True, "kept for old commands: the load is always streamed")
    quantized_cache: str | None = opt(
        None,
        "folder that keeps quantized weights: later starts read those, a quarter of the "
        "checkpoint, on any number of GPUs",
        example="~/.cache/fsdp_qlora",
    )
    loading_workers: int = opt(AUTO, "reader threads per rank while loading; -1 = up to four")
    n_bits: int = opt(4, "bits of a weight, with --quant hqq", choices=(8, 4, 3, 2))


@dataclass(kw_only=True)
class AdapterOptions:
    """Adapter"""

    adapter: str = opt(
        "auto",
        "auto = from --train_type; dora = LoRA with a trained magnitude per "
        "output; llama_pro = new blocks between the base's; none trains every weight",
        choices=("auto", "none", "lora", "dora", "llama_pro"),
    )
    llama_pro_blocks: int = opt(
        AUTO,
        "new blocks, evenly among the base's, with --adapter llama_pro; -1 = one for every four",
        unit="blocks",
        example=8,
    )
    llama_pro_path: str | None = opt(
        None,
        "folder of weights that the original script expanded; its name says the blocks before and "
        "after. Without it blocks are added while the base is read",
        example="Llama-2-7b_blk_exp-32-35",
    )
    lora_rank: int = opt(64, "rank R of the adapters")
    lora_alpha: int = opt(16, "adapter output is scaled by lora_alpha / lora_rank")
    use_rslora: bool = opt(
        False, "scale by lora_alpha / sqrt(lora_rank) instead: rsLoRA, for large ranks"
    )
    lora_rank_pattern: str | None = opt(
        None, "other ranks for some modules", example="q_proj=16,down_proj=128"
    )
    lora_alpha_pattern: str | None = opt(
        None, "other values of --lora_alpha for some modules", example="q_proj=32"
    )
    init_lora_weights: str = opt(
        "default",
        "first values of an adapter: default (A random, B zero), pissa or olora (a part of "
        "W, which the base then lacks), pissa_niter_N (by a fast SVD), loftq (what quantization lost)",
        example="pissa_niter_16",
    )
    loftq_iter: int = opt(1, "rounds of quantizing and correcting, with --init_lora_weights loftq")
    modules_to_save: str | None = opt(
        None,
        "modules that are trained whole beside the adapters, by the ends of their names",
        example="embed_tokens,lm_head",
    )
    trained_modules: str | None = opt(
        None,
        "with --train_type full: train these modules alone, by the ends of their names",
        example="layers.30,layers.31,lm_head",
    )
    layers_to_transform: str | None = opt(
        None, "adapt these blocks alone, counted from 0", example="0,24-31"
    )
    added_tokens: str | None = opt(
        None,
        "tokens that the tokenizer gains: separated by commas, or a file with one a line; trains "
        "the embedding and the head whole",
        example="<think>,</think>",
    )
    loraplus_lr_ratio: float = opt(
        1.0, "learning rate of B, and of DoRA's magnitudes, over --lr: LoRA+", example=16
    )
    lora_dropout: float = opt(0.1, "dropout on the adapter's input", unit="share")
    lora_target_modules: str = opt(
        "all-linear",
        "all-linear (every linear but the head), all (the original script's six), "
        "default (PEFT's choice), or names",
        example="q_proj,v_proj",
    )
    lora_target_parameters: str | None = opt(
        None,
        "weights of a mixture's experts that are adapted too, each expert's with its own A and B: "
        "experts (all), or the ends of their names; with --lora_dropout 0",
        example="gate_up_proj,down_proj",
    )
    bias: str = opt(
        "none",
        "biases that are trained too: all, or those of adapted layers",
        choices=("none", "all", "lora_only"),
    )
    adapter_dtype: str = opt(
        "fp32",
        "storage of adapters, --modules_to_save and new blocks, their "
        "gradients and optimizer states",
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
    dataset_split: str = opt("train", "split of a hub data set")
    dataset_samples: int = opt(512, "rows taken from alpaca_sample, dummy and orca_math")
    context_length: int = opt(
        512, "longer rows are cut, and counted in the data report", unit="tokens"
    )
    train_on: str = opt(
        "completion",
        "completion: only answers are trained; all: every token",
        choices=("completion", "all"),
    )
    data_cache: str | None = opt(None, "folder that keeps tokenized data between runs")
    stream: bool = opt(False, "read and tokenize rows while training, for data larger than memory")
    shuffle_buffer: int = opt(
        5000,
        "rows held by each rank of a stream to shuffle it; 1 keeps the order of the files",
        unit="rows",
    )
    preview: int = opt(
        0, "print this many rows with their trained tokens marked; 3 if bare", unit="rows", bare=3
    )


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    eval_dataset: str | None = opt(
        None, "held-out rows, in any form that --dataset takes", example="heldout.jsonl"
    )
    eval_split: str | None = opt(
        None, "split of --eval_dataset, or of --dataset, that is held out", example="validation"
    )
    eval_share: float = opt(
        0.0,
        "part of --dataset that is held out; the same rows every time",
        unit="share of rows",
        example=0.05,
    )
    eval_every: int = opt(
        AUTO, "optimizer steps between evaluations; -1 = only at the end", unit="steps"
    )
    samples: int = opt(
        0,
        "answer the prompts of so many held-out rows before training and at each "
        "evaluation; a token costs a forward",
        unit="rows",
        example=3,
    )
    sample_prompts: str | None = opt(
        None,
        "text file with a prompt a line to answer instead; all, or the first --samples",
        example="prompts.txt",
    )
    sample_tokens: int = opt(64, "longest of these answers", unit="tokens")


@dataclass(kw_only=True)
class BatchOptions:
    """Batch and steps"""

    batch_size: int = opt(
        1, "rows per GPU and micro-batch, or bins with --packing; auto = planned", unit="rows"
    )
    gradient_accumulation_steps: int = opt(1, "micro-batches per optimizer step")
    global_batch_size: int = opt(
        AUTO,
        "rows per optimizer step over all GPUs; fixes the result for any number of GPUs and "
        "derives the accumulation; -1 = batch_size x accumulation x GPUs",
        unit="rows",
        example=32,
    )
    packing: bool = opt(
        False,
        "fill bins of --context_length with rows instead of padding them; --batch_size then "
        "counts full bins; --global_batch_size still counts rows, which may leave bins nearly empty",
    )
    num_epochs: int = opt(1, "passes over the data")
    max_steps: int = opt(AUTO, "stop after this many optimizer steps; -1 = never")
    seed: int = opt(42, "seed of data order, adapter values and dropout")


@dataclass(kw_only=True)
class ShardingOptions:
    """Sharding and memory"""

    sharding_strategy: str = opt(
        "full_shard",
        "what is split over GPUs, and when it is gathered; auto "
        "= planned, with what else is not given, and confirmed by a probe",
        choices=(*STRATEGIES, "auto"),
    )
    shard_group_size: int = opt(
        AUTO,
        "GPUs that share one copy under the hybrid strategies; -1 = those of a node, or half "
        "of a single node's",
    )
    wrap_policy: str = opt(
        "block",
        "what is gathered together: a decoder block, its attention and "
        "MLP apart, or modules of at least --min_wrap_params",
        choices=("block", "attention_mlp", "min_params"),
    )
    min_wrap_params: int = opt(100_000_000, "smallest unit under --wrap_policy min_params")
    backward_prefetch: str = opt(
        "backward_pre",
        "when the next unit is gathered: before this one's backward, after it beside "
        "the reduction of its gradients, or when needed",
        choices=("backward_pre", "backward_post", "none"),
    )
    forward_prefetch: bool = opt(
        False,
        "gather the next unit before this one's forward is queued; helps where the host is slow",
    )
    gather_once: bool = opt(
        False,
        "keep gathered weights through all micro-batches of an optimizer step: less traffic "
        "under accumulation, and every GPU holds the whole model",
    )
    use_gradient_checkpointing: bool = opt(
        True, "the two ends of --activation_policy: true = recompute_all, false = keep_all"
    )
    activation_policy: str = opt(
        "auto",
        f"what each block keeps for the backward: {', '.join(POLICIES)}, or counts of each; "
        "auto = from --use_gradient_checkpointing",
        example="keep_linears:16,recompute_all:16",
    )
    activation_budget_gib: float | None = opt(
        None,
        "memory of a GPU, as torch counts what is allocated: the fastest --activation_policy "
        "is chosen whose predicted peak is within it; auto = all that the card has",
        unit="GiB",
        example=40,
    )
    reentrant_checkpointing: bool = opt(False, "torch's older checkpointing; no gain known here")
    mlp_tiles: int = opt(
        1,
        "compute the MLP of recomputed blocks for so many parts of the tokens, one after the other: "
        "less memory over long rows, and weights are dequantized once for each; -1 = as few as fit "
        "--activation_budget_gib, or as save much by the estimate",
        example=4,
    )
    use_cpu_offload: bool = opt(False, "keep the shards of frozen weights in host memory")
    use_trained_cpu_offload: bool | None = opt(
        None,
        "with --use_cpu_offload, also trained weights, their gradients and optimizer states; "
        "None = where they take more than an eighth of the GPU",
    )
    use_vocabulary_cpu_offload: bool | None = opt(
        None, "keep a frozen embedding and head in host memory; None = as --use_cpu_offload"
    )
    use_activation_cpu_offload: bool = opt(
        False, "keep the inputs of recomputed blocks in pinned host memory until their backward"
    )
    no_sync: bool = opt(
        False, "reduce gradients only at the last micro-batch of a step: less traffic, more memory"
    )
    compile: bool | None = opt(None, "torch.compile of each decoder block; None = on a GPU")
    cuda_graphs: bool | None = opt(
        None,
        "replay forward and backward of a micro-batch without the host, which is much faster with "
        "few tokens; None = on one GPU and in ddp, where it pays; true also where weights are sharded, "
        "with the collectives",
    )
    deterministic: bool = opt(False, "bit-equal repeats on a GPU, at some speed")


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
    wd: float = opt(0.1, "weight decay of the adamw kinds")
    lr_scheduler: str = opt(
        "constant",
        "linear and cosine warm up; cosine ends at a tenth of the peak",
        choices=("constant", "linear", "cosine"),
    )
    warmup_share: float = opt(0.1, "warm-up of linear and cosine", unit="share of all steps")
    lr_warmup_steps: int = opt(
        AUTO,
        "warm-up of any schedule in optimizer steps; -1 = from --warmup_share",
        unit="steps",
        example=100,
    )
    apply_gradient_clipping: bool = opt(False, "clip the gradient's norm over all weights")
    grad_norm: float = opt(0.3, "norm to which gradients are clipped")


@dataclass(kw_only=True)
class OutputOptions:
    """Output"""

    output_dir: str = opt("output", "metrics, the loss picture and the trained weights go here")
    save_model: bool = opt(
        True,
        "write the trained weights at the end: a PEFT adapter, or the model after full fine-tuning",
    )
    log_to: str = opt(
        "tqdm",
        "one form of terminal output (a bar, and lines where no terminal is; lines; all records "
        "as JSON), and trackers; metrics.jsonl is always written",
        several=True,
        choices=("tqdm", "stdout", "jsonl", "tensorboard", "wandb", "mlflow"),
        example="tqdm,wandb",
    )
    log_every: int = opt(
        10,
        "steps that a line, and a point of a tracker, is the mean of; metrics.jsonl has each step",
        unit="steps",
    )
    price_per_hour: float | None = opt(
        None,
        "dollars for a GPU and hour, for the cost so far; None = the catalogue's",
        unit="dollars",
        example=2.5,
    )
    verbose: bool = opt(False, "print the sharded model and every derived setting")
    project_name: str = opt("fsdp_qlora", "project of wandb, experiment of mlflow")
    name: str | None = opt(None, "run name, with --log_to wandb or mlflow")
    group: str | None = opt(None, "run group, with --log_to wandb")
    entity: str | None = opt(None, "team, with --log_to wandb")


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints and faults"""

    checkpoint_every: int = opt(
        AUTO,
        "save the state of the run after so many optimizer steps; -1 = "
        "only as --checkpoint_minutes says",
        unit="steps",
        example=100,
    )
    checkpoint_minutes: float = opt(
        15.0, "save it when so much time has gone by; 0 = never", unit="minutes"
    )
    keep_checkpoints: int = opt(2, "newest checkpoints that are kept, beside the best")
    resume: str = opt(
        "auto",
        "auto goes on from the newest whole checkpoint of --output_dir, none "
        "begins anew, a folder names a checkpoint or a run",
        example="other_output",
    )
    stop_grace_seconds: float = opt(
        25.0,
        "how long a run that is told to stop may take to save before it ends in any case; a few "
        "seconds less than its scheduler waits until it kills",
        unit="seconds",
        example=280,
    )
    stall_seconds: float = opt(
        600.0,
        "end a run in which nothing has moved for so long, and name the "
        "rank that holds it up; 0 = never",
        unit="seconds",
    )
    verify_frozen_minutes: float = opt(
        10.0, "look for flipped bits in the frozen weights so often; 0 = never", unit="minutes"
    )
    max_bad_steps: int = opt(
        3,
        "steps in a row whose loss or gradient is not a number, which are "
        "skipped on all ranks, before --on_bad_steps",
        unit="steps",
    )
    on_bad_steps: str = opt(
        "stop",
        "then stop, skip them for ever, or go back to the last checkpoint and leave their rows out",
        choices=("stop", "skip", "rollback"),
    )


@dataclass(kw_only=True)
class LaunchOptions:
    """Launch (without torchrun)"""

    world_size: int = opt(
        AUTO,
        "ranks to start; -1 = one per visible GPU, or one on the CPU "
        "(estimate and plan are asked with --gpus and --nodes)",
    )
    master_addr: str = opt("localhost", "address where ranks meet")
    master_port: str = opt("12355", "port where ranks meet")
    timeout_minutes: float = opt(30.0, "how long a rank waits for the others", unit="minutes")


@dataclass(kw_only=True)
class ProfileOptions:
    """Profiling"""

    profile: bool = opt(
        False,
        "trace some steps: where their time goes, and what communication is "
        "exposed; on a GPU a memory snapshot too",
    )
    profile_memory: bool = opt(
        False,
        "print where a GPU's memory goes in the second step, beside "
        "the estimate, and draw it: memory.png in --output_dir",
    )
    profiling_output: str = opt("profiles", "folder of traces")
    with_stack: bool = opt(False, "record Python stacks")
    with_shapes: bool = opt(False, "record shapes of operands")
    export_trace: bool = opt(True, "kept for old commands: traces are always exported")
    export_memory_timeline: bool = opt(
        False, "kept for old commands: --profile writes a memory snapshot on a GPU"
    )
    wait_steps: int = opt(3, "steps before the profiler warms up; the first ones compile")
    warmup_steps: int = opt(1, "steps the profiler warms up")
    active_steps: int = opt(2, "steps recorded")
    repeat: int = opt(1, "recordings; 0 = as long as the run")
    profiling_frequency: int = opt(10, "steps from the start of one recording to the next")
