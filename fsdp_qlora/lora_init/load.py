"""Adapters that begin from their weights (from_weights.py), and the load of those weights.

An SVD needs a whole W, so each rank reads the weights of other layers whole, one at a time, and tells
the others what it found; then every rank reads its own rows and keeps them without what was taken out.
A run that goes on from a checkpoint takes that from there, and so has the same base, bit by bit.

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn

from ..adapters import LoraLinear
from ..adapters.peft_names import name_in_whole
from ..dist import from_rank, local_rows, print_main, ranks_from_env
from ..loading.prequantized import FourBitCheckpoint
from ..loading.stream import WeightSlice, checkpoint_key, place, rank_pieces
from ..loading.weight_files import Checkpoint, hash_seed
from ..model.blocks import base_model, is_tied, output_head
from ..quantization.formats import dequantize_rows, quantize_rows
from .from_weights import FirstValues, LoraInit, Taken, first_values, low_rank_rows

# A tensor of the adapter in a checkpoint, by its parameter's name.
SavedRows = Callable[[str], Tensor]


def check_init(model: nn.Module, source: Checkpoint, start: LoraInit):
    """Refuse a model or checkpoint that adapters can't begin from; needs no process group."""
    if not start.from_weights:
        return
    flag = f"--init_lora_weights {start.kind}"
    if isinstance(source, FourBitCheckpoint):
        raise ValueError(
            f"{flag} needs the weights as they were before rounding, and {source.folder} "
            "has them in 4 bits; give the 16-bit model it was made from"
        )
    for name, layer in _adapted_layers(model):
        rank, shape = layer.r["default"], (layer.out_features, layer.in_features)
        if rank > min(shape):
            raise ValueError(
                f"{flag}: {name} of shape {shape} has no {rank} directions; use a "
                f"--lora_rank, or --lora_rank_pattern, of {min(shape)} or less"
            )
        if start.changes_base and layer is output_head(model) and is_tied(base_model(model)):
            raise ValueError(
                f"{flag} changes the weights it adapts, and this model's head is its "
                "embedding too; leave the head out of --lora_target_modules"
            )


