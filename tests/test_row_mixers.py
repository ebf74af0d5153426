"""Mixers that carry a state see each packed row by itself: hybrids of every kind, against transformers."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import collate, collate_packed
from fsdp_qlora.dist import process_group
from fsdp_qlora.loading import meta_model
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.model import delta_nets as rules
from fsdp_qlora.model import packing_probe
from fsdp_qlora.model import row_mixers as mixers
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.model.delta_nets import apply_delta_rule
from fsdp_qlora.model.packing_probe import keep_rows_apart
from fsdp_qlora.model.row_mixers import Borders, check_kernels, leave_uncompiled, row_mixers
from fsdp_qlora.model.state_space_mixers import apply_state_space_scan

from .families import EVERY_FAMILY, SIZES, family_config, save_family, two_alike

HYBRIDS = [
    "Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next", "Granite 4 H", "LFM2", "LFM2-MoE", "Falcon-H1", "Bamba",
    "Nemotron 3", "Kimi Linear", "OLMo Hybrid", "MiniMax 01",
]  # fmt: skip
VOCAB = SIZES["vocab_size"]
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_attention_heads=2)
# Mixers of Mamba 1, whose code without kernels loops over tokens.
OVER_TOKENS = {
    "Jamba": AutoConfig.for_model(
        "jamba",
        **SMALL,
        num_hidden_layers=2,
        num_key_value_heads=1,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_period=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "Mamba": AutoConfig.for_model("mamba", **SMALL, num_hidden_layers=1, time_step_rank=4),
}
LENGTHS = (11, 26, 3, 1, 25, 14)  # two bins of 40


def made(family: str):
    """A random model that keeps packed rows apart, and the same without a line of this project."""
    ours, plain = two_alike(family)
    apply_delta_rule(ours)
    apply_state_space_scan(ours)
    keep_rows_apart(ours)
    return ours, plain


def rows_of(lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (1, n), generator=generator) for n in lengths]


def packed(model, rows: list[torch.Tensor], bins: int = 2) -> torch.Tensor:
    """Logits (1, all tokens, V) of rows in bins of one width."""
    ids = torch.cat(rows, 1).reshape(bins, -1)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows]).reshape(bins, -1)
    return model(ids, position_ids=positions, use_cache=False).logits.reshape(1, ids.numel(), -1)


@pytest.mark.slow
def test_each_family_with_a_state_is_looked_at():
    models = {f: meta_model(family_config(f), torch.float32, "eager") for f in EVERY_FAMILY}
    assert HYBRIDS == [family for family, model in models.items() if row_mixers(model)]


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_have_the_logits_and_gradients_of_each_row_alone_in_transformers(family):
    ours, plain = made(family)
    rows = rows_of()
    together = packed(ours, rows)
    alone = torch.cat([plain(row, use_cache=False).logits for row in rows], 1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    for logits in (together, alone):
        logits.square().mean().backward()
    trained = [q for q in plain.parameters() if q.grad is not None]
    largest = max(q.grad.norm().item() for q in trained)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:  # sums of many that cancel are rounded by more than their size says
            off = (p.grad - q.grad).norm().item()
            assert off < 1e-4 * q.grad.norm().item() + 1e-6 * largest, name


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_token_of_one_row_changes_a_bit_of_another(family):
    model, _ = made(family)
    rows = rows_of((20, 12, 24))
    with torch.no_grad():
        before = packed(model, rows, bins=1)
        rows[1] = (rows[1] + 5) % VOCAB
        changed = packed(model, rows, bins=1)
    assert torch.equal(before[:, :20], changed[:, :20])
    assert torch.equal(before[:, 32:], changed[:, 32:])
    assert not torch.equal(before[:, 20:32], changed[:, 20:32])


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_that_runs_on_into_the_next_row_is_refused(family, monkeypatch):
    monkeypatch.setattr(packing_probe, "row_mixers", lambda model: {})
    model = meta_model(family_config(family), torch.float32, "sdpa")
    with pytest.raises(ValueError, match=r"--packing true: packed rows of \w+ see each other"):
        keep_rows_apart(model)


def test_rows_go_together_with_rows_of_about_their_length():
    borders, lengths = Borders(), (100, 3, 90, 64, 17, 5)
    borders.begin(torch.cat([torch.arange(n) for n in lengths])[None])
    assert sorted(tuple(g.index.shape) for g in borders.groups) == [
        (1, 17),
        (1, 64),
        (2, 5),
        (2, 100),
    ]
    line = torch.arange(sum(lengths))
    rows = torch.cat([line[g.index].flatten() for g in borders.groups])
    assert torch.equal(rows[borders.back], line)


def gradients(folder: str, batch: dict, packing: bool) -> tuple[float, dict]:
    """Loss and adapters' gradients of a batch, with every block recomputed."""
    config = RunConfig(
        model_name=folder, train_type="qlora", precision="fp32", lora_rank=4, packing=packing,
        lora_dropout=0.0, activation_policy="recompute_all",
    )  # fmt: skip
    model = build_model(config, torch.device("cpu"))
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", ["Qwen3.5", "Granite 4 H"])
def test_a_run_over_packed_rows_has_the_loss_and_gradients_of_the_padded_rows(family, tmp_path):
    folder = save_family(tmp_path, family)
    examples = [(row[0], row[0]) for row in rows_of((9, 20, 5))]
    with process_group(torch.device("cpu"), timeout_minutes=1):
        loss, grads = gradients(folder, collate_packed([examples], pad_token_id=0), True)
        alone, expected = gradients(folder, collate(examples, pad_token_id=0), False)
    assert loss == pytest.approx(alone, rel=1e-5)
    assert all((grads[n] - g).norm() <= 1e-4 * g.norm() + 1e-8 for n, g in expected.items())


