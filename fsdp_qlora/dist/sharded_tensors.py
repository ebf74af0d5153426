"""Which rows of a tensor a rank holds, and the whole of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .groups import serves_host
from .ranks import ranks_from_env


def local_rows(parameter: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter: its tensor, and its rows (start, stop) of the whole.

    An unsharded parameter (O, ...) gives itself, 0 and O; the tensor shares the parameter's memory.
    """
    if not isinstance(parameter, DTensor):
        return parameter.data, 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    start = offset[0] if shape[0] else 0
    return parameter.to_local().data, start, start + shape[0]


def is_first_copy(tensor: Tensor) -> bool:
    """True on one of the ranks that hold the same rows of a tensor; a plain tensor is rank 0's."""
    if not isinstance(tensor, DTensor):
        return ranks_from_env().is_main
    return all(
        place == 0
        for place, placement in zip(
            tensor.device_mesh.get_coordinate(), tensor.placements, strict=True
        )
        if placement.is_replicate()
    )


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole of a sharded parameter, on the device of its rows; every rank must call it."""
    if not isinstance(parameter, DTensor):
        return parameter
    local, mesh = parameter.to_local(), parameter.device_mesh
    if local.device.type == mesh.device_type or serves_host(mesh):
        return parameter.full_tensor()
    # Offloaded, and the mesh is for GPUs alone: it travels through the GPU.
    there = DTensor.from_local(
        local.to(torch.device(mesh.device_type, torch.cuda.current_device())),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return there.full_tensor().to(local.device)


def split_as(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows as a tensor that is split, or whole, as a parameter of its shape is."""
    local = local.to(local_rows(parameter)[0].device)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
