"""Frozen embeddings and a head that no rank holds whole.

Each is 2 GB in a model of 128k tokens and 8192 features. FSDP would gather the embedding at the
start of every forward, for a few thousand of its rows, and the head, left to the root, for the whole
step. Here each rank keeps its rows of both: of the embedding, only the rows that tokens need travel
(all of them where that is less); the head is gathered for the loss and let go. Shards may be in host memory.

Shapes: B batch, T tokens, N = B T, V vocabulary, D features, n ranks that share one copy.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..choices.strategies import PIECE_BYTES
from ..dist import all_gather_rows, full_tensor, local_rows, max_over_ranks, reduce_scatter_rows
from ..model.blocks import base_model, output_head

_OF_BLOCKS = "embed_tokens_per_layer"

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None


def _vocabulary_layers(model: nn.Module) -> list[nn.Module]:
    """Frozen, plain embeddings and the head; of the first and the head none if just one of a tied pair is.

    Gemma 3n's and 4's second embedding has a part for each block, and is several times the size of the first.
    """
    base = base_model(model)
    if not hasattr(base, "get_input_embeddings"):
        return []  # a plain module
    embedding, head = base.get_input_embeddings(), output_head(model)
    layers = [
        m
        for m, kind in ((embedding, nn.Embedding), (head, nn.Linear))
        if isinstance(m, kind) and not m.weight.requires_grad
    ]
    shared = getattr(head, "weight", None) is getattr(embedding, "weight", None)
    if shared and len(layers) < 2:
        layers = []
    of_blocks = getattr(base.get_decoder(), _OF_BLOCKS, None)
    if isinstance(of_blocks, nn.Embedding) and not of_blocks.weight.requires_grad:
        layers.append(of_blocks)
    return layers


def apply_vocab_parallel(model: nn.Module, mesh=None) -> list[nn.Parameter]:
    """Use frozen embeddings and the head by rows, sharded over `mesh` if given, in place.

    Works on the meta device and on a loaded model; every rank must then run the forward equally
    often. Returns their weights, which are no business of FSDP's.
    """
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for layer in _vocabulary_layers(model):
        weight = layer.weight
        if mesh is not None and weight not in sharded:
            sharded[weight] = _sharded_rows(weight, mesh)
        layer.weight = sharded.get(weight, weight)
        use = _embedded if isinstance(layer, nn.Embedding) else _projected
        layer.forward = partial(use, layer, layer.forward)
    return vocab_parallel_weights(model)


def vocab_parallel_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of frozen embeddings and the head."""
    return [layer.weight for layer in _vocabulary_layers(model)]


def _sharded_rows(weight: nn.Parameter, mesh) -> nn.Parameter:
    """A weight whose rows are split over the last dimension of a mesh, as FSDP splits them."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    whole = distribute_tensor(weight.data, mesh, placements, src_data_rank=None)
    if not whole.is_meta:
        whole = whole.clone()  # or each shard would keep the whole alive
    return nn.Parameter(whole, requires_grad=False)


def _embedded(layer: nn.Embedding, forward, ids: Tensor) -> Tensor:
    """The embedding's output (B, T, D) for ids (B, T)."""
    rows = _looked_up(ids.flatten(), layer.weight)
    if type(layer) is nn.Embedding:
        return rows.view(*ids.shape, -1)
    # A subclass may scale what it finds: let it find the rows in their order.
    weight = layer.weight
    try:
        layer.weight = nn.Parameter(rows, requires_grad=False)
        return forward(torch.arange(len(rows), device=ids.device).view_as(ids))
    finally:
        layer.weight = weight


def _projected(layer: nn.Linear, forward, hidden: Tensor) -> Tensor:
    """The head's logits, where they are asked for whole; in fp32 if the head is (`cast_lm_head_to_fp32`)."""
    weight = gathered_weight(layer.weight, hidden.device)
    return nn.functional.linear(hidden.to(weight.dtype), weight, layer.bias)


def _check_frozen(weight: Tensor):
    """Raises ValueError for a weight that is trained since: no gradient comes this way."""
    if weight.requires_grad:
        raise ValueError(
            "the embedding or the head was frozen when the model was sharded, and would get no gradient; "
            "call requires_grad_(True) before apply_sharding"
        )