def compiled_nodes(model, row: torch.Tensor, policy: str) -> tuple[int, list[str]]:
    """Nodes of all graphs, forward and backward, that are compiled for a row; why they break off."""
    nodes = []

    def count(graph, _):
        nodes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    apply_activation_policy(model, policy)
    apply_delta_rule(model)
    apply_state_space_scan(model)
    leave_uncompiled(model)
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    model(row, use_cache=False).logits.sum().backward()
    return sum(nodes), [*torch._dynamo.utils.counters["graph_break"]]


@pytest.mark.parametrize("family", [*HYBRIDS, *OVER_TOKENS])
def test_what_is_compiled_of_a_mixer_does_not_grow_with_its_row(family):
    """Its loops over chunks of 64 tokens, or over tokens, would be unrolled."""
    config = OVER_TOKENS.get(family) or family_config(family)
    found = []
    for tokens in (64, 320):
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        found.append(compiled_nodes(model, *rows_of((tokens,)), "keep_all")[0])
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("policy", ["recompute_all", "keep_linears", "keep_all"])
@pytest.mark.parametrize(
    "family, more",
    [
        ("Qwen3.5", {}),
        ("OLMo Hybrid", {}),
        ("Falcon-H1", {}),
        ("Bamba", {}),
        ("Granite 4 H", dict(num_local_experts=0)),  # whose experts in transformers break off
    ],
)
def test_a_block_with_an_op_of_ours_is_compiled_as_a_whole(family, more, policy):
    """One that breaks off would run eager, under a policy that recomputes."""
    model = AutoModelForCausalLM.from_config(family_config(family, **more))
    nodes, breaks = compiled_nodes(model, *rows_of((70,)), policy)
    assert nodes > 0 and not breaks


@pytest.mark.parametrize("hopper, triton", [(True, "3.6.0"), (True, "3.7.1"), (False, "3.6.0")])
def test_wrong_kernels_are_refused_where_the_op_does_not_take_their_place(
    hopper, triton, install, monkeypatch
):
    """Of code that is not transformers', in which the rule is not found."""
    install({"fla"}, triton)
    for module in (mixers, rules):
        monkeypatch.setattr(module, "is_hopper", lambda: hopper)
    with torch.device("meta"):
        models = {
            name: AutoModelForCausalLM.from_config(family_config(name))
            for name in ("Qwen3.5", "Qwen3-Next", "OLMo Hybrid", "LFM2", "Granite 4 H", "Qwen3")
        }
    for name, model in models.items():
        wrong = hopper and triton == "3.6.0" and name in ("Qwen3.5", "Qwen3-Next", "OLMo Hybrid")
        expected = pytest.raises(ValueError, match="tilelang") if wrong else nullcontext()
        with expected:
            check_kernels(model, torch.device("cuda", 0))
        check_kernels(model, torch.device("cpu"))
        apply_delta_rule(model)
        check_kernels(model, torch.device("cuda", 0))
