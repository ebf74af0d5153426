"""Recomputing blocks changes what is kept and what is run again, and no gradient."""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from fsdp_qlora.adapters import apply_adapters, lora_config, trainable_parameters
from fsdp_qlora.loading import materialize
from fsdp_qlora.lora_init import init_adapters
from fsdp_qlora.memory.checkpointing_policy import _say_not_reentrant, apply_activation_policy
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.quantization.quantize import quantize_linears

from .tiny import padded_batch, save_tiny, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

CPU = torch.device("cpu")
POLICIES = [("keep_all", False), ("recompute_all", False), ("recompute_all", True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


def tiny_model(folder, train_type, policy="keep_all", reentrant=False, dropout=0.0):
    """A tiny llama in training mode, B not zero so that every gradient is of consequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    if train_type in ("qlora", "bnb_dora"):
        quantize_linears(model)
    if train_type != "full":
        model = apply_adapters(
            model, lora_config(rank=4, dropout=dropout, use_dora="dora" in train_type)
        )
        materialize(model, CPU, CPU)
        init_adapters(model, 0)
        for name, p in trainable_parameters(model).items():
            if ".lora_B." in name:
                p.data.normal_(generator=torch.Generator().manual_seed(1))
    return apply_activation_policy(model.train(), policy, reentrant)


def loss_and_gradients(model):
    torch.manual_seed(0)  # dropout draws the same masks
    loss = model(**padded_batch(tiny_rows(1, 3)[0])).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in trainable_parameters(model).items()}


@pytest.mark.parametrize(
    "train_type, dropout",
    [
        ("full", 0.0),
        ("lora", 0.0),
        ("qlora", 0.0),
        ("qlora", 0.2),
        ("dora", 0.0),
        ("bnb_dora", 0.0),
        ("bnb_dora", 0.2),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_equal_those_with_everything_kept(folder, train_type, dropout, reentrant):
    kept = loss_and_gradients(tiny_model(folder, train_type, dropout=dropout))
    again = loss_and_gradients(tiny_model(folder, train_type, "recompute_all", reentrant, dropout))
    assert all(g is not None for g in again[1].values())
    torch.testing.assert_close(again, kept, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_as_from_pretrained_gives_it_can_be_recomputed(folder, reentrant):
    """It keeps a key-value cache, which a second forward of a block would fill twice."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert plain.config.use_cache
    again = apply_activation_policy(plain.train(), "recompute_all", reentrant)
    torch.testing.assert_close(
        loss_and_gradients(again),
        loss_and_gradients(tiny_model(folder, "full")),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_parameter_names_stay_those_without_a_policy(folder, train_type):
    names = [list(tiny_model(folder, train_type, *policy).state_dict()) for policy in POLICIES]
    assert names[0] == names[1] == names[2]
    assert not any("checkpoint" in name for name in names[0])


class Calls(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __enter__(self):
        self.counts = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def calls(model) -> Counter:
    with Calls() as mode:
        loss_and_gradients(model)
    return mode.counts


@pytest.mark.parametrize(
    "policy, reentrant, silus", [(*POLICIES[0], 2), (*POLICIES[1], 4), (*POLICIES[2], 4)]
)
def test_blocks_run_again_only_where_the_policy_says_so(folder, policy, reentrant, silus):
    """Each of 2 blocks has one silu, in its MLP."""
    assert calls(tiny_model(folder, "qlora", policy, reentrant))["aten::silu"] == silus


def test_the_last_linear_layer_of_a_block_runs_once(folder):
    """Nothing in backward needs its output, and down_proj is a quarter of a block's FLOPs.

    2 blocks of 7 adapted layers: 14 forward, and 6 of each block again.
    """
    counts = calls(tiny_model(folder, "qlora", "recompute_all"))
    assert counts["fsdp_qlora::adapted_linear_backward"] == 14
    assert counts["fsdp_qlora::adapted_linear"] == 14 + 12


@pytest.mark.parametrize("policy, again", [("recompute_all", 14), ("keep_linears", 0)])
def test_norms_of_magnitudes_come_with_products_and_are_kept_with_them(folder, policy, again):
    """Of DoRA a magnitude needs what down_proj gives, so all 7 layers of 2 blocks run again."""
    counts = calls(tiny_model(folder, "bnb_dora", policy))
    assert counts["fsdp_qlora::turned_linear"] == 14 + again
    assert not counts["fsdp_qlora::adapted_norms"] and not counts["fsdp_qlora::adapted_linear"]


@pytest.mark.slow
def test_a_compiled_block_does_not_run_its_last_linear_layer_again(folder):
    """The same where torch.compile sees the recompute: 7 adapted layers forward, 6 backward."""
    graphs = {}

    def counting(name):
        def compiler(graph, _):
            graphs[name] = Counter(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compiler

    model = tiny_model(folder, "qlora", "recompute_all")
    backend = aot_autograd(
        fw_compiler=counting("forward"),
        bw_compiler=counting("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    compiled = loss_and_gradients(model)
    torch.testing.assert_close(
        compiled, loss_and_gradients(tiny_model(folder, "qlora")), rtol=1e-5, atol=1e-6
    )
    assert graphs["forward"]["fsdp_qlora.adapted_linear.default"] == 7
    assert graphs["backward"]["fsdp_qlora.adapted_linear.default"] == 6
    assert graphs["backward"]["fsdp_qlora.adapted_linear_backward.default"] == 7


def kept_bytes(model) -> int:
    """Bytes that the forward keeps for the backward, weights not counted."""
    weights = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(t):
        if t.data_ptr() not in weights:
            kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**padded_batch(tiny_rows(1, 3)[0])).loss
    del loss
    return sum(kept.values())


def test_recomputing_keeps_a_small_part_of_the_activations(folder):
    kept, recomputed = (
        kept_bytes(tiny_model(folder, "qlora", policy)) for policy in ("keep_all", "recompute_all")
    )
    assert recomputed < kept / 3


def test_an_unknown_policy_is_refused_with_the_choices(folder):
    with pytest.raises(ValueError, match="'half': choose recompute_all, keep_attention"):
        tiny_model(folder, "lora", "half")


SHARING = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    sliding_window=8,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=97,
    pad_token_id=0,
)


@pytest.mark.parametrize(
    "family, more",
    [
        (
            "gemma3n_text",
            dict(laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4),
        ),
        ("gemma4_text", dict(global_head_dim=16)),
    ],
)
def test_blocks_that_share_tensors_lose_no_gradient_under_reentrant_checkpointing(
    family, more, capsys
):
    config = AutoConfig.for_model(family, **SHARING | more)
    ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    found = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.1)
        _say_not_reentrant.cache_clear()
        if reentrant:
            apply_activation_policy(model, "recompute_all", reentrant=True)
        model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[
            ..., 3
        ].mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected)
    assert "--reentrant_checkpointing has no effect" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["recompute_all", "keep_attention", "keep_linears"])
def test_blocks_that_are_given_a_cache_do_not_fill_it_twice(folder, policy):
    found = []
    for name in ("keep_all", policy):
        model, generator = tiny_model(folder, "lora", name), torch.Generator().manual_seed(1)
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            prefix = torch.randn(2, 2, 2, 3, 16, generator=generator).requires_grad_()
            cache.update(*prefix, layer)
        ids = torch.randint(0, 97, (2, 9), generator=generator)
        model(input_ids=ids, labels=ids, past_key_values=cache).loss.backward()
        assert cache.get_seq_length() == 12
        found.append([prefix.grad, *(p.grad for p in trainable_parameters(model).values())])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
