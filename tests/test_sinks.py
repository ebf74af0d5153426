"""Attention with sinks by flash kernels, against transformers' eager code of the same models in fp32.

Kernels are torch's for the CPU, and FlashAttention 4's replaced by plain torch (test_flash_attention_4.py);
gpu/test_sinks.py has those of a GPU.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from fsdp_qlora.catalog.families import WITH_SINKS
from fsdp_qlora.data import collate, collate_packed
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from fsdp_qlora.model import attention, attention_kernels
from fsdp_qlora.model import flash_attention_4 as fa4
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.model.sinks import attention_with_sinks

from .test_checkpointing_policy import Calls
from .test_flash_attention_4 import backward, forward
from .tiny import padded_batch, tiny_rows

CPU = torch.device("cpu")
WINDOW = 5  # shorter than most rows
SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=64,
    pad_token_id=0,
)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
# What sets each apart: keys twice as many in windows and values of another size, which has MiMo.
MODELS = {
    "gpt_oss": EXPERTS,
    "granite_swa": {},
    "granitemoe_swa": EXPERTS,
    "mimo_v2_flash": dict(
        v_head_dim=4,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        mlp_layer_types=["dense", "sparse"],
    ),
}
ROWS = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in tiny_rows(1, 6)[0]]
PACKED = collate_packed([ROWS[:3], ROWS[3:]], 0)
ALONE = collate(ROWS, 0)


def made(family: str, way: str):
    """The family's model with weights and sinks that tell, and attention of a name."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | MODELS[family])
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=way
    ).train()
    model.config.use_cache = False
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 or "sinks" in name:
                p.normal_(0, 1 if "sinks" in name else 0.2)
    return model


def gradients(model, batches) -> dict[str, torch.Tensor]:
    """Logits and the gradients of all weights, of the sum of the batches' losses."""
    outs = [model(**batch, num_items_in_batch=50) for batch in batches]
    sum(out.loss for out in outs).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sum("sinks" in name for name in found) > 0
    logits = [out.logits for out in outs]  # chunked cross-entropy gives none
    return found | {f"logits {i}": x.detach() for i, x in enumerate(logits) if x is not None}


@pytest.fixture
def plain_kernels(monkeypatch):
    """FlashAttention 4's, in plain torch."""
    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(fa4, "kernels", lambda: module)


@pytest.mark.parametrize("family", MODELS)
def test_rows_alone_have_the_logits_and_gradients_of_transformers_eager_code(family, plain_kernels):
    expected = gradients(made(family, "eager"), [ALONE])
    for way in ("torch_fa", "fa4"):
        found = gradients(made(family, way), [ALONE])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum(bool(g.any()) for name, g in expected.items() if "sinks" in name) > 0


@pytest.mark.parametrize("family", MODELS)
def test_packed_rows_have_the_gradients_of_the_same_rows_alone(family, plain_kernels):
    expected = gradients(made(family, "eager"), [collate([row], 0) for row in ROWS])
    expected = {name: g for name, g in expected.items() if "logits" not in name}
    for way in ("torch_fa_packed", "fa4_packed"):
        found = gradients(made(family, way), [PACKED])
        found = {name: found[name] for name in expected}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_token_sees_another_packed_row(plain_kernels):
    changed = dict(PACKED, input_ids=PACKED["input_ids"].clone())
    start, end = len(ROWS[0][0]), len(ROWS[0][0]) + len(ROWS[1][0])
    changed["input_ids"][0, start:end] = (changed["input_ids"][0, start:end] + 1) % 97
    for way in ("torch_fa_packed", "fa4_packed"):
        model = made("gpt_oss", way).eval()
        with torch.no_grad():
            before, after = (model(**batch).logits for batch in (PACKED, changed))
        same = (before == after).all(-1)
        assert not same[0, start:end].any()
        same[0, start:end] = True
        assert same.all()


