"""A run's settings as a draft of its plan: what they say by themselves, before an estimate chooses.

`estimate.resolve` goes on from it, with the model's shape and the machine. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .config import AUTO, BatchPlan, RunConfig, plan_batches
from .config.run import has_flash_attention_4
from .plan import SECTIONS, Plan

_GRAPH_TOKENS = 8192  # of a micro-batch; above, the GPU computes for longer than the host needs


def draft_plan(
    config: RunConfig, world_size: int, gpus_per_node: int | None = None, on_gpu: bool = True
) -> Plan:
    """The plan of a run's settings on so many ranks, before anything is chosen by an estimate.

    Where the policy is still to be chosen (--activation_budget_gib) every block is recomputed, where
    tiles are, MLPs are whole, and where it is open whether weights are kept in fp8, they are not.
    """
    sections = {
        name: section(**_filled(section, config))
        for name, section in SECTIONS.items()
        if section is not BatchPlan
    }
    policy, ends = config.activation_policy, ("embed_tokens", "lm_head")
    plan = Plan(**sections, batch=plan_batches(config, world_size)).change(
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        attention=_estimated_attention(config),
        keep_fp8_weights=bool(config.keep_fp8_weights),
        expert_targets=tuple(config.target_parameters or ()),
        whole_modules=(*config.whole_modules, *(ends if config.added_tokens else ())),
        blocks_adapted=len(config.adapted_blocks) if config.adapted_blocks else None,
        activation_policy="recompute_all" if policy == "auto" else policy,
        mlp_tiles=max(1, config.mlp_tiles),
    )
    by_itself = on_gpu and not plan.gathers_inside_blocks
    plan = plan.change(compile=by_itself if config.compile is None else config.compile)
    if config.mlp_tiles == AUTO or not on_gpu:
        return plan.change(cuda_graphs=bool(config.cuda_graphs))
    return plan.change(cuda_graphs=replays_pay(plan, config))


def _filled(section: type, config: RunConfig) -> dict[str, Any]:
    """The values of a section's fields that settings fill."""
    found = {f.name: f.metadata.get("setting", f.name) for f in fields(section)}
    return {name: _frozen(getattr(config, setting)) for name, setting in found.items() if setting}


def _frozen(value: Any) -> Any:
    """A setting as a plan holds it: hashable."""
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


_RATE_BY_WIDTH, _HIGHEST_RATE = 1.4, 5e-3  # tiny models diverge at 1.4 / D


def with_learning_rate(plan: Plan, width: int) -> Plan:
    """The plan with the learning rate for a model's hidden size, where none was given.

    1.4 / D for adapters scaled by alpha / R with alpha 32, whatever their rank, and a tenth of it for
    whole weights. As muP has it for Adam (https://arxiv.org/abs/2203.03466), the rate goes by one over
    the width. 1.4 is the best of a sweep at 512 (docs/defaults.md), and near what "LoRA Without Regret"
    (https://thinkingmachines.ai/blog/lora/) found for models of 8 and 70 billion weights.
    """
    if plan.optimizer.lr is not None:
        return plan
    lr = min(_RATE_BY_WIDTH / width, _HIGHEST_RATE) * (1 if plan.adapter.has_lora else 0.1)
    return plan.change(lr=float(f"{lr:.2g}"))


def replays_pay(plan: Plan, config: RunConfig) -> bool:
    """Whether micro-batches are CUDA graphs: as asked, else where they are short and nothing moves.

    Gathers and reductions of adapted models are replayed with the rest, but not where the last
    micro-batch of a step differs. Full fine-tuning, which launches few kernels, gained nothing on two
    H200s for 7 GiB more; hybrids have not been measured: both only if asked for.
    A model may still have what no graph can hold (training/cuda_graphs.py).
    """
    if config.cuda_graphs is not None:
        return config.cuda_graphs
    memory, sharding = plan.memory, plan.sharding
    moved = memory.cpu_offload or memory.vocabulary_offload or memory.activation_offload
    differs = plan.loop.no_sync or sharding.gather_once
    alike = not (differs or sharding.facts.is_hybrid or plan.adapter.is_full)
    return (
        (plan.weights_stay or alike)
        and plan.batch.ranks_per_row == 1
        and not moved
        and memory.mlp_tiles == 1
        and plan.loop.compile
        and not config.profile_memory
        and plan.batch.tokens <= _GRAPH_TOKENS
    )


def _estimated_attention(config: RunConfig) -> str:
    """The attention kernel that is reckoned with where nothing is known of the model.

    FlashAttention 4 is, where it is installed on the machine that is asked.
    """
    name = config.attn_implementation
    if name == "flash_attention_4" or name == "auto" and has_flash_attention_4():
        return "fa4_packed" if config.packing else "fa4"
    if name == "auto":
        name = "sdpa"
    return "varlen" if config.packing and name == "sdpa" else name
