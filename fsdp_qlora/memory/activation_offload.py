"""What blocks keep for their backward waits for it in host memory: inputs, and attention's outputs.

Under recompute_all the input of each block, (B, T, D), is all that is kept; over 80 blocks of a 70B
model at 4,096 tokens that is 5 GiB. Here it leaves the GPU while its block runs, on a stream of its
own, and comes back while the block after it runs backward, so that two are on the GPU at a time.

Under keep_attention attention's output, (B, T, H, Dh), is kept too, and is as large. A compiled block
says what it keeps when it has run, so this leaves while the next block runs, and comes back along with
the input: again two are on the GPU at a time. It moves where the copies are hidden, which the plan
decides (`estimate.resolve`): they grow with the tokens, attention with their square. Blocks under
keep_linears leave it on the GPU: it is a tenth of what they keep in Llama 3.1 8B, and all of that is
more than the link carries while a block of short rows runs.

No weight is moved, nor anything else that a block is given: an unsharded weight's memory is emptied and
filled again, and what blocks share is there anyway. The last block keeps all it has on the GPU, as its
backward comes first. The copies are exact, so gradients are too.

The hooks are torch's: https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..choices import POLICIES
from ..model.blocks import decoder_blocks
from .checkpointing_policy import kept_output_hooks
from .pinned_memory import aligned, host_bytes, typed

_SMALLER = 1 / 8  # of a block's largest kept output: a log-sum-exp, or a seed, which stay
_SMALL = 1 / 128  # of a block's input, where it keeps nothing else


def apply_activation_offload(
    model: nn.Module, policies: list[str], attention: bool = True
) -> nn.Module:
    """Keep what decoder blocks keep in host memory between forward and backward, in place.

    `policies` are the blocks' activation policies; a keep_all block keeps all it has where it is.
    attention: whether the outputs of keep_attention blocks leave, beside inputs.
    Comes after the policies and after compile, whose graphs it stays outside of.
    """
    blocks = decoder_blocks(model)
    store = _HostStore(Slots(len(blocks) - 1))
    for block, policy in zip(blocks[:-1], policies, strict=False):
        if POLICIES[policy].recomputes:
            moves = attention and POLICIES[policy].keeps_attention_alone
            outputs = _KeptOutputs(block, store) if moves else None
            block.forward = partial(offloaded, block.forward, store, outputs)
    blocks[-1].forward = partial(_settled, blocks[-1].forward, store)
    return model


def offloaded(
    forward, store: _HostStore, outputs: _KeptOutputs | None, hidden: Tensor, *args, **kwargs
):
    """`forward(hidden, ...)` whose input, and kept outputs, are in host memory until backward."""
    store.settle()
    if not torch.is_grad_enabled() or not hidden.is_contiguous():
        return forward(hidden, *args, **kwargs)
    # Now, since a compiled block says what it keeps when it has run: the copy would hold up the next.
    group = store.new_group()
    stored, place = store.put(hidden, group), (hidden.data_ptr(), hidden.numel())

    def pack(saved: Tensor):  # autograd keeps it, so it does not keep `hidden`
        if (saved.data_ptr(), saved.numel()) != place:
            return saved
        stored.users += 1
        return stored, saved.shape

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        stored, shape = packed
        return stored.fetch().view(shape)

    if outputs is None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(hidden, *args, **kwargs)
    return outputs.moved(forward, group, (pack, unpack), hidden, *args, **kwargs)


def _settled(forward, store: _HostStore, *args, **kwargs):
    """`forward` after which all that leaves the GPU is gone."""
    store.settle()
    out = forward(*args, **kwargs)
    store.settle()
    return out


class _KeptOutputs:
    """What a block's policy keeps besides its input, and its places in host memory.

    Hooks see all that a compiled block saves, and what eager checkpointing keeps. Of it, outputs of the
    policy's ops are what no parameter, buffer or argument of the block shares its memory with, and
    large. Each is a tensor of its own, and has slots of its own: blocks differ in heads and tiles.
    """

    def __init__(self, block: nn.Module, store: _HostStore):
        self.block, self.store = block, store
        self.slots: list[Slots] = []

    def moved(self, forward, group: Group, of_input, hidden: Tensor, *args, **kwargs):
        """`forward(hidden, ...)`, after which the outputs that it keeps begin to leave."""
        pack_input, unpack_input = of_input
        seen: list[_Seen] = []

        def pack(saved: Tensor):
            packed = pack_input(saved)
            if packed is not saved or not _is_whole(saved):
                return packed
            seen.append(_Seen(saved))
            return seen[-1]

        def unpack(packed):
            return packed.tensor() if isinstance(packed, _Seen) else unpack_input(packed)

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
            kept_output_hooks(pack, unpack),
        ):
            out = forward(hidden, *args, **kwargs)
        given = tree_leaves((hidden, args, kwargs, out))
        self.move(_large(self.own(seen, given), hidden.nbytes), group)
        seen.clear()  # `pack` may live as long as the graph
        return out

    def own(self, seen: list[_Seen], given: list) -> dict[int, list[_Seen]]:
        """What the block made itself, by its place in memory; the same may be saved twice."""
        others = (*self.block.parameters(), *self.block.buffers(), *given)
        # A shard has no memory that a product could save: units inside of a block are freed by now.
        here = (t for t in others if isinstance(t, Tensor) and not isinstance(t, DTensor))
        taken = {_place(t) for t in here}
        found: dict[int, list[_Seen]] = {}
        for one in seen:
            if (place := _place(one.saved)) not in taken:
                found.setdefault(place, []).append(one)
        return found

    def move(self, outputs: Iterable[list[_Seen]], group: Group):
        """Start to copy outputs to the host, each to the next of this block's slots."""
        for number, same in enumerate(outputs):
            if number == len(self.slots):
                self.slots.append(Slots(1))
            stored = self.store.put(_flat(same[0].saved), group, self.slots[number], late=True)
            for one in same:
                one.leave(stored)


