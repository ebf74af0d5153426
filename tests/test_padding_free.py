"""Rows that other trainers pad give what transformers gives them, and their padding is not computed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from fsdp_qlora.build import compile_blocks
from fsdp_qlora.experts import apply_router_balance
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.model.delta_nets import apply_delta_rule
from fsdp_qlora.model.padding_free import apply_padding_free, why_padded

from .families import two_alike

torch.set_num_threads(1)
CPU = torch.device("cpu")
LENGTHS, T = [70, 3, 41, 9, 1], 72
TOKENS = 128  # of LENGTHS, rounded up to a multiple of 64
SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
EXACT = {
    "llama": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=8),
    "gemma3_text": dict(WINDOWS, head_dim=16),
    "cohere2": WINDOWS,
    "mixtral": EXPERTS,
    "opt": dict(ffn_dim=64, word_embed_proj_dim=64, dropout=0.0),
    "gpt_neox": {},
    "deepseek_v3": dict(
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
AS_THEY_ARE = {  # and the reason
    "gemma2": (dict(head_dim=16), "caps its attention scores"),
    "gpt_oss": (WINDOWS | EXPERTS, "eager"),
    "bloom": ({}, "eager"),
    "stablelm": ({}, "can't be given to stablelm"),
    "recurrent_gemma": (
        dict(lru_width=64, block_types=["recurrent", "attention"], attention_window_size=16),
        "carries a state",
    ),
    "lfm2": (dict(layer_types=["conv", "full_attention"]), "carries a state"),
}
HYBRIDS = ["Qwen3.5", "Qwen3-Next", "Kimi Linear", "OLMo Hybrid", "Granite 4 H", "MiniMax 01"]


def made(family: str = "llama", auto_class=AutoModelForCausalLM, **more):
    """A random model with weights that tell."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | EXACT.get(family, {}) | more)
    model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
    return model.eval()


def two(*args, **more) -> tuple:
    """The same model with padding and without."""
    plain = made(*args, **more)
    return plain, apply_padding_free(copy.deepcopy(plain), CPU)


def batch(side: str = "right", lengths=LENGTHS, width: int = T) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, n in zip(mask, lengths, strict=True):
        row[slice(n) if side == "right" else slice(width - n, None)] = 1
    return dict(input_ids=ids * mask, attention_mask=mask)


def labels_of(rows: dict[str, Tensor]) -> Tensor:
    """All tokens but each row's first: transformers would predict that from padding on the left."""
    real = rows["attention_mask"].bool()
    return rows["input_ids"].masked_fill(~real | (real.cumsum(1) == 1), -100)


def trained_logits(model, rows: dict[str, Tensor], found: list[Tensor]):
    """Give a model its gradients of these rows, and add its logits."""
    out = model(**rows, labels=labels_of(rows), use_cache=False)
    out.loss.backward()
    found.append(out.logits.detach())


def tokens_computed(model, forward) -> list[int]:
    """How many tokens the first linear layer of a model, or of a part of one, saw in each of its forwards."""
    seen = []
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].numel()))
    forward()
    handle.remove()
    return seen


def close(found, expected, tolerance: float = 1e-5):
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("family", EXACT)
def test_logits_and_gradients_are_those_of_padded_rows_on_either_side(family, capsys):
    plain, free = two(family)
    assert "rows of a batch are computed without their padding" in capsys.readouterr().out
    for side in ("right", "left"):
        rows = batch(side)
        real = rows["attention_mask"].bool()
        logits, seen = [], []
        for model in (plain, free):
            model.zero_grad()
            run = partial(trained_logits, model, rows, logits)
            seen.append(tokens_computed(model, run))
        close(logits[1][real], logits[0][real])
        assert seen == [[real.numel()], [TOKENS]]
        for p, q in zip(plain.parameters(), free.parameters(), strict=True):
            assert (q.grad is None) == (p.grad is None)
            if p.grad is not None:  # those of some biases are 0
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def two_hybrids(family: str) -> tuple:
    """A hybrid with padding, as transformers has it, and one without."""
    changed, plain = two_alike(family)
    apply_delta_rule(changed)
    return plain, apply_padding_free(changed, CPU)


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_of_hybrids_begin_anew_with_each_row_of_a_line(family, capsys):
    plain, free = two_hybrids(family)
    assert "rows of a batch are computed without their padding" in capsys.readouterr().out
    for side in ("right", "left"):
        rows, logits, seen = batch(side), [], []
        real = rows["attention_mask"].bool()
        for model in (plain, free):
            model.zero_grad()
            run = partial(trained_logits, model, rows, logits)
            seen.append(tokens_computed(model.get_decoder().layers[-1].self_attn, run))
        close(logits[1][real], logits[0][real], 3e-5)
        assert seen == [[real.numel()], [TOKENS]]
        largest = max(p.grad.norm() for p in plain.parameters() if p.grad is not None)
        for (name, p), q in zip(plain.named_parameters(), free.parameters(), strict=True):
            if p.grad is not None:
                assert (q.grad - p.grad).norm() < 1e-4 * p.grad.norm() + 1e-6 * largest, name


