"""Models that one process trains one after the other are each compiled."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_qlora.build import compile_blocks
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.tiled_mlp import apply_tiled_mlp
from fsdp_qlora.observe.compilations import compiled_graphs

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    """Graphs are counted, and run as they are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile = torch.compile  # noqa: A001
    monkeypatch.setattr(
        torch, "compile", lambda f, options=None, **k: compile(f, backend="eager", **k)
    )
    yield
    torch._dynamo.reset()


def adapted(rank: int, policy: str, tiles: int = 1):
    """A compiled model whose adapters have a rank of their own, so that no graph of another fits it."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj"]))
    apply_tiled_mlp(model, tiles, [policy])
    apply_activation_policy(model, policy)
    compile_blocks(model)
    return model


def train_and_evaluate(model):
    """With batches of one row and of more, which torch compiles apart, and without autograd."""
    for rows in (1, 3, 2):
        ids = torch.randint(3, 97, (rows, 7))
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=ids, labels=ids, use_cache=False)


@pytest.mark.parametrize(
    "policy, tiles", [("recompute_all", 1), ("keep_all", 1), ("recompute_all", 2)]
)
def test_every_model_of_a_sweep_has_graphs_of_its_own(policy, tiles):
    made = []
    for rank in range(2, 6):
        before = compiled_graphs()
        train_and_evaluate(adapted(rank, policy, tiles))
        made.append(compiled_graphs() - before)
    first, *others = made
    assert first > 0 and min(others) >= others[0] > 0, made
    assert not torch._dynamo.utils.counters["unimplemented"]


def test_models_that_live_side_by_side_have_theirs():
    """As a policy, its reference and a judge: all are there before the first is called."""
    models = [adapted(rank, "recompute_all") for rank in range(2, 6)]
    for model in models:
        before = compiled_graphs()
        train_and_evaluate(model)
        assert compiled_graphs() > before