def _adapted_layers(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    """The adapted layers with their names, in the model's order."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLinear)]


def init_from_weights(
    model: nn.Module,
    source: Checkpoint,
    device: torch.device,
    start: LoraInit,
    seed: int = 0,
    saved: SavedRows | None = None,
) -> set[str]:
    """Give adapters their first values from the weights, and frozen weights what is left of them.

    Every rank must call it. `saved` reads the checkpoint that a run goes on from, so that nothing is
    searched for again. Returns the checkpoint's names of the weights that are in the model now.
    """
    began, pieces, filled = perf_counter(), {p.key: p for p in rank_pieces(model)}, set()
    values = (
        _found_values(model, source, device, start, seed)
        if saved is None
        else _saved_values(model, start, saved)
    )
    with torch.no_grad():
        for name, layer, first in values:
            set_adapter(layer, first)
            if first.taken is None:
                continue
            piece = pieces[key := checkpoint_key(f"{name}.base_layer.weight")]
            _fill_base(piece, source, first.taken, layer.scaling["default"], device)
            layer.taken = Taken(
                *(
                    own_rows(t, p)
                    for t, p in zip(
                        (first.taken.a, first.taken.b), _parameters_of(layer), strict=True
                    )
                )
            )
            filled.add(key)
    print_main(
        f"--init_lora_weights {start.kind}: {len(_adapted_layers(model))} adapters "
        f"{'found in their weights' if saved is None else 'taken from the checkpoint'} in "
        f"{perf_counter() - began:.1f} s"
    )
    return filled


def _found_values(
    model: nn.Module, source: Checkpoint, device: torch.device, start: LoraInit, seed: int
) -> Iterator[tuple[str, LoraLinear, FirstValues]]:
    """Each layer with its first values; every rank finds those of other layers at the same time."""
    layers, ranks = _adapted_layers(model), ranks_from_env()
    for begin in range(0, len(layers), ranks.world_size):
        group = layers[begin : begin + ranks.world_size]
        mine = None
        if ranks.rank < len(group):
            mine = _values_of(*group[ranks.rank], source, device, start, seed)
        for owner, (name, layer) in enumerate(group):
            yield name, layer, _shared(mine, layer, owner, device, start)


def _values_of(
    name: str,
    layer: LoraLinear,
    source: Checkpoint,
    device: torch.device,
    start: LoraInit,
    seed: int,
) -> FirstValues:
    """A layer's first values, from all of its W."""
    base, a = layer.base_layer, _parameters_of(layer)[0]
    whole = WeightSlice(
        checkpoint_key(f"{name}.base_layer.weight"),
        0,
        base.out_features,
        base.in_features,
        torch.empty(0),
    )

    def rounded(weight: Tensor) -> Tensor:
        form = quantize_rows(weight, base.quant_type, base.absmax_dtype)
        return dequantize_rows(*form, base.in_features, base.quant_type, torch.float32)

    return first_values(
        numbers(whole, source, device),
        start,
        layer.r["default"],
        layer.scaling["default"],
        a.dtype,
        rounded,
        hash_seed(f"{seed}:{name}"),
    )


def numbers(piece: WeightSlice, source: Checkpoint, device: torch.device) -> Tensor:
    """Rows of a weight as they are in the checkpoint, in fp32."""
    read = [source.read(span).to(device) for span in source.spans(piece)]
    return source.values(replace(piece, module=None), read)[0].to(device).float()


def _shared(
    mine: FirstValues | None, layer: LoraLinear, owner: int, device: torch.device, start: LoraInit
) -> FirstValues:
    """What rank `owner` found for a layer, on every rank."""

    def told(pair: FirstValues | Taken | None) -> tuple[Tensor, ...]:
        tensors = (pair.a, pair.b) if pair else (None, None)
        return tuple(
            from_rank(owner, tensor, tuple(p.shape), p.dtype, device)
            for tensor, p in zip(tensors, _parameters_of(layer), strict=True)
        )

    a, b = told(mine)
    if not start.changes_base:
        return FirstValues(a, b)
    if start.kind != "loftq":
        return FirstValues(a, b, Taken(a, b))
    return FirstValues(a, b, Taken(*told(mine and mine.taken)))


def _saved_values(
    model: nn.Module, start: LoraInit, saved: SavedRows
) -> Iterator[tuple[str, LoraLinear, FirstValues]]:
    """Each layer with its adapter in a checkpoint, and what its base lacks (`for_original_base`)."""
    for name, layer in _adapted_layers(model):
        names = (f"{name}.lora_{part}.default.weight" for part in "AB")
        a, b = (saved(name_in_whole(model, name)) for name in names)
        r = layer.r["default"]
        taken = Taken(a[r:].contiguous(), -b[:, r:].contiguous()) if start.changes_base else None
        yield name, layer, FirstValues(a[:r], b[:, :r], taken)


def _parameters_of(layer: LoraLinear) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def set_adapter(layer: LoraLinear, first: FirstValues):
    """Give A and B their values, each rank its rows."""
    for parameter, whole in zip(_parameters_of(layer), (first.a, first.b), strict=True):
        local, begin, end = local_rows(parameter)
        local.copy_(whole[begin:end])


def own_rows(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's rows of a tensor that is split as a parameter is, on the host."""
    _, begin, end = local_rows(parameter)
    return whole[begin:end].cpu().clone()


def _fill_base(
    whole: WeightSlice, source: Checkpoint, taken: Taken, scaling: float, device: torch.device
):
    """Read this rank's rows of a weight and keep them without what was taken out."""
    a, b = taken.a.to(device), taken.b.to(device)
    for piece in whole.cut():
        rest = numbers(piece, source, device)
        rest -= low_rank_rows(a, b, scaling, piece.start, piece.stop)
        place(piece, (rest,))
