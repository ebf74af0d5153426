"""What a run leaves open, decided: `resolve` makes the Plan of a run's settings on a machine.

Each choice is a function that takes the plan as it is so far and gives it with the choice made; the
order matters, for a choice sees those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..catalog.arch import ModelShape
from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..catalog.machine import Machine
from ..config import AUTO, RunConfig
from ..config.delta_kernels import why_on_plain_torch
from ..config.scan_kernels import why_mamba2_on_plain_torch
from ..config.settings import shown
from ..plan import Plan
from ..plan_draft import draft_plan, replays_pay, with_learning_rate
from .attention import attention_of, makes_masks
from .compute import waits_for_host
from .lengths import Batches
from .peak import Memory, host_memory, memory
from .policies import SPARE_SHARE, choose_policies, choose_tiles, keeps_fp8_weights
from .transfers import hides_attention_offload
from .weights import trained_on_host

_TOKENS_OF_TILE = 2**17  # of attention: of each key-value head in it


@dataclass(frozen=True)
class Room:
    """GPU memory that a plan may fill."""

    gib: float
    needed: Callable[[Memory], float]  # what of an estimate must be within it
    gpu: Gpu | None = None  # for which the policy is the fastest


def room_of(machine: Machine) -> Room:
    """All of a card, but what is left free because predictions are off."""
    return Room((1 - SPARE_SHARE) * machine.memory_gib, attrgetter("total"), machine.gpu)


def _budget_of(config: RunConfig) -> Room | None:
    """What --activation_budget_gib allows; None where it is left out, or left to the planner."""
    if config.activation_budget_gib in (None, AUTO):
        return None
    return Room(config.activation_budget_gib, attrgetter("peak_allocated"))


def leaves_open(config: RunConfig) -> bool:
    """Whether `resolve` needs the model's shape for these settings."""
    asks_fp8 = config.compute_dtype == "fp8" and config.keep_fp8_weights is None
    return _budget_of(config) is not None or config.mlp_tiles == AUTO or asks_fp8


def resolve(
    config: RunConfig,
    shape: ModelShape | None,
    machine: Machine,
    room: Room | None = None,
    batches: Batches | None = None,
    attention: str | None = None,
) -> Plan:
    """The plan of a run on a machine: what its settings leave open is decided, once.

    shape: None will do where nothing is open (`leaves_open`). room: what the activation policy is
    chosen to fill, in place of --activation_budget_gib. batches: the data's, for which that policy is
    the fastest. attention: its name, where the model's code was asked for it. What was chosen is in
    `Plan.choices`; nothing is printed. Raises ValueError for a budget that is too small even with every
    block recomputed.
    """
    room = room or _budget_of(config)
    plan = draft_plan(config, machine.world_size, machine.gpus, on_gpu=not machine.is_cpu)
    plan = _with_attention(plan, config, shape, machine, attention)
    _check_kept_fp8(plan)
    plan = _with_groups(plan, config, machine)
    plan = _with_offload(plan, shape, machine)
    if shape is None:
        return plan.change(attention_offload=plan.memory.activation_offload)
    plan = with_learning_rate(plan, shape.hidden)
    plan = _with_state_kernels(plan, config, shape, machine)
    if config.mlp_tiles == AUTO:
        plan = _with_tiles(plan, config, shape, machine)
    if plan.memory.mlp_tiles > 1:
        plan = plan.change(attention_tiles=_attention_tiles(shape, plan.batch.tokens))
    plan = _with_attention_offload(plan, shape, machine, chosen=room is not None)
    if room is not None:
        plan = _with_policy(plan, shape, room, batches)
    if config.keep_fp8_weights is None and plan.quantization.compute_dtype == "fp8":
        plan = _with_kept_fp8(plan, shape, machine, room)
    return _with_graphs(plan, config, shape, machine)


def _with_attention(
    plan: Plan, config: RunConfig, shape: ModelShape | None, machine: Machine, known: str | None
) -> Plan:
    """The attention that the model takes, and whether masks go into it; as drafted without a shape."""
    if shape is None:
        return plan.change(attention=known or plan.model.attention)
    attention = known or attention_of(config, shape, machine)
    return plan.change(attention=attention, masked=makes_masks(config, shape, attention))


