"""What other trainers call a setting: the names taken as they are, and hints for the others.

One table for each trainer. docs/migrating.md is made of them (scripts/make_reference.py), an unknown
flag is looked up in them, and the names of `SAME` are flags and names in a recipe. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Names with the same meaning and values as a setting here.
SAME = {
    "model_name_or_path": "model_name",
    "base_model": "model_name",
    "model_revision": "revision",
    "bnb_4bit_quant_type": "quant",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_lora_weights",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "dataset_streaming": "stream",
    "streaming": "stream",
    "dataset_prepared_path": "data_cache",
    "val_set_size": "eval_share",
    "chat_template_path": "chat_template",
    "max_length": "context_length",
    "max_seq_length": "context_length",
    "max_seq_len": "context_length",
    "sequence_len": "context_length",
    "sample_packing": "packing",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "learning_rate": "lr",
    "weight_decay": "wd",
    "max_grad_norm": "grad_norm",
    "warmup_ratio": "warmup_share",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "torch_compile": "compile",
    "full_determinism": "deterministic",
    "eval_steps": "eval_every",
    "save_steps": "checkpoint_every",
    "logging_steps": "log_every",
    "run_name": "name",
    "wandb_project": "project_name",
    "wandb_entity": "entity",
    "wandb_name": "name",
}

# Plain words for a setting, of no trainer.
_WORDS = {
    "model": "model_name",
    "data": "dataset",
    "output": "output_dir",
    "row_weights": "weight_column",
    "sample_weight": "weight_column",
    "loss_weight": "weight_column",
}

# (names there, what is typed here), as Markdown: names and flags in the same order where they pair up.
TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "PEFT (`LoraConfig`)": (
        ("`r`, `lora_alpha`, `lora_dropout`", "`--lora_rank`, `--lora_alpha`, `--lora_dropout`"),
        (
            "`target_modules`, `target_parameters`",
            "`--lora_target_modules`, `--lora_target_parameters`",
        ),
        (
            "`modules_to_save`, `layers_to_transform`",
            "`--modules_to_save`, `--layers_to_transform`",
        ),
        (
            "`rank_pattern`, `alpha_pattern`",
            "`--lora_rank_pattern q_proj=16`, `--lora_alpha_pattern q_proj=32`",
        ),
        (
            "`init_lora_weights`, `use_rslora`, `bias`",
            "`--init_lora_weights`, `--use_rslora`, `--bias`",
        ),
        ("`use_dora`", "`--adapter dora`"),
        ("`loftq_config`", "`--init_lora_weights loftq --loftq_iter N`"),
        (
            "`exclude_modules`, `layers_pattern`",
            "name what is adapted, with `--lora_target_modules` and `--layers_to_transform`",
        ),
        ("`lora_bias`, `trainable_token_indices`, `corda_config`, `eva_config`", "not available"),
    ),
    "TRL (`SFTTrainer`)": (
        ("`model_name_or_path`, `model_revision`", "`--model_name`, `--revision`"),
        ("`load_in_4bit` with `use_peft`", "`--train_type qlora` (default)"),
        ("`load_in_8bit` with `use_peft`", "`--quant int8`"),
        ("`use_peft` alone", "`--train_type lora`"),
        ("neither", "`--train_type full`"),
        ("`bnb_4bit_quant_type`", "`--quant nf4`, `--quant fp4`"),
        ("`use_bnb_nested_quant`", "`--absmax_dtype int8` (other arithmetic, same aim)"),
        ("`bnb_4bit_quant_storage`", "not needed"),
        (
            "`lora_r`, `lora_alpha`, `lora_dropout`",
            "`--lora_rank`, `--lora_alpha`, `--lora_dropout`",
        ),
        ("`lora_target_modules`", "`--lora_target_modules`"),
        ("`lora_modules_to_save`", "`--modules_to_save`"),
        ("`use_rslora`, `use_dora`", "`--use_rslora`, `--adapter dora`"),
        (
            "`dataset_name`, `dataset_train_split`, `dataset_test_split`",
            "`--dataset`, `--dataset_split`, `--eval_split`",
        ),
        ("`dataset_streaming`", "`--stream`"),
        ("`chat_template_path`", "`--chat_template`"),
        ("`max_length`", "`--context_length`"),
        ("`max_seq_length` (older TRL)", "`--context_length`"),
        ("`packing` with `packing_strategy` bfd", "`--packing`"),
        ("`padding_free`", "`--packing`"),
        (
            "`completion_only_loss`, `assistant_only_loss`",
            "`--train_on completion` (default, exact for any template)",
        ),
        (
            "`per_device_train_batch_size`, `gradient_accumulation_steps`",
            "`--batch_size`, `--gradient_accumulation_steps`; with packing both count bins",
        ),
        ("`num_train_epochs`, `max_steps`", "`--num_epochs`, `--max_steps`"),
        (
            "`learning_rate`, `weight_decay`, `max_grad_norm`",
            "`--lr`, `--wd`, `--grad_norm`",
        ),
        ("`lr_scheduler_type`", "`--lr_scheduler constant`, `linear` or `cosine`"),
        ("`warmup_ratio`", "`--warmup_share`"),
        ("`warmup_steps`", "`--lr_warmup_steps`"),
        (
            "`optim` adamw_torch_fused, adamw_8bit, adafactor",
            "`--optimizer adamw`, `adamw_8bit`, `adafactor`",
        ),
        (
            "`gradient_checkpointing`",
            "`--use_gradient_checkpointing`; finer: `--activation_policy`",
        ),
        ("`activation_offloading`", "`--use_activation_cpu_offload`"),
        ("`torch_compile`", "`--compile` (on by default on a GPU)"),
        (
            "`use_liger_kernel`, `loss_type` chunked_nll",
            "always: the loss is a chunked cross-entropy",
        ),
        ("`eval_steps`", "`--eval_every`"),
        ("`eval_strategy`", "`--eval_every N` for steps; without it, one evaluation at the end"),
        ("`per_device_eval_batch_size`", "not needed: as in training"),
        ("`save_steps`, `save_total_limit`", "`--checkpoint_every`, `--keep_checkpoints`"),
        ("`save_strategy`", "`--checkpoint_every N` or `--checkpoint_minutes N`"),
        ("`logging_steps`", "`--log_every`"),
        (
            "`report_to`",
            "`--log_to wandb`, `tensorboard` or `mlflow`; metrics.jsonl is always written",
        ),
        ("`run_name`", "`--name`"),
        ("`resume_from_checkpoint`", "rerun the same command, or `--resume`"),
        ("`load_best_model_at_end`", "the run keeps `adapter-best` beside the last"),
        ("`full_determinism`, `seed`", "`--deterministic`, `--seed`"),
        ("`bf16`", "`--precision bf16` (default)"),
        ("`fp16`", "`--precision fp16_autocast`"),
        ("`auto_find_batch_size`", "`--batch_size auto`"),
        (
            "`dataloader_num_workers`, `dataloader_pin_memory`",
            "not needed: rows are tokenized before training, or with --stream beside it",
        ),
        (
            "`remove_unused_columns`, `dataset_num_proc`, `dataset_text_field`",
            "not needed: the keys of a row tell its format",
        ),
        ("`push_to_hub`, `hub_model_id`", "`fsdp-qlora push output/adapter me/name` after the run"),
        ("`do_train`, `do_eval`", "not needed"),
        (
            "`accelerate launch --config_file fsdp2.yaml`",
            "`torchrun`, or plain `python`, which starts one rank per GPU",
        ),
        (
            "`fsdp_reshard_after_forward` true, false",
            "`--sharding_strategy full_shard`, `shard_grad_op`",
        ),
        ("`fsdp_offload_params`", "`--use_cpu_offload true`"),
        ("`fsdp_auto_wrap_policy`", "`--wrap_policy`"),
        (
            "`fsdp_cpu_ram_efficient_loading`, `fsdp_state_dict_type`",
            "not needed: each rank reads its own rows",
        ),
    ),
    "axolotl": (
        (
            "`base_model`, `trust_remote_code`",
            "`--model_name`, `--trust_remote_code` with `--revision`",
        ),
        (
            "`adapter: qlora` with `load_in_4bit`, `adapter: lora`",
            "`--train_type qlora`, `--train_type lora`",
        ),
        ("no `adapter`", "`--train_type full`"),
        (
            "`lora_r`, `lora_alpha`, `lora_dropout`",
            "`--lora_rank`, `--lora_alpha`, `--lora_dropout`",
        ),
        (
            "`lora_target_linear: true`, `lora_target_modules`",
            "`--lora_target_modules all-linear` (default), or names",
        ),
        (
            "`lora_rank_pattern`, `lora_alpha_pattern`",
            "`--lora_rank_pattern`, `--lora_alpha_pattern`",
        ),
        (
            "`lora_modules_to_save`, `peft_init_lora_weights`",
            "`--modules_to_save`, `--init_lora_weights`",
        ),
        ("`peft_use_dora`, `peft_use_rslora`", "`--adapter dora`, `--use_rslora`"),
        ("`loraplus_lr_ratio`", "`--loraplus_lr_ratio`"),
        ("`lora_mlp_kernel`, `lora_qkv_kernel`, `lora_o_kernel`", "always"),
        (
            "`datasets` with `path`, `type`, `split`",
            "`--dataset`, `--dataset_split`; the keys of a row tell its format",
        ),
        ("`test_datasets`, `val_set_size`", "`--eval_dataset`, `--eval_share`"),
        ("`dataset_prepared_path`", "`--data_cache`"),
        ("`streaming`, `pretraining_dataset`", "`--stream`"),
        (
            "`chat_template`, `chat_template_jinja`",
            "`--chat_template` chatml, a Jinja file, or a model whose template is taken",
        ),
        (
            "`train_on_inputs`, `roles_to_train`",
            "`--train_on all`; assistants are trained by default",
        ),
        ("`sequence_len`", "`--context_length`"),
        ("`sample_packing`, `pad_to_sequence_len`", "`--packing`"),
        (
            "`micro_batch_size`, `gradient_accumulation_steps`",
            "`--batch_size`, `--gradient_accumulation_steps`; with packing both count bins",
        ),
        (
            "`num_epochs`, `max_steps`, `learning_rate`, `weight_decay`",
            "`--num_epochs`, `--max_steps`, `--lr`, `--wd`",
        ),
        ("`max_grad_norm`", "`--grad_norm`"),
        (
            "`lr_scheduler`, `warmup_steps`, `warmup_ratio`",
            "`--lr_scheduler`, `--lr_warmup_steps`, `--warmup_share`",
        ),
        (
            "`optimizer` adamw_torch_fused, adamw_8bit, adafactor",
            "`--optimizer adamw`, `adamw_8bit`, `adafactor`",
        ),
        ("`bf16`, `fp8`", "`--precision bf16` (default), `--compute_dtype fp8`"),
        ("`attn_implementation`, `flash_attention`, `sdp_attention`", "`--attn_implementation`"),
        ("`gradient_checkpointing`, `selective_checkpointing`", "`--activation_policy`"),
        ("`activation_offloading`", "`--use_activation_cpu_offload`"),
        ("`chunked_cross_entropy`", "always"),
        ("`torch_compile`", "`--compile`"),
        ("`fsdp_version: 2` with `fsdp_config`", "`--sharding_strategy`"),
        (
            "`reshard_after_forward` true, false",
            "`--sharding_strategy full_shard`, `shard_grad_op`",
        ),
        ("`offload_params`", "`--use_cpu_offload true`"),
        (
            "`dp_shard_size`, `dp_replicate_size`",
            "`--sharding_strategy hybrid_full_shard --shard_group_size 4`",
        ),
        ("`context_parallel_size`, `sequence_parallel_degree`", "`--sequence_parallel`"),
        (
            "`save_steps`, `save_total_limit`, `auto_resume_from_checkpoints`",
            "`--checkpoint_every`, `--keep_checkpoints`, on by default",
        ),
        ("`output_dir`, `seed`", "`--output_dir`, `--seed`"),
        ("`wandb_project`, `wandb_entity`, `wandb_name`", "`--project_name`, `--entity`, `--name`"),
        ("`logging_steps`", "`--log_every`"),
        ("`eval_steps`, `evals_per_epoch`", "`--eval_every`"),
        (
            "`merge-lora`, `preprocess`, `inference` (commands)",
            "`fsdp-qlora merge`, `fsdp-qlora data`, `fsdp-qlora generate`",
        ),
    ),
    "torchtune": (
        (
            "`tune run --nproc_per_node 2 lora_finetune_distributed`",
            "`torchrun --nproc_per_node 2 train.py`",
        ),
        (
            "`model._component_` qlora_llama3_1_8b, lora_llama3_1_8b, llama3_1_8b",
            "`--train_type qlora`, `lora`, `full`; the model is `--model_name`",
        ),
        (
            "`model.lora_attn_modules`, `apply_lora_to_mlp`",
            "`--lora_target_modules` (`output_proj` is `o_proj`)",
        ),
        (
            "`model.lora_rank`, `lora_alpha`, `lora_dropout`",
            "`--lora_rank`, `--lora_alpha`, `--lora_dropout`",
        ),
        ("`model.use_dora`", "`--adapter dora`"),
        (
            "`tokenizer.path`, `checkpointer.checkpoint_dir`, `checkpoint_files`",
            "all in `--model_name`",
        ),
        ("`tokenizer.max_seq_len`", "`--context_length`"),
        ("`dataset._component_`, `dataset.packed`", "`--dataset`, `--packing`"),
        ("`dataset.train_on_input`", "`--train_on all`"),
        (
            "`batch_size`, `gradient_accumulation_steps`",
            "the same names; with packing both count bins",
        ),
        ("`epochs`, `max_steps_per_epoch`", "`--num_epochs`, `--max_steps` (of the whole run)"),
        (
            "`optimizer.lr`, `optimizer.weight_decay`, `optimizer._component_`",
            "`--lr`, `--wd`, `--optimizer`",
        ),
        ("`lr_scheduler.num_warmup_steps`", "`--lr_scheduler cosine --lr_warmup_steps 100`"),
        ("`clip_grad_norm`", "`--grad_norm`"),
        ("`loss` CEWithChunkedOutputLoss, LinearCrossEntropyLoss", "always"),
        ("`compile`", "`--compile`"),
        ("`dtype`", "`--precision`"),
        (
            "`enable_activation_checkpointing`, `enable_activation_offloading`",
            "`--use_gradient_checkpointing`, `--use_activation_cpu_offload`",
        ),
        ("`fsdp_cpu_offload`", "`--use_cpu_offload true`"),
        ("`fsdp_reshard_after_forward`", "`--sharding_strategy full_shard`, `shard_grad_op`"),
        ("`custom_sharded_layers`", "not needed: embeddings and lm_head are vocab-parallel"),
        ("`resume_from_checkpoint`, `checkpointer.recipe_checkpoint`", "`--resume`"),
        ("`save_adapter_weights_only`", "always; `fsdp-qlora merge` makes the whole model"),
        ("`metric_logger`, `log_every_n_steps`", "`metrics.jsonl`, always"),
        ("`profiler.enabled`", "`--profile`"),
        ("`seed`", "`--seed`"),
    ),
}


def flag_table(trainer: str) -> str:
    """A trainer's table as Markdown."""
    rows = [f"| {theirs} | {here} |" for theirs, here in TABLES[trainer]]
    return "\n".join([f"| {trainer} | here |", "|---|---|", *rows])


