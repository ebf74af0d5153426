"""The rows of docs/performance.md's table of targets: random weights, random tokens, one line each.

    python benchmarks/speed_rows.py                              every row for one GPU
    torchrun --nproc_per_node 4 benchmarks/speed_rows.py         every row for four
    python benchmarks/speed_rows.py '8b_qlora*' --results benchmarks/results/speed_h100_2026-11-28.jsonl

All rows run in one process, one after the other. An out-of-memory row is a row too.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers import AutoConfig

from fsdp_qlora.bench.cell_worker import clean_up
from fsdp_qlora.bench.measure import MemoryLimit, describe_run, measure, summary
from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import print_main, process_group, rank_device, ranks_from_env
from fsdp_qlora.loading import read_config
from fsdp_qlora.run_plan import plan_run

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-70b-hf"
QWEN_30B, MIXTRAL = "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"
BUDGET = 70  # GiB that torch may have allocated on a card of 80 GB
COMMON = dict(
    random_weights=True,
    lora_dropout=0.0,
    lora_rank=64,
    lr=1e-4,
    activation_budget_gib=BUDGET,
    gradient_accumulation_steps=1,
)
LONG = dict(batch_size=2, context_length=8192)
LORA = dict(train_type="lora", batch_size=2, context_length=4096)
PUBLISHED = dict(
    lora_target_modules="q_proj,k_proj,v_proj", lora_rank=8, batch_size=1, context_length=4096
)
WIDE = dict(context_length=2048, sharding_strategy="full_shard", global_batch_size=32)
FP8 = dict(compute_dtype="fp8")
# No targets: measured to hold estimates to. Attention with sinks is eager, whose scores take T x T.
MOE = dict(batch_size=2, context_length=2048)
HYBRID = dict(batch_size=2, context_length=4096)
ADAPTED = dict(lora_target_parameters="experts", lora_rank=16)
EXPERTS = HYBRID | ADAPTED
ATTENTION = HYBRID | dict(lora_rank=16)
RECOMPUTED = dict(activation_policy="recompute_all")
STREAMED = RECOMPUTED | dict(
    sharding_strategy="full_shard",
    use_cpu_offload=True,
    use_trained_cpu_offload=False,
    gradient_accumulation_steps=4,
)


@dataclass(frozen=True)
class Case:
    """One row: what to run, and the figure aimed at."""

    settings: dict
    target: float | None  # tokens per second and GPU, or seconds per step
    unit: str = "tok/s"
    model: str = LLAMA_8B
    gpus: tuple[int, ...] = field(default=(1,))
    layers: int | None = None  # blocks of a model that is cut

    def config(self, folder: str, **changes) -> RunConfig:
        """The run's settings; `changes` are for machines without a large GPU."""
        return RunConfig(model_name=folder, **self.all_settings(**changes))

    def all_settings(self, **changes) -> dict:
        """The settings of the row with those that all rows share."""
        settings = COMMON | dict(sharding_strategy="ddp") | self.settings | changes
        return settings | (
            dict(activation_budget_gib=None) if "activation_policy" in settings else {}
        )