@pytest.mark.parametrize("policy", ["recompute_all", "keep_linears"])
def test_recomputed_mixers_see_their_own_rows_after_a_forward_of_others(policy):
    plain, free = two_hybrids("Qwen3.5")
    apply_activation_policy(free, policy)
    gradients_between_forwards(plain, free, 1e-4)


@pytest.mark.parametrize("family", AS_THEY_ARE)
def test_a_model_whose_rows_cant_be_kept_apart_stays_as_it_is_and_says_why(family, capsys):
    more, reason = AS_THEY_ARE[family]
    plain, same = two(family, **more)
    assert reason in capsys.readouterr().out
    assert type(same.get_decoder()) is type(plain.get_decoder())
    rows = batch()
    with torch.no_grad():
        assert torch.equal(same(**rows).logits, plain(**rows).logits)


def test_learned_positions_of_a_row_padded_on_the_left_are_those_that_it_has_alone():
    plain, free = two("gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=128)
    rows = batch("left")
    with torch.no_grad():
        found = free(**rows, use_cache=False).logits
        for ids, n, logits in zip(rows["input_ids"], LENGTHS, found, strict=True):
            close(logits[T - n :], plain(ids[None, T - n :]).logits[0])


def test_the_balance_loss_of_routers_counts_no_padding():
    plain, free = two("mixtral")
    for side in ("right", "left"):
        rows = batch(side)
        given = rows | dict(labels=labels_of(rows), output_router_logits=True)
        expected, found = (m(**given, use_cache=False) for m in (plain, free))
        close(found.aux_loss, expected.aux_loss)
        close(found.loss, expected.loss)
        assert [r.shape for r in found.router_logits] == [r.shape for r in expected.router_logits]


def test_a_head_that_scores_rows_finds_each_ones_last_token():
    plain, free = two("llama", AutoModelForSequenceClassification, num_labels=1)
    for side in ("right", "left"):
        close(*(m(**batch(side), use_cache=False).logits for m in (free, plain)))


def test_rows_without_padding_are_computed_as_they_are_and_without_a_mask(monkeypatch):
    from fsdp_qlora.model import attention_kernels

    plain, free = two()
    masks, own = [], attention_kernels.sdpa_attention_forward

    def watched(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return own(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(attention_kernels, "sdpa_attention_forward", watched)
    whole, ragged = batch(lengths=[T] * 3), batch()
    with torch.no_grad():
        assert torch.equal(free(**whole).logits, plain(**whole).logits)
        assert tokens_computed(free, lambda: free(**whole, use_cache=False)) == [3 * T]
        free(**ragged, use_cache=False)
    assert masks == [None] * len(masks) and masks


def test_what_is_not_exact_in_a_line_is_computed_as_before():
    plain, free = two()
    rows = batch()
    gap = rows["attention_mask"].clone()
    gap[0, 20] = 0
    embedded = dict(
        inputs_embeds=plain.get_input_embeddings()(rows["input_ids"]),
        attention_mask=rows["attention_mask"],
    )
    positions = torch.arange(T)[None].expand(len(LENGTHS), T)
    for given in (
        rows | dict(use_cache=True),
        rows | dict(output_hidden_states=True),
        rows | dict(attention_mask=gap),
        rows | dict(attention_mask=0 * gap),
        rows | dict(position_ids=positions),
        embedded,
    ):
        given = dict(use_cache=False) | given
        with torch.no_grad():
            found, expected = free(**given), plain(**given)
        assert torch.equal(found.logits, expected.logits)
        assert (found.past_key_values is None) == (expected.past_key_values is None)
        assert (found.hidden_states is None) == (expected.hidden_states is None)
        seen = tokens_computed(free, lambda given=given: free(**given))
        assert seen == [rows["input_ids"].numel()]


def test_generation_from_prompts_of_unequal_length_is_unchanged():
    plain, free = two()
    for use_cache in (True, False):
        settings = dict(max_new_tokens=6, do_sample=False, use_cache=use_cache)
        found, expected = (m.generate(**batch("left"), **settings) for m in (free, plain))
        assert torch.equal(found, expected)


def test_short_rows_never_cost_more_than_padded():
    plain, free = two()
    rows = batch(lengths=[5, 2], width=5)
    seen = tokens_computed(free, lambda: close(*(m(**rows).logits[0] for m in (free, plain))))
    free.train()  # a cache that a configuration fills by itself is not read in training
    assert seen == [10] and tokens_computed(free, lambda: free(**rows)) == [10]
    assert tokens_computed(free, lambda: free(**batch())) == [TOKENS]


def test_a_line_that_a_trainer_made_itself_has_the_logits_of_its_rows():
    plain, free = two()
    rows = [torch.randint(3, 97, (1, n)) for n in (11, 4, 13)]
    borders = torch.tensor([0, 11, 15, 28], dtype=torch.int32)
    line = dict(
        position_ids=torch.cat([torch.arange(r.shape[1]) for r in rows])[None],
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
        max_length_q=13,
        max_length_k=13,
        use_cache=False,
    )
    with torch.no_grad():
        close(
            free(torch.cat(rows, 1), **line).logits, torch.cat([plain(r).logits for r in rows], 1)
        )


def adapted(model):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(model, lora)
    torch.manual_seed(2)
    model.add_adapter("other", lora)
    return model


def test_rows_that_each_have_an_adapter_of_their_own_keep_it():
    plain = adapted(made())
    free = apply_padding_free(adapted(made()), CPU)
    names = ["default", "other", "__base__", "other", "default"]
    rows = batch()
    with torch.no_grad():
        found, expected = (
            m.eval()(**rows, adapter_names=names, use_cache=False).logits for m in (free, plain)
        )
        assert torch.equal(found, expected)
        close(*(m(**rows, use_cache=False).logits[0, : LENGTHS[0]] for m in (free, plain)))


@pytest.mark.parametrize("policy", ["recompute_all", "keep_linears"])
def test_recomputed_blocks_see_their_own_rows_after_a_forward_of_others(policy):
    """KTO's reference is of other rows than the policy, between its forward and its backward."""
    plain, free = two()
    apply_activation_policy(free, policy)
    gradients_between_forwards(plain, free, 1e-5)


def gradients_between_forwards(plain, free, tolerance: float):
    rows, others = batch(), batch("left", lengths=[20, 64, 7, 30, 33])
    real = rows["attention_mask"].bool()
    for model in (plain, free):
        logits = model(**rows, use_cache=False).logits
        with torch.no_grad():
            model(**others, use_cache=False)
        logits[real].square().sum().backward()
    for p, q in zip(plain.parameters(), free.parameters(), strict=True):
        close(q.grad, p.grad, tolerance)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_take_lines_of_any_length_by_one_graph():
    from torch._dynamo.utils import counters

    plain, free = two()
    compile_blocks(free, dynamic=True)
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for width in (72, 60, 90, 127, 40, 128, 100, 66, 70):
        rows = batch(lengths=[width, 3, width // 2], width=width)
        real = rows["attention_mask"].bool()
        found, expected = (m(**rows, use_cache=False).logits[real] for m in (free, plain))
        close(found, expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[1:] == [graphs[0]] * 8


def test_rotary_scaling_by_length_is_that_of_padded_rows():
    """Neither a longest row that is padded too, nor the line and what fills it, switches another scale on."""
    by_length = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    switched = dict(
        rope_type="longrope",
        short_factor=[1.0] * 8,
        long_factor=[4.0] * 8,
        factor=4.0,
        original_max_position_embeddings=50,
        rope_theta=1e4,
    )
    cases = [
        (by_length, 32, LENGTHS, T),
        (by_length, 71, LENGTHS, T),  # between the longest row and the padded length
        (
            by_length,
            32,
            [60, 3, 1],
            61,
        ),  # 64 tokens: the line itself has no place for one of the filler
        (switched, 200, LENGTHS, T),
        (switched, 200, [48, 20], 60),
        (switched, 200, [10, *[5] * 11], 12),  # 63 tokens of filler
    ]
    for rope, limit, lengths, width in cases:
        plain, free = two(max_position_embeddings=limit, rope_parameters=rope)
        rows = batch(lengths=lengths, width=width)
        real = rows["attention_mask"].bool()
        with torch.no_grad():
            found, expected = (m(**rows, use_cache=False).logits[real] for m in (free, plain))
        close(found, expected)


def test_neftunes_noise_is_that_of_padded_rows():
    """Its size goes by the row's length, which a line of several rows would make longer."""
    from transformers.integrations.neftune import activate_neftune

    rows = batch()
    for family in ("llama", "gemma3_text"):
        losses, gradients, plain_and_free = [], [], two(family)
        for model in plain_and_free:
            activate_neftune(model.train(), 20.0)
            torch.manual_seed(1)
            loss = model(**rows, labels=labels_of(rows), use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append(next(model.get_decoder().layers[0].parameters()).grad)
        close(losses[1], losses[0])
        close(gradients[1], gradients[0], 1e-4)
        free = plain_and_free[1]
        assert tokens_computed(free, lambda model=free: model(**rows)) == [TOKENS]
        quiet = free.eval()(**rows, labels=labels_of(rows), use_cache=False).loss
        assert (quiet - losses[0]).abs() > 1e-3


def test_what_cant_be_a_line_of_rows_is_left_alone():
    assert why_padded(torch.nn.Linear(2, 2))
    balanced = made("mixtral")
    apply_router_balance(balanced, 0.1)
    assert "balance of its routers" in why_padded(balanced)
    bidirectional = made()
    bidirectional.config.is_causal = False
    assert "behind" in why_padded(bidirectional)
    assert not why_padded(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
