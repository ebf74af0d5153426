"""On one GPU, the frozen weights of blocks stream from host memory, a block ahead of their use.

FSDP2 at a shard size of 1 copies a unit's weights when it needs them, in the middle of the compute,
so that no transfer is hidden. Here a block's frozen weights are copied on a stream of their own while
the block before it computes, in both directions, and two blocks at most are on the GPU. FSDP keeps
what is trained.

As in FSDP, a weight on the GPU is one tensor for the whole run whose storage comes and goes: what
autograd saved of it in the forward is there again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..adapters import is_of_adapter
from ..model.blocks import decoder_blocks
from .activation_offload import Copies


def apply_streaming(model: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Let the frozen weights of the decoder blocks stream to `device`, in place.

    Works on the meta device, before weights exist. Returns those weights, which are no business of
    FSDP's; between uses they are where `materialize` puts them.
    """
    blocks, copies = decoder_blocks(model), Copies(device)
    streamed = [_StreamedBlock(block, device, copies) for block in blocks]
    for before, after in zip(streamed, streamed[1:], strict=False):
        before.next, after.previous = after, before
    for one in streamed:
        one.register()
    return [p for block in blocks for _, _, p in _frozen_parameters(block)]


def _frozen_parameters(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name, parameter) of each frozen weight of a block's base that no mesh shards."""
    for path, module in block.named_modules():
        for name, p in module._parameters.items():
            if p is None or p.requires_grad or isinstance(p, DTensor):
                continue
            if not is_of_adapter(path):  # one of several may be trained later (`set_adapter`)
                yield module, name, p


class _StreamedBlock:
    """One block's frozen weights: on the host, on their way, or on the GPU."""

    def __init__(self, block: nn.Module, device: torch.device, copies: Copies):
        self.block, self.device, self.copies = block, device, copies
        self.next: _StreamedBlock | None = None
        self.previous: _StreamedBlock | None = None
        self.weights: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.is_here, self.arrived = False, None

    def register(self):
        """Hook into the block's forward, and through its output into its backward."""
        self.block.register_forward_pre_hook(lambda *_: self.before_forward(), prepend=True)
        self.block.register_forward_hook(lambda module, args, output: self.after_forward(output))

    def before_forward(self):
        """Weights in place, the next block's on their way."""
        self.use()
        if self.next:
            self.next.load()

    def after_forward(self, output):
        """Weights away, until the gradient of the output comes."""
        self.free()
        leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for t in leaves[:1]:
            t.register_hook(self.before_backward)

    def before_backward(self, _):
        """The block after this one is done; the one before comes next."""
        if self.next:
            self.next.free()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self.free_all)
        self.use()
        if self.previous:
            self.previous.load()

    def free_all(self):
        """At the end of a backward: nobody comes after the first block."""
        one = self
        while one:
            one.free()
            one = one.previous

    def load(self):
        """Start to copy the weights to the device, once."""
        if self.is_here:
            return
        if not self.weights:
            self.weights = [*self.placed()]
        for _, name, host, here in self.weights:
            if host.requires_grad:
                raise ValueError(
                    f"a block's {name} was frozen when the model was sharded, and would get no gradient; "
                    "call requires_grad_(True) before apply_sharding"
                )
            here.untyped_storage().resize_(host.nbytes)
            with torch.autograd._unsafe_preserve_version_counter(here):
                self.arrived = self.copies.start(here.data, host.data)
        self.is_here = True

    def placed(self) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Each weight with its place on the device, which has no memory yet."""
        for module, name, host in _frozen_parameters(self.block):
            here = nn.Parameter(torch.empty_like(host, device=self.device), requires_grad=False)
            here.untyped_storage().resize_(0)
            yield module, name, host, here

    def use(self):
        """Let the block's modules have the weights on the device; what is queued next waits."""
        self.load()
        self.copies.wait(self.arrived)
        for module, name, _, here in self.weights:
            module._parameters[name] = here

    def free(self):
        """Let the modules have the weights on the host again, and the device its memory."""
        if not self.is_here:
            return
        self.copies.wait(self.arrived)
        for module, name, host, here in self.weights:
            module._parameters[name] = host
            here.untyped_storage().resize_(0)
        self.is_here, self.arrived = False, None
