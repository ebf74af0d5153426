"""Compiled models generate eager, and what they are compiled for afterwards is training alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsdp_qlora.build import compile_blocks
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.tiled_mlp import apply_tiled_mlp
from fsdp_qlora.model.conv1d import apply_plain_linears
from fsdp_qlora.observe.compilations import compiled_graphs
from tests.families import two_alike
from tests.parts import rest

# Keys and values given by name and by place, windows, states of a scan and of a delta rule.
FAMILIES = ["Llama 3", "GPT-2", "Gemma 3", "Granite 4 H", "Qwen3.5"]


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """What is counted is how often torch wants new ones."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(_traced, torch.compile))
    yield
    torch._dynamo.reset()


def _traced(compile, function, options=None, **given):  # noqa: A002
    return compile(function, backend="aot_eager", **given)


def graphs_of_a_step(model, ids) -> int:
    before = compiled_graphs()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return compiled_graphs() - before


@pytest.mark.parametrize("policy, tiles", [("recompute_all", 2), rest("keep_all", 1)])
@pytest.mark.parametrize("family", [FAMILIES[0], *(rest(f) for f in FAMILIES[1:])])
def test_answers_are_the_uncompiled_ones_and_training_compiles_as_without_them(
    family, policy, tiles
):
    """A graph with a cache is of one layer, and torch makes eight of a function before it gives up."""
    wanted, model = two_alike(family)
    ids = torch.randint(3, 97, (2, 7))
    answers = dict(max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
    expected = wanted.generate(ids, **answers)
    apply_plain_linears(model)
    apply_tiled_mlp(model, tiles, [policy] * 2)
    apply_activation_policy(model, policy)
    compile_blocks(model, dynamic=True)
    for training in (True, False):
        before = compiled_graphs()
        assert torch.equal(model.train(training).generate(ids, **answers), expected)
        assert compiled_graphs() - before <= 2  # the norm after the blocks: of prompts and tokens
    after = graphs_of_a_step(model.train(), ids)
    torch._dynamo.reset()
    assert graphs_of_a_step(model, ids) == after > 1