def with_own_names(argv: list[str]) -> list[str]:
    """Arguments with this project's flag in place of one that means the same elsewhere."""
    return [_own_name(word) if word.startswith("--") else word for word in argv]


def _own_name(word: str) -> str:
    """`--learning-rate=1` as `--lr=1`; other words stay."""
    name, equals, value = word.removeprefix("--").partition("=")
    same = SAME.get(name.replace("-", "_"))
    return f"--{same}{equals}{value}" if same else word


def names_elsewhere(setting: str) -> list[str]:
    """The names of other trainers under which a setting is taken too."""
    return [name for name, own in SAME.items() if own == setting]


def hint(given: str, known: Iterable[str], otherwise: str, mark: str = "--") -> str:
    """What to say after an unknown name: what another trainer's name is here, or the nearest name.

    otherwise: where there is neither. mark: stands before a name in the text.
    """
    name, known = given.lstrip("-").replace("-", "_"), list(known)
    others = [other for other, own in SAME.items() if own in known]
    near = next(iter(get_close_matches(_WORDS.get(name, name), [*known, *others], n=1)), None)
    found = None if name in known else _found_elsewhere(name)
    if found:
        trainer, here = found
        return f"{trainer}'s {name} is here: {here}"
    return f"did you mean {mark}{SAME.get(near, near)}?" if near else otherwise


def _found_elsewhere(name: str) -> tuple[str, str] | None:
    """(trainer, what is typed here) for another trainer's name."""
    for trainer, rows in TABLES.items():
        for theirs, here in rows:
            names = [n.rpartition(".")[2] for n in re.findall(r"`([\w.]+)`", theirs)]
            if name in names:
                return trainer.split()[0], _paired(names.index(name), len(names), here)
    return None


def _paired(place: int, count: int, here: str) -> str:
    """The flag that stands in the same place as a name, or all that is said."""
    typed = re.findall(r"`([^`]*)`", here)
    pairs = len(typed) == count and all(text.startswith("--") for text in typed)
    plain = re.sub(r"`[^`]*`|[,\s]", "", here) == ""
    return typed[place] if pairs and plain else here.replace("`", "")
