"""The checks of settings that exclude or need each other, in the way of `checks.py`."""

from __future__ import annotations

import re
from pathlib import Path

from ..choices import FORMATS
from .lists import TERMINAL_FORMS, block_numbers, module_pattern, policy_names, token_list
from .settings import AUTO, changed_settings, parts_of, shown


def check_together(config):
    """Settings that exclude each other."""
    _check_products(config)
    _check_adapter(config)
    _check_first_values(config)
    _check_target_parameters(config)
    if config.activation_budget_gib is not None:
        _check_budget_alone(config)
    _check_cpu_offload(config)
    _check_activation_offload(config)
    _check_cuda_graphs(config)
    _check_sequence_parallel(config)
    _check_bins(config)
    _check_mlp_tiles(config)
    _check_kept_fp8(config)
    if config.attn_implementation == "varlen" and not config.packing:
        raise ValueError(
            "--attn_implementation varlen needs packed rows; add --packing true, or use sdpa"
        )
    if config.lr_warmup_steps != AUTO and "warmup_share" in changed_settings(config):
        raise ValueError(
            f"--lr_warmup_steps {config.lr_warmup_steps} and --warmup_share {config.warmup_share:g} "
            "both set the length of the warmup; give only one"
        )
    if config.profile and config.profile_memory:
        raise ValueError("--profile_memory and --profile both record GPU memory; give only one")
    shown_as = [name for name in parts_of(config.log_to) if name in TERMINAL_FORMS]
    if len(shown_as) > 1:
        raise ValueError(
            f"--log_to {config.log_to}: {' and '.join(shown_as)} are kinds of terminal output; give "
            "only one"
        )


def _check_products(config):
    """What weights are stored as and multiplied in must suit each other."""
    if config.adapter == "none" and config.quant != "none":
        raise ValueError(
            f"--quant {config.quant} freezes the linear weights, so --adapter none would train "
            "almost nothing; add --adapter lora, or use --quant none for full fine-tuning"
        )
    if config.compute_dtype == "bf16" and config.product_dtype != "bf16":
        raise ValueError(
            f"--compute_dtype bf16 contradicts --precision {config.precision}, which sets the dtype "
            "of matmuls; use --precision bf16"
        )
    if config.compute_dtype == "fp8" and config.scales_loss:
        raise ValueError(
            "--compute_dtype fp8 computes bf16 outputs, which --precision fp16_autocast can't use; "
            "use --precision bf16"
        )
    if config.compute_dtype == "fp8" and config.adapter == "none":
        raise ValueError(
            "--compute_dtype fp8 applies to frozen weights, and --train_type full has none; leave "
            "it out"
        )
    form = FORMATS.get(config.quant_type)
    if config.compute_dtype == "fp8" and form and not form.has_kernels:
        raise ValueError(
            f"--compute_dtype fp8 does not support --quant {config.quant}; use nf4, fp4 or none, or "
            "leave --compute_dtype out"
        )
    if config.n_bits != 4 and config.quant != "hqq":
        raise ValueError(
            f"--n_bits {config.n_bits} needs --quant hqq, but this run uses --quant {config.quant}; "
            "add --quant hqq, or leave --n_bits out"
        )


def _check_adapter(config):
    """What is trained, by its names, and what can't be trained beside it."""
    if config.adapter != "none" and not config.target_modules and config.target_modules is not None:
        raise ValueError("--lora_target_modules is empty; give all-linear or module names")
    for flag in ("lora_rank_pattern", "lora_alpha_pattern"):
        module_pattern(flag, getattr(config, flag))
    token_list(config.added_tokens)
    block_numbers(config.layers_to_transform)
    if config.added_tokens and config.adapter == "llama_pro":
        raise ValueError(
            "--added_tokens: --adapter llama_pro trains only new blocks, so the embeddings of new "
            "tokens would never be trained; use --adapter lora"
        )
    if config.llama_pro_path is not None and config.llama_pro_blocks != AUTO:
        raise ValueError(
            f"--llama_pro_path and --llama_pro_blocks {config.llama_pro_blocks} both set the number "
            "of new blocks; give only one"
        )
    if (config.adapter == "llama_pro" or config.whole_modules) and (
        config.adapter_dtype == "bf16" and config.stored_dtype == "fp32"
    ):
        raise ValueError(
            f"--adapter_dtype bf16 with --precision {config.precision}: new blocks and "
            "--modules_to_save need the dtype they are computed in; leave --adapter_dtype out"
        )
    if config.trained_modules and config.adapter != "none":
        raise ValueError(
            f"--trained_modules {config.trained_modules} needs --train_type full, but this run "
            "trains adapters; use --modules_to_save to train modules beside them"
        )


