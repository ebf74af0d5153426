"""The chunked loss against transformers' own on all logits: values, gradients, and what is held.

Shapes: B rows, T tokens, N = B T, D hidden, V vocabulary.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Gemma2Config,
    GraniteConfig,
    LlamaForCausalLM,
    MixtralConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from fsdp_qlora.adapters import apply_adapters, lora_config, trainable_parameters
from fsdp_qlora.loading import materialize
from fsdp_qlora.memory import chunked_cross_entropy
from fsdp_qlora.memory.chunked_cross_entropy import (
    _ChunkedCrossEntropy,
    apply_chunked_cross_entropy,
    take_right_tokens,
)

from .tiny import CONFIGS, padded_batch, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

V, D = 97, 64
SIZES = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def tiny_model(config) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).train()
    for p in model.parameters():
        p.data *= 3  # logits of some size
    return model


def llama(**settings) -> nn.Module:
    return tiny_model(CONFIGS["llama"](**SIZES | settings))


def with_adapter_values(model) -> nn.Module:
    """The model with values in A and B, so that no gradient is zero."""
    materialize(model, torch.device("cpu"), torch.device("cpu"))
    for p in trainable_parameters(model).values():
        p.data.normal_(std=0.1)
    return model


def batch_of(rows=3):
    return padded_batch(tiny_rows(1, rows)[0])


def loss_and_gradients(model, batch, **kwargs):
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, expected, tolerance=1e-5):
    """Loss and every gradient equal up to the rounding of fp32 sums, relative to its norm."""
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=0)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.fixture(params=[7, 1024], ids=lambda n: f"chunks of {n}")
def chunk(request, monkeypatch):
    """3 rows of 19 tokens or fewer: many chunks of which the last is short, or one."""
    monkeypatch.setattr(chunked_cross_entropy, "chunk_tokens", lambda _: request.param)


# ---- against transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("num_items", [None, 5, 12.5, torch.tensor(40)])
def test_loss_and_all_gradients_equal_transformers(chunk, num_items):
    """Every weight is trained, the head too; a number of tokens is that of the whole step."""
    plain, batch = llama(), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    expected = loss_and_gradients(plain, batch, num_items_in_batch=num_items)
    got = loss_and_gradients(ours, batch, num_items_in_batch=num_items)
    assert "lm_head.weight" in got[1]
    assert_equal(got, expected)


def test_a_head_tied_to_the_embedding_gets_the_gradient_of_both(chunk):
    plain, batch = llama(tie_word_embeddings=True), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    assert_equal(loss_and_gradients(ours, batch), loss_and_gradients(plain, batch))


def test_gradients_through_a_frozen_head_equal_transformers_under_peft(chunk):
    plain, batch = llama(), batch_of()
    config = lora_config(rank=4, target_modules=["q_proj", "down_proj"])
    plain = with_adapter_values(apply_adapters(plain, config))
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    expected, got = (loss_and_gradients(m, batch, num_items_in_batch=9) for m in (plain, ours))
    assert len(got[1]) == 8
    assert_equal(got, expected)


def test_soft_capped_logits_equal_transformers_gemma2(chunk):
    config = Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=2.0, sliding_window=32)
    plain, batch = tiny_model(config), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    with torch.no_grad():  # the cap is of consequence
        assert plain(**{k: v for k, v in batch.items() if k != "labels"}).logits.abs().max() > 1
    assert_equal(loss_and_gradients(ours, batch), loss_and_gradients(plain, batch))


SCALED = [
    GraniteConfig(**SIZES, logits_scaling=4.0),
    CohereConfig(**SIZES, logit_scale=0.25),
    CohereConfig(**SIZES, logit_scale=5.0, tie_word_embeddings=False),
]


@pytest.mark.parametrize("config", SCALED, ids=["divided", "multiplied, tied", "multiplied"])
def test_scaled_logits_equal_transformers_granite_and_cohere(chunk, config):
    plain, batch = tiny_model(config), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    assert "forward" in ours.__dict__
    assert_equal(loss_and_gradients(ours, batch), loss_and_gradients(plain, batch))


@pytest.mark.parametrize("shape", ["shifted", "hidden scaled", "squared"])
def test_a_model_that_makes_its_logits_in_another_way_keeps_its_own_forward(shape, capsys):
    """As a family never seen may; its loss must be its own."""

    class Other(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            if shape == "hidden scaled":
                hidden = hidden / 3
            logits = self.lm_head(hidden)
            if shape == "shifted":
                logits = logits + torch.arange(logits.shape[-1]) / 10
            if shape == "squared":
                logits = logits.pow(2)
            loss = None if labels is None else self.loss_function(logits, labels, V)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    plain, batch = Other(CONFIGS["llama"](**SIZES)), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    assert "all logits are held for the loss: Other" in capsys.readouterr().out
    assert_equal(loss_and_gradients(ours, batch), loss_and_gradients(plain, batch))


def test_an_adapted_head_is_trained():
    model = with_adapter_values(
        apply_adapters(llama(), lora_config(rank=4, target_modules=["lm_head"]))
    )
    _, gradients = loss_and_gradients(apply_chunked_cross_entropy(model), batch_of())
    assert len(gradients) == 2 and all(g.any() for g in gradients.values())


# ---- against the formula -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 12, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_sum_and_gradients_equal_the_formula(chunk_size, softcap, bias):
    """-sum of log softmax(cap tanh(h W^T + b / cap))[label], over labels that are not -100."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    hidden, weight, offset = draw(12, 8), draw(11, 8), draw(11) if bias else None
    labels = torch.tensor([3, -100, 0, 10, -100, -100, 5, 5, -100, 1, 2, -100])
    leaves = [t for t in (hidden, weight, offset) if t is not None]
    logits = hidden @ weight.t() + (offset if bias else 0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    counted = labels != -100
    expected = -logits[counted].softmax(-1).gather(1, labels[counted, None]).log().sum()
    loss = _ChunkedCrossEntropy.apply(hidden, weight, offset, labels, 1.0, softcap, chunk_size)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(0.3 * loss, leaves),
        torch.autograd.grad(0.3 * expected, leaves),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("num_items", [None, 4])
def test_rows_without_a_trained_token_give_loss_zero_and_no_gradient(chunk, num_items):
    batch = batch_of()
    batch["labels"].fill_(-100)
    loss, gradients = loss_and_gradients(
        apply_chunked_cross_entropy(llama()), batch, num_items_in_batch=num_items
    )
    assert loss == 0 and gradients
    assert not any(g.any() for g in gradients.values())


def test_large_logits_stay_finite_and_equal_cross_entropy():
    hidden = (1e4 * torch.eye(4, 8)).requires_grad_()
    weight, labels = torch.eye(6, 8), torch.tensor([0, 5, 2, -100])
    loss = _ChunkedCrossEntropy.apply(hidden, weight, None, labels, 1.0, None, 2)
    expected = nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def test_bf16_sums_in_fp32():
    """4,096 equal terms of log(V): a bf16 sum would stop growing after some 256 of them."""
    hidden = torch.zeros(4096, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(16, 8, dtype=torch.bfloat16)
    loss = _ChunkedCrossEntropy.apply(
        hidden, weight, None, torch.zeros(4096, dtype=torch.long), 1.0, None, 256
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, 4096 * torch.tensor(16.0).log())


# ---- what it leaves alone, and what it holds ---------------------------------------------------


def test_without_labels_the_model_gives_its_logits():
    plain, batch = llama(), batch_of()
    del batch["labels"]
    expected = plain(**batch).logits
    output = apply_chunked_cross_entropy(copy.deepcopy(plain))(**batch)
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=0)


def test_rows_that_go_on_from_a_cache_attend_to_it_as_in_transformers(chunk):
    """Keys and values of a prefix that is trained, as prompt tuning has them; no mask is given."""
    plain = llama()
    plain.set_attn_implementation("sdpa")  # which is told that rows are alone, where they are
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    found = []
    for model in (plain, ours):
        generator = torch.Generator().manual_seed(1)
        shape = 2, model.config.num_key_value_heads, 3, model.config.head_dim
        prefix = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(4)]
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(*prefix[2 * layer : 2 * layer + 2], layer)
        ids = torch.randint(0, 97, (2, 9), generator=generator)
        loss, gradients = loss_and_gradients(
            model, dict(input_ids=ids, labels=ids, past_key_values=cache)
        )
        found.append((loss, gradients | {str(i): p.grad for i, p in enumerate(prefix)}))
    assert_equal(*reversed(found))