def test_masks_and_cached_keys_are_left_to_the_models_eager_code(plain_kernels):
    """Rows padded on the left, and tokens that are generated one by one."""
    batch = padded_batch(tiny_rows(1, 3)[0])
    batch = {name: x.flip(1) for name, x in batch.items() if name != "labels"}
    for way in ("torch_fa", "fa4"):
        for family in ("gpt_oss", "granite_swa"):
            expected, found = (made(family, name).eval() for name in ("eager", way))
            with torch.no_grad():
                logits = [model(**batch).logits for model in (expected, found)]
            real = batch["attention_mask"].bool()
            torch.testing.assert_close(logits[1][real], logits[0][real], rtol=1e-5, atol=1e-5)
            written = [
                model.generate(**batch, max_new_tokens=8, do_sample=False, use_cache=True)
                for model in (expected, found)
            ]
            assert torch.equal(*written)


def test_a_span_of_queries_has_the_part_of_the_whole_rows(plain_kernels):
    """As ranks take them that share a row: packed and alone, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 12, 8, generator=generator) for n in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    borders = torch.tensor([0, 3, 12, 24], dtype=torch.int32)
    module = SimpleNamespace(is_causal=True)
    for window, s_aux in product((None, WINDOW), (sinks, None)):  # some layers have none
        for packed in ({}, dict(cu_seq_lens_q=borders, max_length_q=12)):
            whole = (
                attention_kernels._packed_attention
                if packed
                else attention_kernels._attention_of_rows
            )
            name = "torch_fa_packed" if packed else "torch_fa"
            more = dict(scaling=0.3, sliding_window=window, s_aux=s_aux, **packed)
            expected, _ = whole(name, module, q, k, v, None, **more)
            span = q[:, :, 4:9], k[:, :, :9], v[:, :, :9]
            found, _ = attention_kernels.attend_span(module, *span, None, start=4, row=12, **more)
            torch.testing.assert_close(found, expected[:, 4:9], rtol=1e-5, atol=1e-6)


def test_nothing_of_tokens_times_tokens_is_saved_for_the_backward():
    tokens, heads = 200, 4
    batch = collate([(torch.randint(1, 97, (tokens,)), torch.ones(tokens, dtype=torch.long))], 0)

    def largest(way: str) -> int:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x.numel()) or x, lambda x: x
        ):
            apply_chunked_cross_entropy(made("gpt_oss", way))(**batch)
        return max(saved)

    assert largest("eager") >= heads * tokens * tokens
    assert largest("torch_fa") < tokens * tokens


@pytest.mark.parametrize("family", MODELS)
def test_heads_that_attend_group_after_group_take_their_own_sinks(family, plain_kernels):
    for way, batch in (("torch_fa", ALONE), ("torch_fa_packed", PACKED), ("fa4", ALONE)):
        expected, model = gradients(made(family, way), [batch]), made(family, way)
        for block in decoder_blocks(model):
            block.self_attn.attention_tiles = 2
        torch.testing.assert_close(gradients(model, [batch]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_have_no_graph_break_and_equal_results(recompute, plain_kernels):
    for way, batch in (
        ("torch_fa", ALONE),
        ("torch_fa_packed", PACKED),
        ("fa4", ALONE),
        ("fa4_packed", PACKED),
    ):
        found = []
        for compiled in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model = made("granite_swa", way)
            apply_activation_policy(model, "recompute_all" if recompute else "keep_all")
            for block in decoder_blocks(model) if compiled else []:
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
            found.append(gradients(apply_chunked_cross_entropy(model), [batch]))
            assert not torch._dynamo.utils.counters["graph_break"]
        names = [name for name in found[0] if "logits" not in name]
        for name in names:
            torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy, forwards", [("recompute_all", 4), ("keep_attention", 2)])
def test_it_is_kept_where_the_policy_says_so(policy, forwards):
    """2 blocks, whose attention runs once, or again in backward."""
    model = made("gpt_oss", "torch_fa")
    apply_activation_policy(model, policy)
    with Calls() as mode:
        apply_chunked_cross_entropy(model)(**ALONE).loss.backward()
    assert mode.counts["fsdp_qlora::attention_with_sinks"] == forwards
    assert mode.counts["fsdp_qlora::attention_with_sinks_backward"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_about_as_near_to_fp32_as_eager_is(dtype):
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, n, 40, 8, generator=generator).to(dtype) for n in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).to(dtype)
    seen = torch.full((40, 40), -torch.inf).triu(1)

    def errors(attend) -> torch.Tensor:
        given = [x.clone().requires_grad_() for x in (*states, sinks)]
        out = attend(*given).float()
        return [x.float() for x in (out, *torch.autograd.grad(out.square().sum(), given))]

    def eager(q, k, v, s):
        module = SimpleNamespace(num_key_value_groups=2, sinks=s, training=True)
        return eager_attention_forward(module, q, k, v, seen.to(q.dtype), 0.3)[0]

    def ours(q, k, v, s):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention_with_sinks(q, k, v, s, [], [40, 40], 0.3, None, False)[0]

    exact = [x.float() for x in (*states, sinks)]
    exact = [x.requires_grad_() for x in exact]
    out = eager(*exact)
    exact = [out, *torch.autograd.grad(out.square().sum(), exact)]
    for found, rounded, right in zip(errors(ours), errors(eager), exact, strict=True):
        assert (found - right).norm() < 1.5 * (rounded - right).norm() + 2e-3 * right.norm()


# ---- when it is chosen -------------------------------------------------------------------------


def choose(wanted="auto", packing=False, config=None, device=CPU, dtype=torch.bfloat16):
    return attention.choose_attention(wanted, packing, config or GptOssConfig(), device, dtype)


@pytest.mark.parametrize("family", MODELS)
def test_every_model_with_sinks_takes_it_unless_eager_is_asked_for(family):
    config = AutoConfig.for_model(family, **SIZES | MODELS[family])
    assert choose(config=config) == ("torch_fa", f"{family} has sinks")
    assert choose(packing=True, config=config) == ("torch_fa_packed", f"{family} has sinks")
    assert choose("eager", config=config)[0] == "eager"
    assert choose("eager", True, config)[1].endswith("a mask keeps rows apart")
    assert WITH_SINKS == set(MODELS)


@pytest.mark.parametrize("wanted", ["sdpa", "varlen"])
def test_kernels_that_would_leave_sinks_out_are_refused(wanted):
    with pytest.raises(ValueError, match=f"{wanted}: gpt_oss has attention sinks, .*or use eager"):
        choose(wanted)


def test_where_it_does_not_run_eager_is_taken_and_the_reason_said(monkeypatch):
    assert choose(config=GptOssConfig(attention_dropout=0.1)) == (
        "eager",
        "gpt_oss has sinks, with which torch's FlashAttention has no attention dropout",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    gpu = torch.device("cuda")
    assert choose(device=gpu, dtype=torch.float32) == (
        "eager",
        "gpt_oss has sinks, with which torch's FlashAttention computes in 16 bits only",
    )
    assert choose(device=gpu)[0] == "torch_fa"
    assert choose(device=gpu, packing=True)[0] == "torch_fa_packed"


def test_flash_attention_4_takes_it_where_it_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(fa4, "why_not", lambda *_: "")
    gpu = torch.device("cuda")
    for wanted in ("auto", "flash_attention_4"):
        assert choose(wanted, device=gpu) == ("fa4", "FlashAttention 4, with sinks")
        assert choose(wanted, True, device=gpu)[0] == "fa4_packed"
    monkeypatch.setattr(fa4, "why_not", lambda *_: "is not installed")
    assert choose(device=gpu) == (
        "torch_fa",
        "gpt_oss has sinks; FlashAttention 4 is not installed",
    )
    with pytest.raises(ValueError, match="flash_attention_4: is not installed; leave it out"):
        choose("flash_attention_4", device=gpu)
    assert choose(config=LlamaConfig(), device=gpu)[0] == "sdpa"


@pytest.mark.parametrize("packed", [False, True])
def test_the_layer_behind_takes_the_output_as_it_is(packed):
    """Whatever order a rotation leaves queries in: a copy of the output would be kept for each block."""
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))  # as cat gives
    rows = dict(cu_seq_lens_q=torch.tensor([0, 6, 12], dtype=torch.int32), max_length_q=6)
    if packed:
        out, _ = attention_kernels._packed_attention(
            attention_kernels.TORCH_FA_PACKED, None, q, k, v, None, s_aux=torch.zeros(4), **rows
        )
    else:
        out, _ = attention_kernels._attention_of_rows(
            attention_kernels.TORCH_FA, None, q, k, v, None, s_aux=torch.zeros(4)
        )
    assert out.is_contiguous()
