"""What is split over the ranks, when it is gathered, and how gradients are reduced.

The only importer of torch.distributed.fsdp: FSDP2's `fully_shard` for every strategy that shards.
Beside it, of any model: `units.py` chooses what is gathered together, `prefetch.py` when, and `ddp.py`
reduces gradients where nothing is sharded.

No group has a `param_dtype`: FSDP would cast the fp32 scales of quantized weights to it, and NaN
follows. Packed bytes, scales and adapters travel as stored; the ops cast what they multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from ..adapters import LoraLinear, is_of_adapter
from ..choices import Strategy, StrategyName, strategy_named
from ..dist import (
    broadcast,
    hybrid_mesh,
    main_device_type,
    ranks_from_env,
    resolve_shard_group_size,
    serves_host,
    shard_mesh,
)
from ..memory.vocab_parallel import apply_vocab_parallel, vocab_parallel_weights
from ..memory.weight_streaming import apply_streaming
from ..model.blocks import base_model
from .ddp import GradientReducer
from .dropout_seeds import check_masks
from .own_scripts import check_first_forwards, check_storage, take_whole_tensors
from .prefetch import (
    BackwardPrefetch,
    apply_backward_prefetch,
    apply_forward_prefetch,
    check_prefetch,
    keep_gathered,
)
from .stale_optimizers import refuse_to_train, train_instead
from .units import WrapPolicy, needed_in_backward, sharding_units


def make_mesh(
    strategy: StrategyName, device: torch.device, shard_group_size: int = -1
) -> DeviceMesh | None:
    """The device mesh of a strategy; None where weights are only replicated.

    shard_group_size: ranks that share one copy under a hybrid strategy; -1 = a node's, or half of a
    single node's. Raises ValueError for an unknown strategy, or if the ranks do not divide so.
    """
    row = strategy_named(strategy)
    if not row.shards:
        return None
    if not row.is_hybrid:
        return shard_mesh(device)
    size = resolve_shard_group_size(shard_group_size, ranks_from_env(), row.name)
    return hybrid_mesh(device, size)


def apply_sharding(
    model: nn.Module,
    strategy: StrategyName = "full_shard",
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    reshard_after_forward: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    wrap_policy: WrapPolicy = "block",
    min_wrap_params: int = 100_000_000,
    on_host: OnHost | None = None,
    backward_prefetch: BackwardPrefetch = "backward_pre",
    forward_prefetch: bool = False,
    gather_once: bool = False,
) -> list[str]:
    """Shard the model in place over `mesh` and return the names of the units made.

    strategy: its name here or in FSDP1, or torch's ShardingStrategy. mesh: None is
    `make_mesh(strategy)` over all ranks, on GPUs where the process group serves them; a process
    group is a mesh of one dimension. reshard_after_forward: None is the strategy's. optimizer: one
    that holds the model's weights; it takes those that replace them. Without it, build the optimizer
    afterwards. Works on the meta device, before any weight exists, and on a loaded model: ours, one
    built with transformers, bitsandbytes 4-bit and PEFT, or a plain module. Trained weights that
    exist become rank 0's, for ranks that were seeded apart drew other adapters. With one rank and no
    offload there is nothing to split, and the model stays as it is. A frozen embedding and head are
    no units: each rank keeps its rows of them (memory/vocab_parallel.py). Raises ValueError for an
    unknown name, a mesh that is not the strategy's, bitsandbytes weights in a storage that can't be
    sharded, a `wrap_policy` that picks nothing, or weights trained in host memory on a mesh for GPUs alone.
    """
    _answer_other_trainers(model)
    row = strategy_named(strategy)
    check_prefetch(backward_prefetch)
    check_storage(model)
    if mesh is None:
        mesh = make_mesh(row.name, torch.device(main_device_type()))
    elif isinstance(mesh, dist.ProcessGroup):
        mesh = DeviceMesh.from_group(mesh, main_device_type())
    _check_mesh(row, mesh)
    on_host = on_host or OnHost()
    _check_host(on_host, mesh)
    if dist.get_world_size() > 1:
        check_masks(model)
    _broadcast_trained(model, None if mesh is None else _mesh_device(mesh))
    if mesh is None or (mesh.size() == 1 and not on_host.frozen):
        if dist.get_world_size() > 1:
            model.gradient_reducer = GradientReducer(model)
            _tell_adapters(model)
        if on_host.vocabulary:
            apply_vocab_parallel(model)
        return []
    before = {p: name for name, p in model.named_parameters()}
    not_fsdps = set(apply_vocab_parallel(model, mesh))
    if mesh.size() == 1:
        not_fsdps |= set(apply_streaming(model, _mesh_device(mesh)))
    units = [
        (name, unit)
        for name, unit in sharding_units(model, wrap_policy, min_wrap_params)
        if not not_fsdps.issuperset(unit.parameters())
    ]
    if reshard_after_forward is None:
        reshard_after_forward = row.reshard_after_forward
    modules = [unit for _, unit in units]
    _shard_units(model, modules, mesh, on_host, not_fsdps, reshard_after_forward)
    if on_host.frozen and not on_host.trained:
        _keep_trained_on_device(model)
    apply_backward_prefetch(model, needed_in_backward(model, modules), backward_prefetch)
    if forward_prefetch:
        apply_forward_prefetch(model, modules)
    if gather_once:
        keep_gathered(model)
    _gather_to_generate(model)
    _free_after_unrecorded_forwards(model)
    check_first_forwards(model)
    take_whole_tensors(model, free_gathered)
    _tell_adapters(model)
    refuse_to_train(before.keys() - set(model.parameters()))
    if optimizer is not None:
        train_instead(optimizer, before, dict(model.named_parameters()))
    return [name for name, _ in units]


def _shard_units(
    model: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh,
    on_host: OnHost,
    ignored: set[nn.Parameter],
    reshard_after_forward: bool,
):
    """Give the units, and to the root what is in none of them, to FSDP; the root stays gathered."""
    settings: dict[str, Any] = dict(
        mesh=mesh,
        offload_policy=on_host.policy(mesh.device_type),
        ignored_params=ignored,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
    )
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)


def _answer_other_trainers(model: nn.Module):
    """accelerate would wrap the model in DDP unless it is marked; it asks for DDP's `no_sync`."""
    model._is_accelerate_prepared = True
    model.no_sync = partial(without_gradient_sync, model)