def test_hidden_states_and_tuples_are_given_where_they_are_asked_for():
    plain, batch = llama(), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    states, wanted = (m(**batch, output_hidden_states=True).hidden_states for m in (ours, plain))
    torch.testing.assert_close(states, wanted)
    loss, *_ = ours(**batch, return_dict=False)
    torch.testing.assert_close(loss, plain(**batch).loss)
    assert ours(**batch).past_key_values is None  # a batch's keys are not kept for nobody
    assert (
        ours(**batch, use_cache=True).past_key_values.get_seq_length() == batch["labels"].shape[1]
    )


@pytest.mark.parametrize("asked_by", ["configuration", "argument"])
def test_the_balance_loss_that_transformers_is_asked_for_is_in_it(asked_by):
    plain, batch = tiny_model(MixtralConfig(**SIZES, num_local_experts=4)), batch_of()
    plain.router_aux_loss_coef = 0.5
    more = dict(output_router_logits=True) if asked_by == "argument" else {}
    plain.config.output_router_logits = not more
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    expected = loss_and_gradients(plain, batch, **more)
    assert_equal(loss_and_gradients(ours, batch, **more), expected)
    plain.config.output_router_logits = False
    assert expected[0] > 1.05 * plain(**batch).loss


def smoothed(logits, labels, vocab_size, **_):
    """A loss of a script's own, as transformers calls it."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3
    )


def test_another_loss_is_computed_as_transformers_computes_it():
    plain, batch = llama(), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    shifted = batch["labels"].flip(1)
    of_sevens = batch | dict(labels=batch["labels"].masked_fill(batch["labels"] == -100, 7))
    usual = plain(**batch).loss
    for given in (batch | dict(shift_labels=shifted), of_sevens | dict(ignore_index=7)):
        expected = loss_and_gradients(plain, given)
        assert_equal(loss_and_gradients(ours, given), expected)
        for model in (plain, ours):
            model.zero_grad()
    assert abs(plain(**batch, shift_labels=shifted).loss - usual) > 0.01
    for model in (plain, ours):
        model.loss_function = smoothed
    expected = loss_and_gradients(plain, batch)
    assert_equal(loss_and_gradients(ours, batch), expected)
    assert abs(expected[0] - usual) > 0.01


def test_a_second_derivative_is_refused():
    model, batch = apply_chunked_cross_entropy(llama()), batch_of()
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, **batch).loss
    with pytest.raises(ValueError, match="differentiated twice; leave apply_chunked"):
        torch.autograd.grad(loss, embedded, create_graph=True)


def test_generation_still_works():
    plain, ids = llama().eval(), torch.tensor([[1, 5, 9]])
    generate = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = plain.generate(ids, **generate)
    assert torch.equal(apply_chunked_cross_entropy(plain).generate(ids, **generate), expected)


class Sizes(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max(self.largest, *made, 0)
        return out


@pytest.mark.parametrize("trained_head", [False, True])
def test_all_logits_are_never_held_nor_saved(trained_head):
    """N V would be 1,048,576 values; a chunk's logits are 65,536 and a trained head's gradient
    32,768. In between nothing may be.
    """
    n, vocabulary, width, chunk = 256, 4096, 8, 16
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=trained_head)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Sizes() as sizes, hooks:
        loss = _ChunkedCrossEntropy.apply(hidden, weight, None, torch.arange(n), 1.0, None, chunk)
        loss.backward()
    assert sizes.largest == chunk * vocabulary
    assert sum(t.numel() for t in saved) == n * width + trained_head * vocabulary * width


def test_the_model_saves_nothing_of_the_size_of_its_logits():
    model, saved = apply_chunked_cross_entropy(llama(vocab_size=4096)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(**batch_of())
    assert saved and not any(t.shape[-1:] == (4096,) for t in saved)


def test_right_tokens_are_those_that_transformers_logits_predict_and_are_counted_once(chunk):
    plain, batch = llama(), batch_of()
    ours = apply_chunked_cross_entropy(copy.deepcopy(plain))
    with torch.no_grad():
        best = plain(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
    wanted = batch["labels"][:, 1:].clone()
    wanted[:, ::3] = torch.where(wanted[:, ::3] == -100, -100, best[:, ::3])  # some are right
    batch["labels"] = torch.cat([batch["labels"][:, :1], wanted], 1)
    expected = int(((best == wanted) & (wanted != -100)).sum())
    assert 0 < expected < (wanted != -100).sum()
    ours(**batch).loss.backward()
    ours(**batch)
    assert take_right_tokens(ours) == 2 * expected and take_right_tokens(ours) == 0
    assert take_right_tokens(plain) is None