def _check_first_values(config):
    """What adapters begin from must be there."""
    kind = config.init_lora_weights
    if not re.fullmatch(r"default|pissa|pissa_niter_\d+|olora|loftq", kind):
        raise ValueError(
            f"--init_lora_weights {kind}: choose default, pissa, pissa_niter_N with a "
            "number N, olora or loftq"
        )
    if kind == "loftq" and config.has_lora and config.quant == "none":
        raise ValueError(
            "--init_lora_weights loftq corrects the quantization error, and --quant none has none; "
            "add --quant nf4, or use pissa"
        )
    if config.changes_base and config.quantized_cache:
        raise ValueError(
            f"--init_lora_weights {kind} changes the base before it is quantized, and "
            "--quantized_cache holds the unchanged one; leave one of them out"
        )


def _check_target_parameters(config):
    """What PEFT can't do to parameters is refused, for it would not load what was saved."""
    if config.target_parameters is None:
        return
    if not config.target_parameters:
        raise ValueError("--lora_target_parameters is empty; give experts or parameter names")
    others = dict(
        adapter=config.adapter == "dora",
        lora_dropout=config.lora_dropout,
        init_lora_weights=config.init_lora_weights != "default",
    )
    remedies = dict(adapter="lora", lora_dropout="0", init_lora_weights="default")
    for name, given in others.items():
        if given:
            raise ValueError(
                f"--lora_target_parameters {config.lora_target_parameters} with --{name} "
                f"{getattr(config, name)}: PEFT does not support this for parameters; use --{name} "
                f"{remedies[name]}"
            )


def _check_cpu_offload(config):
    """Shards are what is moved, and trained weights can stay only where frozen ones go."""
    if not config.strategy.shards and config.use_cpu_offload:
        raise ValueError(
            f"--use_cpu_offload offloads shards, and {config.sharding_strategy} has none; use "
            "--sharding_strategy full_shard or shard_grad_op"
        )
    if config.use_cpu_offload and config.gather_once:
        raise ValueError(
            "--gather_once keeps every block on the GPU for a whole step, but --use_cpu_offload "
            "moves them off; leave one of them out"
        )
    if config.adapter != "none":
        return
    if config.use_cpu_offload and config.use_trained_cpu_offload is False:
        raise ValueError(
            "--train_type full trains every weight, so --use_trained_cpu_offload false leaves "
            "nothing for --use_cpu_offload to offload; leave one of them out"
        )
    if config.use_vocabulary_cpu_offload:
        raise ValueError(
            "--use_vocabulary_cpu_offload true needs frozen embeddings and lm_head, but "
            "--train_type full trains them; use --use_cpu_offload"
        )


def _check_activation_offload(config):
    """Only what a block starts its recomputation from can leave the GPU."""
    if config.use_activation_cpu_offload and policy_names(config) == {"keep_all"}:
        raise ValueError(
            "--use_activation_cpu_offload offloads the inputs of recomputed blocks, and keep_all "
            "recomputes none; add --use_gradient_checkpointing true or use another "
            "--activation_policy"
        )


def _check_cuda_graphs(config):
    """A graph holds addresses of weights and activations, so these must stay where they are."""
    if not config.cuda_graphs:
        return
    for flag in ("use_cpu_offload", "use_vocabulary_cpu_offload", "use_activation_cpu_offload"):
        if getattr(config, flag):
            raise ValueError(
                f"--cuda_graphs needs everything on the GPU, but --{flag} moves some of it to the host; "
                "leave one of them out"
            )
    if config.mlp_tiles != 1:
        raise ValueError(
            f"--cuda_graphs speeds up short micro-batches, and --mlp_tiles {config.mlp_tiles} "
            "splits long ones; leave one of them out"
        )
    if config.profile_memory:
        raise ValueError(
            "--profile_memory records allocations, and --cuda_graphs makes none in a step; leave "
            "one of them out"
        )
    if config.compile is False:
        raise ValueError(
            "--cuda_graphs needs compiled blocks, but --compile false leaves them uncompiled; "
            "leave one of them out"
        )
    if config.wrap_policy != "block" and config.strategy.shards:
        raise ValueError(
            f"--cuda_graphs needs compiled blocks, and --wrap_policy {config.wrap_policy} gathers parts of "
            "them; use --wrap_policy block"
        )


def _check_bins(config):
    """A step has so many rows, or so many full bins of packed rows."""
    if config.bins_per_step == AUTO or config.has_full_bins:
        return
    if config.packing:
        raise ValueError(
            "--bins_per_step counts full bins, and --global_batch_size rows; leave one of them out"
        )
    raise ValueError(
        f"--bins_per_step {config.bins_per_step} counts bins of packed rows; add --packing true, or use "
        "--global_batch_size"
    )