def is_placed(model: nn.Module) -> bool:
    """True if `apply_sharding` has had the model, also where there was nothing to split."""
    no_sync = getattr(model, "no_sync", None)
    return isinstance(no_sync, partial) and no_sync.func is without_gradient_sync


def _tell_adapters(model: nn.Module):
    """Let adapted layers know that ranks share them: they merge by rows, and take no new adapters."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            layer.in_shards = isinstance(layer.get_base_layer().weight, DTensor)


def _check_mesh(row: Strategy, mesh: DeviceMesh | None):
    """Refuse a mesh that would make another strategy of this one."""
    if (given := mesh.ndim if mesh is not None else 0) != row.mesh_dims:
        raise ValueError(
            f"--sharding_strategy {row.name} takes a mesh of {row.mesh_dims} dimensions, and this "
            f"one has {given}; use make_mesh({row.name!r}, device), or leave mesh out"
        )


def _check_host(on_host: OnHost, mesh: DeviceMesh | None):
    """Refuse gradients in host memory where torch can't sum their norms over ranks."""
    if on_host.trained and mesh is not None and not serves_host(mesh):
        raise ValueError(
            "on_host=OnHost(trained=True): norms of gradients in host memory are summed over ranks, and "
            f"the process group, {dist.get_backend_config()}, is for GPUs alone; make it with "
            'init_process_group("cpu:gloo,cuda:nccl"), or leave trained weights on the GPU'
        )


@torch.no_grad()
def _broadcast_trained(model: nn.Module, device: torch.device | None):
    """Give every rank the trained weights of rank 0, in place, through `device` or where they are.

    So are adapters that are not trained yet. Those on the meta device have no values; `init_adapters`
    gives every rank the same.
    """
    if dist.get_world_size() == 1:
        return
    for name, p in model.named_parameters():
        if p.is_meta or not (p.requires_grad or is_of_adapter(name)):
            continue
        sent = p.detach().to(device or p.device).contiguous()
        broadcast(sent)
        p.copy_(sent)