class _Seen:
    """A tensor that is kept: itself, or where it is in host memory."""

    def __init__(self, saved: Tensor):
        self.saved: Tensor | None = saved
        self.shape, self.stride = saved.shape, saved.stride()
        self.stored: OffloadedTensor | None = None

    def leave(self, stored: OffloadedTensor):
        self.saved, self.stored = None, stored
        stored.users += 1

    def tensor(self) -> Tensor:
        """It, as it was; fetched if it has left."""
        if self.stored is None:
            return self.saved
        return self.stored.fetch().as_strided(self.shape, self.stride)


def _large(found: dict[int, list[_Seen]], input_bytes: int) -> list[list[_Seen]]:
    """Those that are worth a copy."""
    largest = max((same[0].saved.nbytes for same in found.values()), default=0)
    least = max(_SMALLER * largest, _SMALL * input_bytes)
    return [same for same in found.values() if same[0].saved.nbytes > least]


def _is_whole(saved: Tensor) -> bool:
    """Whether a tensor is floating-point, no weight, and all that is in its memory, in whatever order."""
    if (
        isinstance(saved, nn.Parameter)
        or not saved.is_floating_point()
        or saved.untyped_storage().nbytes() != saved.nbytes
    ):
        return False
    return torch.empty_like(saved, device="meta").stride() == saved.stride()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(whole: Tensor) -> Tensor:
    """A whole tensor's values as they lie in memory, which one copy takes."""
    return whole.detach().as_strided((whole.numel(),), (1,))


class _HostStore:
    """The slots of block inputs, what is on its way to the host, and the stream that copies.

    A slot is free again when autograd has let go of what is in it, so a forward without a backward,
    or two forwards before one, are right too; they take more slots.
    """

    def __init__(self, inputs: Slots):
        self.inputs = inputs
        self.copies: Copies | None = None
        # Let go of at the start of the next block, and of the one after.
        self.leaving: list[list[tuple[Tensor, torch.Event | None]]] = [[], []]
        self.last = lambda: None  # the newest group

    def new_group(self) -> Group:
        """A group for one block's forward."""
        group = Group(self.last())
        self.last = weakref.ref(group)
        return group

    def put(
        self, tensor: Tensor, group: Group, slots: Slots | None = None, late: bool = False
    ) -> OffloadedTensor:
        """Start to copy a tensor to the host; it stays on the GPU until `settle`, or the next if late."""
        if self.copies is None:
            self.copies = Copies(tensor.device)
        stored = OffloadedTensor(self.copies, slots or self.inputs, tensor, group)
        self.leaving[late].append((tensor, self.copies.start(stored.on_host, tensor)))
        return stored

    def settle(self):
        """Let go of the tensors that were to leave by now; the GPU waits until their copies are done."""
        for _, done in self.leaving[0]:
            self.copies.wait(done)
        self.leaving = [self.leaving[1], []]


class Slots:
    """Equal pieces of host memory for tensors that come and go; `count` in each region."""

    def __init__(self, count: int):
        self.count, self.bytes = count, 0
        self.free: list[Tensor] = []

    def take(self, size: int, pinned: bool) -> Tensor:
        """A free slot of at least `size` bytes."""
        if size > self.bytes:  # slots in use keep the older region until they are let go of
            self.bytes = aligned(max(size, int(1.5 * self.bytes)))
            self.free = []
        if not self.free:
            self.free = list(host_bytes(self.count * self.bytes, pinned).split(self.bytes))
        return self.free.pop()

    def give_back(self, slot: Tensor):
        """Take a slot for others, unless larger ones have replaced it."""
        if len(slot) == self.bytes:
            self.free.append(slot)


class Group:
    """What one block's forward has in host memory; the group before it is fetched along with it."""

    def __init__(self, before: Group | None):
        self.before = weakref.ref(before) if before else lambda: None
        self.members: list[weakref.ref[OffloadedTensor]] = []
        self.is_coming = False

    def start_fetch(self):
        """Begin to copy all of it back, once."""
        if self.is_coming:
            return
        self.is_coming = True
        for member in self.members:
            if stored := member():
                stored.start_fetch()


class OffloadedTensor:
    """A tensor in a slot of host memory."""

    def __init__(self, copies: Copies, slots: Slots, tensor: Tensor, group: Group):
        self.copies, self.slots, self.group, self.device = copies, slots, group, tensor.device
        self.slot = slots.take(tensor.nbytes, copies.on_gpu)
        self.on_host = typed(self.slot, tensor.shape, tensor.dtype)
        self.coming: tuple[Tensor, torch.Event | None] | None = None
        self.users, self.asked = 0, 0  # saved tensors that it is, and how many were fetched
        group.members.append(weakref.ref(self))

    def start_fetch(self):
        """Begin to copy it back."""
        tensor = torch.empty_like(self.on_host, device=self.device)
        self.coming = tensor, self.copies.start(tensor, self.on_host)

    def fetch(self) -> Tensor:
        """It on its device again; backward goes from the last block to the first."""
        self.group.start_fetch()
        if before := self.group.before():
            before.start_fetch()
        if self.coming is None:  # all have had it: a graph that was retained
            self.start_fetch()
        tensor, done = self.coming
        self.copies.wait(done)
        self.asked += 1
        if self.asked % self.users == 0:
            self.coming = None  # whoever asked lets go of it
        return tensor

    def __del__(self):
        if self.coming:
            self.copies.wait(self.coming[1])  # it may never have been used
        self.slots.give_back(self.slot)


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
