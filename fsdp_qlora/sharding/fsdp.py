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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ..dist import hybrid_mesh, ranks_from_env, resolve_shard_group_size, shard_mesh
from ..memory.vocabulary import apply_vocabulary_lookup, vocabulary_weights
from ..memory.weight_streaming import apply_streaming
from .ddp import GradientReducer
from .prefetch import apply_backward_prefetch, apply_forward_prefetch, keep_gathered
from .units import WrapPolicy, needed_in_backward, sharding_units


@dataclass(frozen=True)
class Strategy:
    """One way to place a model on the ranks."""
    mesh: str                           # "replicate", "shard" (world,), or "hybrid" (replicas, group)
    reshard_after_forward: bool | None  # free a unit's gathered weights after its forward
    fsdp1: str                          # the name in FSDP1, which guides and papers use
    summary: str


STRATEGIES = {
    "ddp": Strategy("replicate", None, "NO_SHARD", "every rank holds everything"),
    "shard_grad_op": Strategy("shard", False, "SHARD_GRAD_OP",
                              "weights are gathered for a forward and freed after its backward"),
    "full_shard": Strategy("shard", True, "FULL_SHARD",
                           "weights are gathered for each forward and backward of a block"),
    "hybrid_shard_grad_op": Strategy("hybrid", False, "_HYBRID_SHARD_ZERO2",
                                     "shard_grad_op in a group, replicas of groups"),
    "hybrid_full_shard": Strategy("hybrid", True, "HYBRID_SHARD",
                                  "full_shard in a group, replicas of groups"),
}


def make_mesh(strategy: str, device: torch.device, shard_group_size: int = -1):
    """The device mesh of a strategy; None where weights are only replicated.

    shard_group_size: ranks that share one copy under a hybrid strategy; -1 = a node's, or half of a
    single node's. Raises ValueError if the ranks do not divide so.
    """
    kind = STRATEGIES[strategy].mesh
    if kind == "replicate": return None
    if kind == "shard": return shard_mesh(device)
    size = resolve_shard_group_size(shard_group_size, ranks_from_env(), strategy)
    return hybrid_mesh(device, size)


def apply_sharding(model: nn.Module, strategy: str = "full_shard", mesh=None, *,
                   wrap_policy: WrapPolicy = "block", min_wrap_params: int = 100_000_000,
                   on_host: OnHost | None = None, backward_prefetch: str = "backward_pre",
                   forward_prefetch: bool = False, gather_once: bool = False) -> list[str]:
    """Shard the model in place over `mesh` (`make_mesh`) and return the names of the units made.

    Works on the meta device, before any weight exists, and on a loaded model: ours, or one built
    with transformers, bitsandbytes 4-bit and PEFT. With one rank and no offload there is nothing to
    split, and the model stays as it is. A frozen embedding and head are no units: each rank keeps
    its rows of them (memory/vocabulary.py). Raises ValueError for bitsandbytes weights in a storage
    that can't be sharded, or a `wrap_policy` function that picks nothing.
    """
    check_storage(model)
    on_host = on_host or OnHost()
    if mesh is None or (mesh.size() == 1 and not on_host.frozen):
        if dist.get_world_size() > 1: model.gradient_reducer = GradientReducer(model)
        if on_host.vocabulary: apply_vocabulary_lookup(model)
        return []
    not_fsdps = set(apply_vocabulary_lookup(model, mesh))
    if mesh.size() == 1: not_fsdps |= set(apply_streaming(model, mesh_device(mesh)))
    settings = dict(mesh=mesh, offload_policy=on_host.policy(mesh.device_type), ignored_params=not_fsdps,
                    mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
                    reshard_after_forward=STRATEGIES[strategy].reshard_after_forward)
    units = [(name, unit) for name, unit in sharding_units(model, wrap_policy, min_wrap_params)
             if not not_fsdps.issuperset(unit.parameters())]
    for _, unit in units: fully_shard(unit, **settings)
    fully_shard(model, **settings | dict(reshard_after_forward=False))
    if on_host.frozen and not on_host.trained: keep_trained_on_device(model)
    modules = [unit for _, unit in units]
    apply_backward_prefetch(model, needed_in_backward(model, modules), backward_prefetch)
    if forward_prefetch: apply_forward_prefetch(model, modules)
    if gather_once: keep_gathered(model)
    return [name for name, _ in units]


def mesh_device(mesh) -> torch.device:
    """This rank's device of a mesh."""
    return torch.device(mesh.device_type, torch.cuda.current_device()) if (
        mesh.device_type == "cuda") else torch.device(mesh.device_type)


def check_storage(model: nn.Module):
    """Refuse bitsandbytes 4-bit weights whose storage FSDP would gather in a wrong way.

    Raises ValueError: quant_storage must be the dtype of the model's other weights.
    """
    from bitsandbytes.nn import Params4bit
    packed = {p.dtype for p in model.parameters() if isinstance(p, Params4bit)}
    if packed and not all(dtype.is_floating_point for dtype in packed):
        raise ValueError("bitsandbytes weights are stored as integers, which FSDP can't shard with "
                         "the rest; load with BitsAndBytesConfig(bnb_4bit_quant_storage=<the "
                         "model's dtype>)")


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP owns the model's parameters."""
    return isinstance(model, FSDPModule)


def set_gradient_sync(model: nn.Module, sync: bool):
    """Whether the next backward reduces gradients over ranks; all but a step's last may skip it."""
    if is_sharded(model): model.set_requires_gradient_sync(sync)
    elif hasattr(model, "gradient_reducer"): model.gradient_reducer.enabled = sync


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Within it, no backward of a model that is not sharded meets other ranks."""
    reducer = getattr(model, "gradient_reducer", None)
    was = reducer and reducer.enabled
    if reducer: reducer.enabled = False
    try:
        yield
    finally:
        if reducer: reducer.enabled = was


def reduce_gradients(model: nn.Module):
    """What the end of a backward does in ddp, where `set_gradient_sync` asks for it."""
    reducer = getattr(model, "gradient_reducer", None)
    if reducer and reducer.enabled: reducer.reduce()


# ---- host memory -------------------------------------------------------------------------------

@dataclass(frozen=True)
class OnHost:
    """Which weights' shards wait in host memory between uses."""
    frozen: bool = False      # and all that FSDP owns, but for:
    trained: bool = False     # with their gradients and optimizer states
    vocabulary: bool = False  # a frozen embedding and head

    def policy(self, device_type: str) -> OffloadPolicy:
        """As FSDP takes it."""
        return CPUOffloadPolicy(pin_memory=device_type == "cuda") if self.frozen else OffloadPolicy()


def parameter_device(model: nn.Module, device: torch.device, on_host: OnHost
                     ) -> Callable[[nn.Parameter], torch.device]:
    """Where each parameter's shard lives, as a function of the parameter."""
    by_rows = set(vocabulary_weights(model))

    def place(p: nn.Parameter) -> torch.device:
        off = (on_host.vocabulary if p in by_rows else on_host.trained if p.requires_grad
               else on_host.frozen)
        return torch.device("cpu") if off else device
    return place


def keep_trained_on_device(model: nn.Module):
    """Of an offloaded model, leave trained weights on their device, with all that belongs to them.

    FSDP2 knows one policy per group but keeps it per parameter. A group that is said to be offloaded
    refuses parameters that are not, so its own policy is taken off.
    """
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None: continue
        group.offload_policy = OffloadPolicy()
        for p in group.fsdp_params:
            if p.sharded_param.requires_grad: p.offload_to_cpu = p.pin_memory = False