CASES = {
    "8b_qlora": Case(LONG, 15_500),
    "8b_qlora_fp8": Case(LONG | FP8, 18_500),
    "8b_qlora_low_memory": Case(
        LONG | dict(activation_policy="recompute_all", use_activation_cpu_offload=True), 11_000
    ),
    "8b_lora": Case(LORA, 17_000),
    "8b_lora_qkv": Case(PUBLISHED | dict(train_type="lora"), 17_900),
    "8b_lora_qkv_fp8": Case(PUBLISHED | dict(train_type="lora") | FP8, 24_100),
    "8b_qlora_qkv": Case(PUBLISHED, 17_900),
    "8b_qlora_qkv_fp8": Case(PUBLISHED | FP8, 24_100),
    "8b_full_8bit": Case(LONG | dict(train_type="full", optimizer="adamw_8bit"), 2.2, "s/step"),
    "8b_full_bf16": Case(LONG | dict(train_type="full", optimizer="adamw_bf16"), 2.2, "s/step"),
    "8b_qlora_full_shard": Case(LONG | dict(sharding_strategy="full_shard"), 14_880, gpus=(2, 4)),
    "8b_qlora_ddp": Case(LONG, 14_880, gpus=(2, 4)),
    "8b_qlora_shard_grad_op": Case(
        LONG | dict(sharding_strategy="shard_grad_op"), 14_880, gpus=(2, 4)
    ),
    "8b_qlora_hybrid_full_shard": Case(
        LONG | dict(sharding_strategy="hybrid_full_shard"), 14_880, gpus=(4,)
    ),
    "8b_qlora_hybrid_shard_grad_op": Case(
        LONG | dict(sharding_strategy="hybrid_shard_grad_op"), 14_880, gpus=(4,)
    ),
    "qwen3_30b_qlora_experts_full_shard": Case(
        EXPERTS | dict(sharding_strategy="full_shard"), 8_000, model=QWEN_30B, gpus=(2, 4)
    ),
    "qwen3_30b_qlora": Case(ATTENTION, 16_000, model=QWEN_30B),
    "qwen3_30b_qlora_fp8": Case(ATTENTION | FP8, 18_000, model=QWEN_30B),
    "qwen3_30b_qlora_recomputed": Case(ATTENTION | RECOMPUTED, None, model=QWEN_30B),
    "qwen3_30b_qlora_experts": Case(EXPERTS, 14_000, model=QWEN_30B),
    "qwen3_30b_qlora_experts_fp8": Case(EXPERTS | FP8, 16_000, model=QWEN_30B),
    "qwen3_30b_qlora_experts_recomputed": Case(EXPERTS | RECOMPUTED, None, model=QWEN_30B),
    "qwen3_30b_qlora_experts_recomputed_8bit": Case(
        EXPERTS | RECOMPUTED | dict(optimizer="adamw_8bit"), None, model=QWEN_30B
    ),
    # Of the row recomputed: 80 % of its speed, in 8 GiB. As many tokens a step, in fewer micro-batches.
    "qwen3_30b_qlora_streamed": Case(ATTENTION | STREAMED, None, model=QWEN_30B),
    "qwen3_30b_qlora_streamed_4x2": Case(
        ATTENTION | STREAMED | dict(batch_size=4, gradient_accumulation_steps=2),
        None,
        model=QWEN_30B,
    ),
    "qwen3_30b_qlora_streamed_8x1": Case(
        ATTENTION
        | STREAMED
        | dict(batch_size=8, gradient_accumulation_steps=1, use_activation_cpu_offload=True),
        None,
        model=QWEN_30B,
    ),
    "qwen3_30b_qlora_streamed_8x4": Case(
        ATTENTION | STREAMED | dict(batch_size=8, use_activation_cpu_offload=True),
        None,
        model=QWEN_30B,
    ),
    "mixtral_8x7b_qlora": Case(MOE | dict(lora_rank=16), 6_500, model=MIXTRAL),
    "mixtral_8x7b_qlora_recomputed": Case(
        MOE | dict(lora_rank=16) | RECOMPUTED, None, model=MIXTRAL
    ),
    "mixtral_8x7b_qlora_experts_8_blocks": Case(
        MOE | ADAPTED | dict(activation_policy="keep_linears"), None, model=MIXTRAL, layers=8
    ),
    "qwen3_30b_qlora_experts_12_blocks": Case(
        ADAPTED | dict(batch_size=1, context_length=8192, activation_policy="keep_all"),
        None,
        model=QWEN_30B,
        layers=12,
    ),
    "qwen3_30b_qlora_12_blocks": Case(
        ATTENTION | dict(batch_size=8, context_length=2048, activation_policy="keep_linears"),
        None,
        model=QWEN_30B,
        layers=12,
    ),
    "qwen3_235b_qlora_4_blocks": Case(
        ATTENTION | RECOMPUTED, None, model="Qwen/Qwen3-235B-A22B", layers=4
    ),
    "olmoe_7b_qlora_experts": Case(EXPERTS | RECOMPUTED, None, model="allenai/OLMoE-1B-7B-0924"),
    "olmoe_7b_qlora": Case(ATTENTION, None, model="allenai/OLMoE-1B-7B-0924"),
    "gpt_oss_20b_qlora": Case(MOE, None, model="openai/gpt-oss-20b"),
    "gpt_oss_20b_qlora_experts": Case(MOE | ADAPTED, None, model="openai/gpt-oss-20b"),
    "qwen3_5_9b_qlora": Case(HYBRID, None, model="Qwen/Qwen3.5-9B"),
    "nemotron_9b_qlora": Case(HYBRID, None, model="nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    "70b_qlora": Case(WIDE | dict(batch_size=2), 1_850, model=LLAMA_70B, gpus=(4,)),
    "70b_qlora_8x1": Case(WIDE | dict(batch_size=8), 1_850, model=LLAMA_70B, gpus=(4,)),
    "70b_qlora_fp8": Case(WIDE | dict(batch_size=2) | FP8, 2_450, model=LLAMA_70B, gpus=(4,)),
    "70b_qlora_replayed": Case(
        WIDE | dict(batch_size=2, cuda_graphs=True), 1_850, model=LLAMA_70B, gpus=(4,)
    ),
    "70b_qlora_fp8_replayed": Case(
        WIDE | dict(batch_size=2, cuda_graphs=True) | FP8, 2_450, model=LLAMA_70B, gpus=(4,)
    ),
    "70b_qlora_fp8_4x2": Case(WIDE | dict(batch_size=4) | FP8, 2_450, model=LLAMA_70B, gpus=(4,)),
}


def config_folder(model: str, layers: int | None = None) -> str:
    """A folder with the config.json of a known model, cut to `layers` if given."""
    settings = known_config(model, layers)
    folder = Path(tempfile.mkdtemp()) / model.rsplit("/", 1)[-1].lower()
    AutoConfig.for_model(settings.pop("model_type"), **settings).save_pretrained(folder)
    return str(folder)


def chosen(patterns: list[str], gpus: int) -> list[str]:
    """Names of the rows that match and are for this number of GPUs.

    Raises ValueError, listing the rows, if there is none.
    """
    names = [
        name
        for name, case in CASES.items()
        if gpus in case.gpus and any(fnmatch(name, p) for p in patterns or ["*"])
    ]
    if not names:
        raise ValueError(
            f"no row matches {' '.join(patterns) or '*'} on {gpus} GPUs; there are "
            + ", ".join(f"{n} {list(c.gpus)}" for n, c in CASES.items())
        )
    return names


def profile_settings(name: str, options) -> dict:
    """What --profile adds to a row's settings."""
    if not options.profile:
        return {}
    return dict(profile=True, active_steps=1, profiling_output=f"{options.profile}/{name}")


def measured_row(name: str, config: RunConfig, options, device: torch.device) -> BenchRow:
    """Measure a configuration on ranks that have a process group, and leave the GPU empty."""
    plan = plan_run(config, device)
    layers = read_config(config.model_name).num_hidden_layers
    row = describe_run(config, plan, name, layers, device)
    try:
        measure(row, config, plan, options, device, MemoryLimit(None))
    except torch.OutOfMemoryError as error:
        row.status = "oom"
        print_main(str(error).splitlines()[0])
    clean_up(device)
    return row


def run_case(name: str, folder: str, options, **changes) -> BenchRow:
    """Measure one row in this process; rank 0 prints it beside its target."""
    case = CASES[name]
    config = case.config(folder, **changes | profile_settings(name, options))
    device = rank_device(config.device)
    with process_group(device, config.timeout_minutes):
        row = measured_row(f"{name} on {ranks_from_env().world_size}", config, options, device)
    reached = row.seconds_per_step if case.unit == "s/step" else row.tokens_per_second_per_gpu
    goal = f"; {reached:,.5g} {case.unit}" if row.status == "ok" else ""
    if goal and case.target:
        goal += f", target {case.target:,.5g}"
    print_main(summary(row) + goal)
    if options.results and ranks_from_env().is_main:
        append_row(row, options.results)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names or patterns; all that suit this many GPUs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, help="cut the model, to see that a row runs")
    parser.add_argument("--profile", help="folder for a trace and its table of each row")
    parser.add_argument(
        "--keep_fp8_weights", choices=("true", "false"), help="as the run's setting"
    )
    parser.add_argument("--results")
    options = parser.parse_args()
    gpus, keep = ranks_from_env().world_size, options.keep_fp8_weights
    changes = dict(keep_fp8_weights=keep == "true") if keep else {}
    for name in chosen(options.rows, gpus):
        try:
            folder = config_folder(CASES[name].model, options.layers or CASES[name].layers)
            run_case(name, folder, options, **changes)
        except (
            Exception
        ) as error:  # the other rows are still wanted; ranks fail together or time out
            if gpus > 1:
                raise
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