def _with_state_kernels(plan: Plan, config: RunConfig, shape: ModelShape, machine: Machine) -> Plan:
    """Whether mixers with a state run on kernels, which is said where a GPU could, and compiled."""
    kinds = [kind.block.mixer for kind, _ in shape.block_kinds() if kind.block]
    mixers = list(dict.fromkeys(mixer for mixer in kinds if mixer.rule))
    if not mixers:
        return plan
    plan = plan.change(rows_apart=config.packing)
    if machine.is_cpu:
        return plan.change(state_kernels=False)
    said = [_on_plain_torch(mixer, shape, plan, machine.gpu) for mixer in mixers]
    if not any(said):
        return plan
    return plan.choose(next(filter(None, said)), state_kernels=False)


def _on_plain_torch(mixer: Mixer, shape: ModelShape, plan: Plan, gpu: Gpu) -> str:
    """Why a mixer runs on plain torch, what follows and what helps, in a line; empty if on kernels."""
    if mixer.rule == "lightning":
        return (
            f"the lightning attention of {shape.family} runs on plain torch, which is slower and takes "
            "more memory: transformers has no kernels for it"
        )
    if mixer.rule == "delta":
        why = why_on_plain_torch(gpu.is_hopper, mixer.decays_by_channel)
    else:
        why = why_mamba2_on_plain_torch()
    if why is None:
        return ""
    what = dict(delta="delta nets", mamba2="Mamba mixers")[mixer.rule]
    return (
        f"{why[0]}: the {what} of {shape.family} run on plain torch, which is slower and takes more "
        f"memory in its backward ({why[1]})"
    )


def _check_kept_fp8(plan: Plan):
    """Refuse --keep_fp8_weights where each product's weight is gathered first."""
    if plan.quantization.keep_fp8_weights and not plan.weights_stay:
        raise ValueError(
            f"--keep_fp8_weights true: {plan.sharding.strategy} on {plan.sharding.world_size} GPUs "
            "gathers each weight for every matmul; use --sharding_strategy ddp, or leave "
            "--keep_fp8_weights out"
        )


def chosen_settings(config: RunConfig, plan: Plan, room: Room | None = None) -> dict[str, Any]:
    """The settings that were open, as they would be typed to get the plan."""
    chosen: dict[str, Any] = {}
    if (room or _budget_of(config)) is not None:
        chosen |= dict(
            activation_policy=plan.memory.activation_policy,
            activation_budget_gib=None,
            use_activation_cpu_offload=plan.memory.activation_offload,
        )
    if config.keep_fp8_weights is None and config.compute_dtype == "fp8":
        chosen |= dict(keep_fp8_weights=plan.quantization.keep_fp8_weights)
    return chosen


def hybrid_groups(machine: Machine, config: RunConfig) -> bool:
    """Whether the GPUs divide into shard groups of two or more."""
    world, size = machine.world_size, config.shard_group_size
    if size == -1:
        size = machine.gpus if machine.nodes > 1 else world // 2
    return size >= 2 and world % size == 0


def _with_groups(plan: Plan, config: RunConfig, machine: Machine) -> Plan:
    """How many GPUs of a hybrid strategy share one copy; left as it is where they do not divide."""
    if not config.strategy.is_hybrid or not hybrid_groups(machine, config):
        return plan
    return plan.change(shard_group_size=plan.sharding.shard_ranks)


def _with_offload(plan: Plan, shape: ModelShape | None, machine: Machine) -> Plan:
    """What of trained weights and of the vocabulary waits on the host beside the frozen blocks."""
    frozen = plan.memory.cpu_offload
    if plan.memory.vocabulary_offload is None:
        plan = plan.change(vocabulary_offload=frozen)
    if not frozen:
        return plan.change(trained_offload=False)
    off = plan.memory.trained_offload
    if off is None:
        off = (
            machine.is_cpu or shape is None or trained_on_host(shape, plan, machine.gpu.memory_gib)
        )
    if plan.adapter.is_full:
        return plan.change(trained_offload=off)
    where = (
        "trained weights, gradients and optimizer states are in host memory too"
        if off
        else "these stay on the GPU"
    )
    return plan.choose(f"--use_trained_cpu_offload {shown(off)}: {where}", trained_offload=off)


