"""PEFT's default: A uniform, B zero; and DoRA's magnitudes.

The values come from a seed per parameter name, so every sharding and world size starts equal.

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..adapters import LoraLinear, trainable_parameters
from ..adapters.dora import adapted_norms
from ..dist import from_main, full_tensor, local_rows
from ..quantization.formats import FrozenWeight


def init_adapters(
    model: nn.Module,
    seed: int,
    device: torch.device | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Give every adapter its values after loading: A uniform as PEFT, B zero, m the norms of W.

    The values come from a seed per parameter name, so every sharding and world size starts equal; the
    seed is rank 0's, so every rank must call it. `device` is where norms are computed, if not where W
    is: offloaded rows are on the host. names: which parameters' A and B, also frozen ones; None is the
    trained.
    """
    if dist.is_initialized():
        seed = from_main(lambda: seed)
    parameters = trainable_parameters(model)
    if names is not None:
        parameters = {n: p for n, p in model.named_parameters() if n in names}
    for name, parameter in parameters.items():
        local, start, stop = local_rows(parameter)
        with torch.no_grad():
            if ".lora_B." in name:
                local.zero_()
            elif ".lora_A." in name:
                local.copy_(initial_a(name, seed, parameter.shape)[start:stop])
    init_magnitudes(model, device)


@torch.no_grad()
def init_magnitudes(
    model: nn.Module, device: torch.device | None = None, with_adapter: bool = False
):
    """Let DoRA's m be |W|, each rank from its own rows: FSDP cuts both at the same places.

    with_adapter: |W + scaling B A|, where B is not zero; then every rank must call it.
    """
    for layer in model.modules():
        if not isinstance(layer, LoraLinear):
            continue
        for name, magnitude in layer.lora_magnitude_vector.items():
            w, a, b = FrozenWeight.of(layer.base_layer), None, None
            weight, *rows = local_rows(w.weight)
            local, *same_rows = local_rows(magnitude.weight)
            assert rows == same_rows
            absmax = None if w.absmax is None else local_rows(w.absmax)[0].to(device=device)
            if with_adapter:
                a = full_tensor(layer.lora_A[name].weight).to(device=device)
                b = local_rows(layer.lora_B[name].weight)[0].to(device=device)
            local.copy_(
                adapted_norms(
                    weight.to(device=device),
                    absmax,
                    a,
                    b,
                    layer.scaling[name],
                    *w.form,
                    torch.float32,
                )
            )


def initial_a(name: str, seed: int, shape) -> Tensor:
    """PEFT's initial A: kaiming uniform with a = sqrt(5), which is U(-1/sqrt(I), 1/sqrt(I))."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
