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
        assert compiled_graphs() == before  # of the norm after the blocks, too
    after = graphs_of_a_step(model.train(), ids)
    torch._dynamo.reset()
    assert graphs_of_a_step(model, ids) == after > 1


# What a model returns beside its logits: inside of blocks, and between them.
RECORDED = [("Llama 3", "attentions"), ("Llama 3", "hidden_states")]


def of_eight_shapes(model) -> set[str]:
    """Why torch compiled less than all, after prompts of several sizes with each kind of cache."""
    for rows, tokens in ((1, 1), (1, 5), (2, 1), (2, 6), (3, 9)):
        for training in (True, False):
            ids = torch.randint(3, 97, (rows, tokens))
            model.train(training).generate(ids, max_new_tokens=3, use_cache=True, pad_token_id=0)
    counters = torch._dynamo.utils.counters
    return {*counters["graph_break"], *counters["unimplemented"]}


@pytest.mark.parametrize("family, what", [RECORDED[0], *(rest(*case) for case in RECORDED[1:])])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_what_blocks_record_is_the_uncompiled_models_and_training_stays_compiled(
    family, what, compiled_before
):
    """Hooks of transformers stay in the blocks from the first recording on."""
    wanted, model = two_alike(family)
    for each in (wanted, model):
        each.set_attn_implementation("eager")
    ids = torch.randint(3, 97, (2, 7))
    record = {"input_ids": ids, "use_cache": False, f"output_{what}": True}
    expected = wanted(**record)
    apply_activation_policy(model, "recompute_all")
    compile_blocks(model, dynamic=True)
    if compiled_before:
        graphs_of_a_step(model, ids)
    found = model(**record)
    assert len(expected[what]) == len(found[what]) > 1
    for a, b in zip(expected[what], found[what], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    found.logits.sum().backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert graphs_of_a_step(model, ids) > 1 and not of_eight_shapes(model)
