"""Every optimizer steps alike on sharded weights and in one process, and so after a resume.

Weights have odd row counts, so that ranks hold unequal shards. Stochastic rounding follows the place in
the whole weight, so bfloat16 runs are equal too, bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_qlora.choices import OPTIMIZERS
from tests.ranks import run_ranks

OWN = [row.name for row in OPTIMIZERS.values() if row.factory.startswith("fsdp_qlora.")]
DTYPES = (torch.float32, torch.bfloat16)


class Stack(nn.Module):
    """Two products with a stack of matrices, as experts have them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x):
        return x + torch.einsum("bi,eoi->bo", x, self.weight)


def sharded_model(dtype, layout: str) -> nn.Module:
    """A small model; `layout` is whole, shard or hybrid."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 65), nn.GELU(), nn.Linear(65, 256), nn.GELU(), nn.Linear(256, 64), Stack()
    ).to(dtype)
    world = dist.get_world_size()
    if layout == "shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if layout == "hybrid":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")),
        )
    return model


def step(model, optimizer, number: int):
    """One step on the same rows on every rank: the mean over 2 or 4 gradients is each rank's own."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
    model(rows.to(next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model) -> list[torch.Tensor]:
    from fsdp_qlora.dist import full_tensor

    return [full_tensor(p.detach()).clone() for p in model.parameters()]


def trained(names, layout: str) -> dict:
    """Weights after four steps, by optimizer and dtype."""
    from fsdp_qlora.optim import build_optimizer

    found = {}
    for name in names:
        for dtype in DTYPES:
            model = sharded_model(dtype, layout)
            optimizer = build_optimizer(model, name, 1e-2, 0.1)
            for number in range(4):
                step(model, optimizer, number)
            found[name, dtype] = whole(model)
    return found


@pytest.mark.parametrize("ranks, layout", [(2, "shard"), (4, "hybrid")])
def test_sharded_weights_step_as_whole_ones(ranks, layout):
    names = list(OPTIMIZERS) if layout == "shard" else OWN
    (expected,) = run_ranks(trained, 1, names, "whole")
    results = run_ranks(trained, ranks, names, layout)
    for key, weights in expected.items():
        exact = OPTIMIZERS[key[0]].updates_together
        for result in results:
            torch.testing.assert_close(
                result[key],
                weights,
                **(dict(rtol=0, atol=0) if exact else dict(rtol=1e-5, atol=1e-6)),
                msg=str(key),
            )


def saved_and_gone_on(folder: str) -> dict:
    """Three steps, a distributed checkpoint, three more."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from fsdp_qlora.optim import build_optimizer

    found = {}
    for name in OWN:
        model = sharded_model(torch.bfloat16, "shard")
        optimizer = build_optimizer(model, name, 1e-2, 0.1)
        for number in range(3):
            step(model, optimizer, number)
        weights, states = get_state_dict(model, optimizer)
        dcp.save(dict(model=weights, optimizer=states), checkpoint_id=f"{folder}/{name}")
        for number in range(3, 6):
            step(model, optimizer, number)
        found[name] = whole(model)
    return found


def resumed(folder: str, layout: str) -> dict:
    """The last three steps from the checkpoint, under another number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from fsdp_qlora.optim import build_optimizer

    found = {}
    for name in OWN:
        model = sharded_model(torch.bfloat16, layout)
        optimizer = build_optimizer(model, name, 1e-2, 0.1)
        weights, states = get_state_dict(model, optimizer)
        loaded = dict(model=weights, optimizer=states)
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        for number in range(3, 6):
            step(model, optimizer, number)
        found[name] = whole(model)
    return found


@pytest.mark.parametrize("ranks, layout", [(1, "whole"), (4, "shard")])
def test_states_of_two_ranks_go_on_under_another_number_of_ranks(tmp_path, ranks, layout):
    expected = run_ranks(saved_and_gone_on, 2, str(tmp_path))[0]
    result = run_ranks(resumed, ranks, str(tmp_path), layout)[0]
    for name, weights in expected.items():
        torch.testing.assert_close(result[name], weights, rtol=0, atol=0, msg=name)