@torch.no_grad()
def gathered_weight(weight: Tensor, device: torch.device) -> Tensor:
    """A weight (V, D) on `device`, gathered if it is sharded; every rank must call it."""
    if isinstance(weight, DTensor) or weight.device != device:
        _check_frozen(weight)
    if not isinstance(weight, DTensor):
        return weight.to(device, non_blocking=True)
    local = weight.to_local().to(device, non_blocking=True)
    whole = DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return full_tensor(whole)


@torch.no_grad()
def _looked_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows (N, D) of a weight for ids (N,), which differ from rank to rank, N among them.

    Each rank finds its rows of all ranks' ids, and sums of those and zeros go back, exactly. That moves
    n N rows, so where the vocabulary has fewer, as on many ranks, the weight is gathered for a moment.
    """
    _check_frozen(weight)
    local, first, _ = local_rows(weight)
    group = weight.device_mesh.get_group(-1) if isinstance(weight, DTensor) else None
    ranks = group.size() if group else 1
    in_pieces = local.device != ids.device
    if ranks == 1:
        return own_rows(ids, local, 0, in_pieces)
    (longest,) = max_over_ranks(len(ids))  # through host memory: the GPU is not waited for
    if ranks * longest >= weight.shape[0]:
        return nn.functional.embedding(ids, gathered_weight(weight, ids.device))
    padded = nn.functional.pad(ids, (0, longest - len(ids)))
    everyones = all_gather_rows(padded, group).view(ranks, -1)
    step = max(1, PIECE_BYTES // (ranks * local.shape[1] * local.element_size()))
    found = [
        reduce_scatter_rows(own_rows(part.flatten(), local, first, in_pieces), group)
        for part in everyones.split(step, dim=1)
    ]
    return torch.cat(found)[: len(ids)]


def own_rows(ids: Tensor, local: Tensor, first: int, in_pieces: bool) -> Tensor:
    """Rows (N, D) for ids (N,) that are among `local`, the weight's rows from `first`; else zeros.

    Of rows in host memory the GPU reads those, or all pass through it in pieces where it can't: so the
    host need not wait for the ids.
    """
    if in_pieces and _can_read_rows(ids, local):
        return read_rows(ids, local, first)
    found = local.new_zeros(len(ids), local.shape[1], device=ids.device)
    row_bytes = local.shape[1] * local.element_size()
    size = max(1, PIECE_BYTES // row_bytes if in_pieces else len(local))
    for start in range(0, len(local), size):
        piece = local[start : start + size].to(ids.device, non_blocking=True)
        index = ids - (first + start)
        missing = (index < 0) | (index >= len(piece))
        rows = nn.functional.embedding(index.clamp(0, len(piece) - 1), piece)
        found += rows.masked_fill_(missing[:, None], 0)
    return found


# ---- rows in page-locked host memory -----------------------------------------------------------

# Page-locked memory has an address on the GPU too, so a kernel can load from it, over PCIe: only the
# rows that it needs. A table of 128k rows of 8 KB is 1 GB, and 16,384 tokens need 134 MB of it at most;
# copied in whole it takes 20 ms.

if triton:

    @triton.jit
    def _read_rows(ids_ptr, table_ptr, out_ptr, first, V, D, BLOCK: tl.constexpr):
        place = tl.program_id(0).to(tl.int64)
        row = tl.load(ids_ptr + place) - first
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = (row >= 0) & (row < V) & (columns < D)
        found = tl.load(table_ptr + row * D + columns, mask=there, other=0.0)
        tl.store(out_ptr + place * D + columns, found, mask=columns < D)


def _can_read_rows(ids: Tensor, table: Tensor) -> bool:
    """Whether `read_rows` takes a table for ids on this device."""
    return triton is not None and ids.is_cuda and table.is_contiguous() and table.is_pinned()


def read_rows(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows (N, D) of `table` (V, D) for ids (N,) of a vocabulary in which it begins at `first`.

    Zeros for ids that are not among its rows.
    """
    out = table.new_empty(len(ids), table.shape[1], device=ids.device)
    block = min(4096, triton.next_power_of_2(table.shape[1]))
    _read_rows[(len(ids), triton.cdiv(table.shape[1], block))](
        ids, table, out, first, *table.shape, block, num_warps=4
    )
    return out