def _with_tiles(plan: Plan, config: RunConfig, shape: ModelShape, machine: Machine) -> Plan:
    """--mlp_tiles -1, and whether to replay micro-batches, which depends on it."""
    budget = _budget_of(config)
    tiles = choose_tiles(shape, plan, budget.gib if budget else None)
    plan = plan.choose(f"--mlp_tiles {tiles}: chosen by the estimate", mlp_tiles=tiles)
    return plan if machine.is_cpu else plan.change(cuda_graphs=replays_pay(plan, config))


def _attention_tiles(shape: ModelShape, tokens: float) -> int:
    """Groups of key-value heads that attention takes one after the other (model/attention.py).

    With MLPs in tiles attention's backward is the peak, so as many as leave each enough work for a GPU.
    """
    heads = max(kind.kv_heads for kind, _ in shape.block_kinds())
    most = tokens * heads // _TOKENS_OF_TILE
    return max((n for n in range(1, heads + 1) if heads % n == 0 and n <= most), default=1)


def _with_attention_offload(plan: Plan, shape: ModelShape, machine: Machine, chosen: bool) -> Plan:
    """Whether attention's kept outputs wait on the host with inputs: where nothing waits for the copies.

    Of long rows attention takes far longer. With short rows of small models, on cards that share their
    host's uplinks, blocks would wait. chosen: the policy is yet to be, and may be keep_attention.
    """
    policies = "keep_attention" if chosen else plan.memory.activation_policy
    if not plan.memory.activation_offload or "keep_attention" not in policies:
        return plan
    moves, stay = plan.change(attention_offload=True), ""
    host = machine.host_memory_gib or float("inf")
    needed = sum(host_memory(shape, moves.change(activation_policy=policies)).values())
    if needed > host:
        stay = f"the host would need {needed:.0f} of {host:.0f} GiB"
    elif not machine.is_cpu and not hides_attention_offload(shape, machine.gpu, plan):
        stay = "blocks would wait for their copies"
    if chosen or not stay:
        return plan if stay else moves
    return plan.choose(
        f"--use_activation_cpu_offload true: inputs alone, not attention's outputs, as {stay}"
    )


def _with_policy(plan: Plan, shape: ModelShape, room: Room, batches: Batches | None) -> Plan:
    """What each block keeps: the fastest mix that the room holds; of keep_all nothing is offloaded."""
    seen = batches.seen(plan) if batches else plan
    policy = choose_policies(shape, plan, room.gib, room.gpu, room.needed, seen)
    need = room.needed(memory(shape, plan, activation_policy=policy))
    return plan.choose(
        f"--activation_policy {policy}: {need:.1f} GiB at the peak by the estimate, within "
        f"{room.gib:g}",
        activation_policy=policy,
        activation_offload=plan.memory.activation_offload and policy != "keep_all",
        attention_offload=plan.memory.attention_offload and policy != "keep_all",
    )


def _with_kept_fp8(plan: Plan, shape: ModelShape, machine: Machine, room: Room | None) -> Plan:
    """--keep_fp8_weights None: kept on a GPU that has room for them beside the rest."""
    if machine.is_cpu:
        return plan
    room = room or room_of(machine)
    keeps = keeps_fp8_weights(shape, plan, room.gib, room.needed)
    return plan.choose(
        f"--keep_fp8_weights {shown(keeps)}: chosen by the estimate", keep_fp8_weights=keeps
    )


def _with_graphs(plan: Plan, config: RunConfig, shape: ModelShape, machine: Machine) -> Plan:
    """Whether micro-batches are replayed: not where the card would hold only launched ones.

    Sharded ones are launched too where the GPU is slow enough for that.
    """
    if config.cuda_graphs is not None or machine.is_cpu or not plan.replays(shape):
        return plan
    launched, card = plan.change(cuda_graphs=False), room_of(machine)
    if plan.sharded and not waits_for_host(shape, machine.gpu, launched):
        return launched
    replayed_gib, launched_gib = (card.needed(memory(shape, p)) for p in (plan, launched))
    if not launched_gib <= card.gib < replayed_gib:
        return plan
    return plan.choose(
        f"--cuda_graphs false: graphs of micro-batches would take {replayed_gib - launched_gib:.1f} GiB, "
        "more than the card has left",
        cuda_graphs=False,
    )
