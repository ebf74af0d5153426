"""Frozen weights that stream to the device a block ahead: the same gradients, two blocks at a time."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.memory.activation_offload import apply_activation_offload
from fsdp_qlora.memory.weight_streaming import _StreamedBlock, apply_streaming

from .parts import rest
from .test_checkpointing_policy import loss_and_gradients, tiny_model
from .test_offload import bit_equal, compile_whole
from .tiny import padded_batch, save_tiny, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

CPU = torch.device("cpu")
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.fixture
def held(monkeypatch):
    """How many blocks have weights on the device each time that one is used."""
    made, counts = [], []
    plain_init, plain_use = _StreamedBlock.__init__, _StreamedBlock.use
    monkeypatch.setattr(
        _StreamedBlock, "__init__", lambda self, *args: made.append(self) or plain_init(self, *args)
    )

    def use(self):
        plain_use(self)
        counts.append(
            sum(any(here.untyped_storage().nbytes() for *_, here in one.weights) for one in made)
        )

    monkeypatch.setattr(_StreamedBlock, "use", use)
    return counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "policy, reentrant, backend",
    [
        ("keep_all", False, None),
        ("recompute_all", False, None),
        ("recompute_all", True, None),
        ("keep_linears", False, None),
        rest("recompute_all", False, "aot_eager"),
    ],
)
def test_gradients_are_those_of_weights_that_stay_bit_by_bit(
    folder, held, policy, reentrant, backend
):
    results = []
    for streams in (False, True):
        model = tiny_model(folder, "qlora", policy, reentrant)
        if backend:
            compile_whole(model, backend)
        if streams:
            apply_streaming(model, CPU)
        if policy == "recompute_all":
            apply_activation_offload(model, [policy] * LAYERS)
        for _ in range(2):  # the second time, tensors exist and storages are empty
            model.zero_grad()
            result = loss_and_gradients(model)
        results.append(result)
    assert bit_equal(results[1], results[0])
    # A step uses each block twice; what is used and what comes next are there.
    assert len(held) == 2 * 2 * LAYERS and max(held) <= 2


def test_between_uses_the_weights_are_those_on_the_host(folder, held):
    model = tiny_model(folder, "qlora", "recompute_all")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    apply_streaming(model, CPU)
    loss_and_gradients(model)
    with torch.no_grad():
        model(**padded_batch(tiny_rows(1, 2)[0]))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert len(held) == 3 * LAYERS


def test_two_forwards_before_a_backward_are_right(folder):
    gradients = []
    for streams in (False, True):
        model = tiny_model(folder, "qlora", "recompute_all")
        if streams:
            apply_streaming(model, CPU)
        losses = [model(**padded_batch(tiny_rows(1, 3, seed=s)[0])).loss for s in (1, 2)]
        sum(losses).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
