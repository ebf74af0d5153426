"""Block inputs wait for their backward in host memory.

Under recompute_all the input of each block, (B, T, D), is all that is kept; over 80 blocks of a 70B
model at 4,096 tokens that is 5 GiB. Here it leaves the GPU while its block runs, on a stream of its
own, and comes back while the block after it runs backward, so that two are on the GPU at a time.

Only the input is moved: what else autograd saves, unsharded weights among it, is left alone. The
last block's input stays, as its backward comes first. The copies are exact, so gradients are too.

The hooks are torch's: https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor, nn

from ..choices import POLICIES
from ..model.blocks import decoder_blocks
from .pinned_memory import aligned, host_bytes, typed


def apply_activation_offload(model: nn.Module, policies: list[str]) -> nn.Module:
    """Keep the inputs of the decoder blocks in host memory between forward and backward, in place.

    `policies` are the blocks' activation policies; a keep_all block keeps all it has where it is.
    Comes after the policies and after compile, whose graphs it stays outside of.
    """
    blocks = decoder_blocks(model)
    store = _HostStore(slots=len(blocks) - 1)
    for block, policy in zip(blocks[:-1], policies, strict=False):
        if POLICIES[policy].recomputes:
            block.forward = partial(offloaded, block.forward, store)
    blocks[-1].forward = partial(_settled, blocks[-1].forward, store)
    return model


def offloaded(forward, store: _HostStore, hidden: Tensor, *args, **kwargs):
    """`forward(hidden, ...)` whose input is kept in host memory until backward asks for it."""
    store.settle()
    if not torch.is_grad_enabled() or not hidden.is_contiguous():
        return forward(hidden, *args, **kwargs)
    # Now, since a compiled block says what it keeps when it has run: the copy would hold up the next.
    stored, place = store.put(hidden), (hidden.data_ptr(), hidden.numel())

    def pack(saved: Tensor):  # autograd keeps it, so it does not keep `hidden`
        return (stored, saved.shape) if (saved.data_ptr(), saved.numel()) == place else saved

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        stored, shape = packed
        return stored.fetch().view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(hidden, *args, **kwargs)


def _settled(forward, store: _HostStore, *args, **kwargs):
    """`forward` after all that leaves the GPU is gone."""
    store.settle()
    return forward(*args, **kwargs)


class _HostStore:
    """Slots of host memory for block inputs, and the stream that copies to and from them.

    A slot is free again when autograd has let go of what is in it, so a forward without a backward,
    or two forwards before one, are right too; they take more slots.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.slot_bytes = 0
        self.free: list[Tensor] = []
        self.copies: Copies | None = None
        self.leaving: tuple[Tensor, torch.Event | None] | None = None
        self.last = lambda: None  # the newest that was stored

    def put(self, hidden: Tensor) -> OffloadedTensor:
        """Start to copy a tensor to the host; it stays on the GPU until `settle`."""
        if self.copies is None:
            self.copies = Copies(hidden.device)
        stored = OffloadedTensor(self, hidden, self.last())
        self.leaving = hidden, self.copies.start(stored.on_host, hidden)
        self.last = weakref.ref(stored)
        return stored

    def settle(self):
        """Let go of the tensor that is leaving; the GPU waits until its copy is done."""
        if self.leaving is None:
            return
        self.copies.wait(self.leaving[1])
        self.leaving = None

    def take_slot(self, size: int) -> Tensor:
        """A free slot of at least `size` bytes."""
        if size > self.slot_bytes:  # slots in use keep the older region until they are let go of
            self.slot_bytes = aligned(max(size, int(1.5 * self.slot_bytes)))
            self.free = []
        if not self.free:
            self.free = self.new_slots()
        return self.free.pop()

    def new_slots(self) -> list[Tensor]:
        """One more region of slots."""
        region = host_bytes(self.slots * self.slot_bytes, self.copies.on_gpu)
        return list(region.split(self.slot_bytes))

    def give_back(self, slot: Tensor):
        """Take a slot for others, unless larger ones have replaced it."""
        if len(slot) == self.slot_bytes:
            self.free.append(slot)


class OffloadedTensor:
    """A tensor in a slot of host memory; the one stored before it is fetched along with it."""

    def __init__(self, store: _HostStore, tensor: Tensor, before: OffloadedTensor | None):
        self.store, self.device = store, tensor.device
        self.slot = store.take_slot(tensor.numel() * tensor.element_size())
        self.on_host = typed(self.slot, tensor.shape, tensor.dtype)
        self.before = weakref.ref(before) if before else lambda: None
        self.coming: tuple[Tensor, torch.Event | None] | None = None

    def start_fetch(self):
        """Begin to copy it back, once."""
        if self.coming:
            return
        tensor = torch.empty_like(self.on_host, device=self.device)
        self.coming = tensor, self.store.copies.start(tensor, self.on_host)

    def fetch(self) -> Tensor:
        """It on its device again; backward goes from the last block to the first."""
        self.start_fetch()
        before = self.before()
        if before:
            before.start_fetch()
        tensor, done = self.coming
        self.store.copies.wait(done)
        return tensor

    def __del__(self):
        if self.coming:
            self.store.copies.wait(self.coming[1])  # it may never have been used
        self.store.give_back(self.slot)


class Copies:
    """Copies between host and GPU beside the GPU's other work; on the CPU, at once.

    One stream for both directions: a slot is read before it is written again.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.stream = torch.cuda.Stream(device)

    def start(self, to: Tensor, source: Tensor) -> torch.Event | None:
        """Copy after all work that is queued now, which made or still uses these tensors."""
        if not self.on_gpu:
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, done: torch.Event | None):
        """Let what is queued from now on wait for a copy; the host goes on."""
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
