"""What is split over the ranks, when it is gathered, and how gradients are reduced.

The only importer of torch.distributed.fsdp: FSDP2's `fully_shard` for every strategy that shards,
and one all-reduce of the trained weights' gradients for ddp, where frozen weights are left alone.

No group has a `param_dtype`: FSDP would cast the fp32 scales of quantized weights to it, and NaN
follows. Packed bytes, scales and adapters travel as stored; the ops cast what they multiply.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_leaves

from ..dist import hybrid_mesh, ranks_from_env, resolve_shard_group_size, shard_mesh
from ..memory.streaming import apply_streaming
from ..memory.vocabulary import apply_vocabulary_lookup, vocabulary_weights
from ..model.blocks import attention_and_mlp, decoder_blocks, is_tied, output_head, own_weights
from ..model.experts import StackedExperts
from .prefetch import apply_backward_prefetch, apply_forward_prefetch, keep_gathered


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
                              "weights are gathered once per step and freed after backward"),
    "full_shard": Strategy("shard", True, "FULL_SHARD",
                           "weights are gathered for each forward and backward of a block"),
    "hybrid_shard_grad_op": Strategy("hybrid", False, "_HYBRID_SHARD_ZERO2",
                                     "shard_grad_op in a group, replicas of groups"),
    "hybrid_full_shard": Strategy("hybrid", True, "HYBRID_SHARD",
                                  "full_shard in a group, replicas of groups"),
}

WrapPolicy = str | Callable[[nn.Module], bool]


def make_mesh(strategy: str, device: torch.device, shard_group_size: int = -1):
    """The device mesh of a strategy; None where weights are only replicated."""
    kind = STRATEGIES[strategy].mesh
    if kind == "replicate": return None
    if kind == "shard": return shard_mesh(device)
    size = resolve_shard_group_size(shard_group_size, ranks_from_env(), strategy)
    return hybrid_mesh(device, size)


def sharding_units(model: nn.Module, policy: WrapPolicy = "block", min_params: int = 100_000_000
                   ) -> list[tuple[str, nn.Module]]:
    """The modules that are gathered together, innermost first; what is left joins the root.

    `policy` is "block", "attention_mlp", "min_params", or a function that is true for each unit;
    `gatherable` corrects a choice that could not be gathered alone. Raises ValueError if a policy of
    the caller's picks nothing.
    """
    if policy == "block":
        chosen = decoder_blocks(model)
    elif policy == "attention_mlp":
        chosen = [m for block in decoder_blocks(model) for m in (*attention_and_mlp(block), block)]
    elif policy == "min_params":
        chosen = smallest_modules_above(model, min_params)
    else:
        chosen = [m for _, m in model.named_modules() if m is not model and policy(m)]
        if not chosen: raise ValueError("the wrap policy is true for no module of the model")
    names = {id(m): name for name, m in model.named_modules()}
    embedding = separate_embedding(model)
    if embedding is not None and embedding not in chosen: chosen = [embedding, *chosen]
    chosen = gatherable(model, chosen)
    return sorted(((names[id(m)], m) for m in chosen), key=lambda unit: -unit[0].count("."))


def gatherable(model: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    """The chosen modules, without those whose weights are used while they are not gathered.

    A unit is whole only inside its own forward. An adapted layer, and experts, read the weights of
    their parts, so a part stands for them; the root's loss reads the head's weight; and a weight
    shared with a module outside of the unit (a tied head) would be split from it. The last two join
    the root.
    """
    layer_of = {id(part): layer for layer in model.modules()
                if isinstance(layer, (BaseTunerLayer, StackedExperts)) for part in layer.modules()}
    chosen = [layer_of.get(id(m), m) for m in chosen]
    owners = owners_of_shared_weights(model)
    head = output_head(model)
    return [m for m in dict.fromkeys(chosen)
            if m is not head and not any(splits(m, group) for group in owners)]


def owners_of_shared_weights(model: nn.Module) -> list[set[nn.Module]]:
    """For each parameter that several modules hold, those modules."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False): owners.setdefault(id(p), set()).add(module)
    return [group for group in owners.values() if len(group) > 1]


def splits(unit: nn.Module, owners: set[nn.Module]) -> bool:
    """True if some of `owners` are inside `unit` and some outside."""
    return 0 < len(owners & set(unit.modules())) < len(owners)


def separate_embedding(model: nn.Module) -> nn.Module | None:
    """The input embedding as a unit of its own, unless its weight is the head's too."""
    if is_tied(model): return None
    return model.get_input_embeddings()


def smallest_modules_above(module: nn.Module, min_params: int) -> list[nn.Module]:
    """Innermost modules of at least `min_params` parameters, not counting units inside them."""
    found: list[nn.Module] = []

    def remaining(m: nn.Module) -> int:
        count = own_weights(m) + sum(remaining(child) for child in m.children())
        if count < min_params or m is module or isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            return count
        found.append(m)
        return 0
    remaining(module)
    return found


def apply_sharding(model: nn.Module, strategy: str = "full_shard", mesh=None, *,
                   wrap_policy: WrapPolicy = "block", min_wrap_params: int = 100_000_000,
                   on_host: OnHost | None = None, backward_prefetch: str = "backward_pre",
                   forward_prefetch: bool = False, gather_once: bool = False) -> list[str]:
    """Shard the model in place over `mesh` (`make_mesh`) and return the names of the units made.

    Works on the meta device, before any weight exists, and on a loaded model: ours, or one built
    with transformers, bitsandbytes 4-bit and PEFT. With one rank and no offload there is nothing to
    split, and the model stays as it is. A frozen embedding and head are no units: each rank keeps
    its rows of them (vocabulary.py).
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


def needed_in_backward(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units from the first with trained weights on: no gradient goes further back.

    A frozen embedding is left out, and so are the blocks of the base before Llama-Pro's first new one.
    """
    chosen = set(units)
    order = [m for m in model.modules() if m in chosen]
    trained = [any(p.requires_grad for p in m.parameters()) for m in order]
    needed = set(order[trained.index(True):] if True in trained else ())
    return [unit for unit in units if unit in needed]


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
    set_gradient_sync(model, False)
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


# ---- ddp: reduce the gradients of trained weights after each backward --------------------------

BUCKET_BYTES = 128 * 2**20


class GradientReducer:
    """Averages the trained weights' gradients over all ranks at the end of each backward, as DDP.

    The root's outputs carry a hook that asks the engine for a call when the backward is done;
    parameters are looked up in the first one, since loading replaces those that were on the meta device.
    """

    def __init__(self, model: nn.Module):
        self.model, self.enabled, self.queued = model, True, False
        self.trained: list[nn.Parameter] = []
        model.register_forward_hook(self.watch)

    def watch(self, module, args, output):
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad: leaf.register_hook(self.queue)

    def queue(self, _):
        if self.queued or not self.enabled: return
        self.queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.reduce)

    def reduce(self):
        self.queued = False
        self.trained = self.trained or [p for p in self.model.parameters() if p.requires_grad]
        for p in self.trained:  # a missing gradient counts as zero
            if p.grad is None: p.grad = torch.zeros_like(p)
        if dist.get_world_size() == 1: return
        for bucket in buckets(self.trained):
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([p.numel() for p in bucket])
            torch._foreach_copy_([p.grad for p in bucket],
                                 [part.view_as(p) for p, part in zip(bucket, parts, strict=True)])


def buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups of one dtype and about BUCKET_BYTES."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        if not groups or size > BUCKET_BYTES or groups[-1][0].dtype != p.dtype:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.numel() * p.element_size()
    return groups