def _check_sequence_parallel(config):
    """Every rank of a group has an equal part of a row."""
    ranks = config.sequence_parallel
    if ranks > 1 and config.context_length % ranks:
        raise ValueError(
            f"--sequence_parallel {ranks} splits rows evenly, but --context_length "
            f"{config.context_length} is not a multiple of it; use "
            f"{max(1, config.context_length // ranks) * ranks}"
        )
    if ranks > 1 and config.cuda_graphs:
        raise ValueError(
            "--cuda_graphs speeds up short micro-batches, and --sequence_parallel splits long ones; "
            "leave one of them out"
        )
    if ranks > 1 and config.router_aux_loss_coef:
        raise ValueError(
            "--router_aux_loss_coef balances the experts over whole rows, and --sequence_parallel "
            "splits rows; leave one of them out"
        )


def _check_kept_fp8(config):
    """What is made of a weight can be kept only where there is one and it stays."""
    if not config.keep_fp8_weights:
        return
    if config.compute_dtype != "fp8":
        raise ValueError(
            "--keep_fp8_weights needs --compute_dtype fp8, but this run uses --compute_dtype "
            f"{config.compute_dtype}; leave one of them out"
        )
    if config.use_cpu_offload:
        raise ValueError(
            "--keep_fp8_weights needs weights that stay on the GPU, but --use_cpu_offload moves "
            "them off; leave one of them out"
        )


def _check_mlp_tiles(config):
    """An MLP in tiles runs inside one op, so it must be gathered as one."""
    if config.mlp_tiles != 1 and config.wrap_policy == "min_params":
        raise ValueError(
            f"--mlp_tiles {config.mlp_tiles} needs each MLP gathered as one unit, and --wrap_policy "
            "min_params may split it; use --wrap_policy block"
        )


def check_data_together(config):
    """Settings of data and evaluation that exclude or need each other."""
    if config.eval_share and config.holds_out_a_data_set:
        raise ValueError(
            "--eval_share and --eval_dataset or --eval_split both choose the held-out rows; give "
            "only one"
        )
    if config.eval_every != AUTO and not (config.evaluates or config.eval_command):
        raise ValueError(
            f"--eval_every {config.eval_every} has nothing to evaluate; add "
            "--eval_dataset, --eval_split, --eval_share or --eval_command"
        )
    if config.early_stopping_patience and (config.eval_every == AUTO or not config.evaluates):
        raise ValueError(
            f"--early_stopping_patience {config.early_stopping_patience} counts evaluations on the way; "
            "add --eval_every, with held-out rows"
        )
    if config.samples and not config.sample_prompts:
        _check_samples(config)
    if config.stream and config.eval_share:
        raise ValueError(
            "--eval_share needs all rows in memory, and --stream reads only a few at a time; give "
            "held-out rows with --eval_dataset"
        )
    if config.stream and config.num_epochs % 1 and config.max_steps == AUTO:
        raise ValueError(
            f"--num_epochs {config.num_epochs:g} needs the number of steps of an epoch, and a --stream "
            "has no known length; give a whole number, or --max_steps"
        )
    if config.stream and config.schedule != "constant" and config.max_steps == AUTO:
        raise ValueError(
            f"--lr_scheduler {config.lr_scheduler} needs the number of steps, and a --stream has no "
            "known length; add --max_steps, or use constant"
        )


def _check_samples(config):
    """Prompts need held-out rows that tell prompt and answer apart."""
    if not config.evaluates:
        raise ValueError(
            f"--samples {config.samples} needs held-out rows for its prompts; add --eval_dataset, "
            "--eval_split or --eval_share, or --sample_prompts FILE"
        )
    if config.train_on == "all":
        raise ValueError(
            f"--samples {config.samples}: with --train_on all, rows have no prompts; give prompts "
            "with --sample_prompts FILE"
        )


def check_remote_code(config):
    """Code of a model may run only as it was when it was read, so at a commit, never at a branch."""
    if not config.trust_remote_code:
        return
    if not re.fullmatch("[0-9a-f]{40}", config.revision or ""):
        raise ValueError(
            "--trust_remote_code true runs code from the hub, so it needs the full commit: "
            f"--revision with 40 hex digits, got {config.revision}"
        )
    if Path(config.model_name).exists():
        raise ValueError(
            f"--trust_remote_code true: --model_name {config.model_name} is a folder, and its code "
            "has no commit; give the hub name"
        )


def _check_budget_alone(config):
    """A budget chooses what each block keeps, so no other setting may."""
    others = {
        "activation_policy": config.activation_policy != "auto",
        "use_gradient_checkpointing": not config.use_gradient_checkpointing,
        "reentrant_checkpointing": config.reentrant_checkpointing,
    }
    for name, given in others.items():
        if given:
            raise ValueError(
                f"--activation_budget_gib and --{name} {shown(getattr(config, name))} both choose what "
                "each block keeps; leave one of them out"
            )