def _mesh_device(mesh) -> torch.device:
    """This rank's device of a mesh."""
    return (
        torch.device(mesh.device_type, torch.cuda.current_device())
        if (mesh.device_type == "cuda")
        else torch.device(mesh.device_type)
    )


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP owns the model's parameters."""
    return isinstance(model, FSDPModule)


def free_gathered(model: nn.Module):
    """Let the model hold shards alone; the next forward or backward gathers what it needs."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def _gather_to_generate(model: nn.Module):
    """Let `model.generate` work: it calls an inner module, past the root's forward.

    transformers then has ranks go on together until the last one's answer ends.
    """
    if not hasattr(model, "generate"):
        return
    register_fsdp_forward_method(model, "generate")
    base_model(model)._is_fsdp_managed_module = True


def _free_after_unrecorded_forwards(model: nn.Module):
    """Free gathered weights after a forward without autograd, in place: no backward will.

    FSDP leaves the root gathered then, and under shard_grad_op every unit. An optimizer that is built
    meanwhile would hold the gathered copies and train nothing.
    """
    model.frees_after_forward = True

    def free(*_):
        if model.frees_after_forward and not torch.is_grad_enabled():
            free_gathered(model)

    model.register_forward_hook(free)


@contextmanager
def kept_between_forwards(model: nn.Module) -> Iterator[None]:
    """Within it, forwards without autograd leave gathered weights for the next; freed at its end."""
    model.frees_after_forward = False
    try:
        yield
    finally:
        model.frees_after_forward = True
        free_gathered(model)


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; all but a step's last may skip it."""
    if is_sharded(model):
        model.set_requires_gradient_sync(sync)
    elif hasattr(model, "gradient_reducer"):
        model.gradient_reducer.enabled = sync


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Within it, no backward of a model that is not sharded meets other ranks."""
    reducer = getattr(model, "gradient_reducer", None)
    was = reducer and reducer.enabled
    if reducer:
        reducer.enabled = False
    try:
        yield
    finally:
        if reducer:
            reducer.enabled = was


def watch_gradients(model: nn.Module):
    """Tell a model that is not sharded that its weights exist now."""
    if reducer := getattr(model, "gradient_reducer", None):
        reducer.watch()


def reduce_gradients(model: nn.Module):
    """What the end of a backward does in ddp, where `set_gradient_sync` asks for it."""
    reducer = getattr(model, "gradient_reducer", None)
    if reducer and reducer.enabled:
        reducer.reduce()


# ---- host memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnHost:
    """Which weights' shards wait in host memory between uses."""

    frozen: bool = False  # and all that FSDP owns, but for:
    trained: bool = False  # with their gradients and optimizer states
    vocabulary: bool = False  # a frozen embedding and head

    def policy(self, device_type: str) -> OffloadPolicy:
        """As FSDP takes it."""
        return (
            CPUOffloadPolicy(pin_memory=device_type == "cuda") if self.frozen else OffloadPolicy()
        )


def parameter_device(
    model: nn.Module, device: torch.device, on_host: OnHost
) -> Callable[[nn.Parameter], torch.device]:
    """Where each parameter's shard lives, as a function of the parameter."""
    by_rows = set(vocab_parallel_weights(model))

    def place(p: nn.Parameter) -> torch.device:
        off = (
            on_host.vocabulary
            if p in by_rows
            else on_host.trained
            if p.requires_grad
            else on_host.frozen
        )
        return torch.device("cpu") if off else device

    return place


def _keep_trained_on_device(model: nn.Module):
    """Of an offloaded model, leave trained weights on their device, with all that belongs to them.

    FSDP2 knows one policy per group but keeps it per parameter. A group that is said to be offloaded
    refuses parameters that are not, so its own policy is taken off.
    """
    for module in model.modules():
        group = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        if group is None:
            continue
        group.offload_policy = OffloadPolicy()
        for p in group.fsdp_params:
            if p.sharded_param.requires_grad:
                p.offload_to_cpu = p.pin_memory = False
