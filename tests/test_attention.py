"""Packed rows train as the same rows do alone, whichever way attention keeps them apart.

`varlen` runs here too: torch's operator has CUDA kernels only, so this file gives it CPU kernels in
closed form. What is tested is all around them: layout, windows, borders, compile, checkpointing.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import varlen
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV4Config,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
)

from fsdp_qlora import build
from fsdp_qlora.adapters import trainable_parameters
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import collate, collate_packed, num_trained_tokens, on_device
from fsdp_qlora.dist import full_tensor
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from fsdp_qlora.model import attention
from fsdp_qlora.model.attention_kernels import apply_attention_tiles
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.training.step import compute_device

from .parts import rest
from .ranks import run_ranks
from .test_checkpointing_policy import Calls
from .tiny import RANK, SEED, TARGETS, padded_batch, save_tiny, tiny_rows
from .tokenizers import VOCAB_SIZE, save_tokenizer

CPU = torch.device("cpu")
WINDOW = 5  # shorter than most rows
FAMILIES = {
    "llama": {},
    "mistral": dict(sliding_window=WINDOW),
    "qwen3": {},
    "qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
}
ROWS = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in tiny_rows(1, 6)[0]]
WAYS = ("varlen", "sdpa", "eager")
BINS = [ROWS[:3], ROWS[3:5], ROWS[5:]]  # of unequal length, so that there is padding


# ---- torch's operator on a CPU -----------------------------------------------------------------


def probabilities(q, k, scale, window):
    """softmax over the keys of one row: (H, T, T) of q (T, H, D) and k (T, H, D)."""
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((window[0] < 0) | (distance <= window[0]))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def per_query_head(x, heads):
    return x.repeat_interleave(heads // x.shape[1], 1)


@varlen._varlen_attn.register_kernel("cpu")
def forward_kernel(q, k, v, cu, _, longest, __, is_causal, scale, window, *more):
    assert window[1] == 0 and longest >= cu.diff().max() and cu[-1] == len(q)
    out, (k, v) = torch.empty_like(q), (per_query_head(x, q.shape[1]) for x in (k, v))
    for a, b in pairwise(cu.tolist()):
        p = probabilities(q[a:b], k[a:b], scale, window)
        out[a:b] = torch.einsum("hqk,khd->qhd", p, v[a:b])
    return out, q.new_zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward_kernel(d_out, q, k, v, out, lse, cu, _, longest, __, is_causal, rng, scale, window):
    heads, kv_heads, size = q.shape[1], *k.shape[1:]
    k, v = (per_query_head(x, heads) for x in (k, v))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for a, b in pairwise(cu.tolist()):
        p = probabilities(q[a:b], k[a:b], scale, window)
        dv[a:b] = torch.einsum("hqk,qhd->khd", p, d_out[a:b])
        dp = torch.einsum("qhd,khd->hqk", d_out[a:b], v[a:b])
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * (scale or size**-0.5)
        dq[a:b] = torch.einsum("hqk,khd->qhd", ds, k[a:b])
        dk[a:b] = torch.einsum("hqk,qhd->khd", ds, q[a:b])
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))


# ---- packed equals unpacked --------------------------------------------------------------------


def loss_and_gradients(model, batches) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The token-weighted loss over all batches, and its gradients, gathered."""
    trained = sum(num_trained_tokens(batch) for batch in batches)
    device = compute_device(model)
    losses = [
        model(**on_device(batch, device), num_items_in_batch=trained).loss for batch in batches
    ]
    sum(losses).backward()
    gradients = {n: full_tensor(p.grad).cpu() for n, p in trainable_parameters(model).items()}
    return sum(losses).detach().cpu(), gradients


def built_model(folder: str, way: str | None, device: torch.device = CPU, **settings):
    """A model of the product that packs in one of WAYS, or not, and whose B are not zero."""
    attention._why_not_varlen = lambda *_: "" if way == "varlen" else "is another way"
    config = RunConfig(
        **dict(
            model_name=folder,
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            packing=way is not None,
            attn_implementation="eager" if way == "eager" else "sdpa",
        )
        | settings
    )
    model = build.build_model(config, device)
    assert model.config._attn_implementation == (way or "sdpa")
    generator = torch.Generator().manual_seed(1)
    for name, p in trainable_parameters(model).items():
        if ".lora_B." in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def packed_and_alone(folder: str) -> dict:
    """Loss and gradients of rows alone, and of the same rows packed in every way."""
    alone, packed, results = [collate([row], 0) for row in ROWS], [collate_packed(BINS, 0)], {}
    for train_type in ("lora", "qlora"):
        reference = loss_and_gradients(built_model(folder, None, train_type=train_type), alone)
        for way in WAYS:
            for recompute in (False, True):
                model = built_model(
                    folder, way, train_type=train_type, use_gradient_checkpointing=recompute
                )
                results[train_type, way, recompute] = loss_and_gradients(model, packed), reference
    return results


@pytest.mark.parametrize("family", [f if f == "mistral" else rest(f) for f in FAMILIES])
def test_packed_rows_have_the_loss_and_gradients_of_the_same_rows_alone(family, tmp_path):
    (results,) = run_ranks(packed_and_alone, 1, save_tiny(tmp_path, family, **FAMILIES[family]))
    assert len(results) == 12
    for case, (packed, reference) in results.items():
        assert all(g.any() for g in reference[1].values())
        torch.testing.assert_close(
            packed, reference, rtol=1e-5, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}"
        )


def outputs_of_changed_rows(folder: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of packed rows, and of the same with every token of the second row changed."""
    changed = [[BINS[0][0], ((BINS[0][1][0] + 1) % 97, BINS[0][1][1]), BINS[0][2]], *BINS[1:]]
    pairs = []
    for way in WAYS:
        model = built_model(folder, way).eval()
        with torch.no_grad():
            pairs.append(
                [model(**inputs(collate_packed(bins, 0))).logits for bins in (BINS, changed)]
            )
    return pairs


def inputs(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "labels"}


def test_no_token_sees_another_row(tmp_path):
    (pairs,) = run_ranks(outputs_of_changed_rows, 1, save_tiny(tmp_path))
    start = len(ROWS[0][0])
    own = slice(start, start + len(ROWS[1][0]))
    for before, after in pairs:
        same = (before == after).all(-1)
        assert not same[0, own].any()
        same[0, own] = True
        assert same.all()


def test_padding_on_the_right_needs_no_mask(tmp_path):
    for family, settings in FAMILIES.items():
        folder = save_tiny(tmp_path / family, family, **settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = tiny_rows(1, 6)[0]
        masked = padded_batch(rows)
        with torch.no_grad():
            without = model(**inputs(collate(ROWS, 0))).logits
            reference = model(**inputs(masked)).logits
        real = masked["attention_mask"].bool()
        assert not real.all()
        torch.testing.assert_close(without[real], reference[real], rtol=1e-5, atol=1e-5)


# ---- compiled blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("recompute, tiles", [(False, 1), (True, 1), rest(True, 2)])
@pytest.mark.parametrize("way", ["varlen", "sdpa"])
def test_compiled_blocks_have_no_graph_break_and_equal_results(way, recompute, tiles, tmp_path):
    """Later batches have other numbers and lengths of rows: one more graph serves them all."""
    folder = save_tiny(tmp_path, "mistral", sliding_window=WINDOW)
    batches = [
        collate_packed(bins, 0, pad_to=48) for bins in (BINS[:2], BINS[1:], [ROWS[:1], ROWS[1:4]])
    ]
    gradients, graphs = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=way, use_cache=False
        ).train()
        apply_attention_tiles(model, tiles if compiled else 1, ["recompute_all"] * 2)
        apply_activation_policy(model, "recompute_all" if recompute else "keep_all")
        for block in decoder_blocks(model) if compiled else []:
            block.forward = torch.compile(
                block.forward, fullgraph=True, backend="aot_eager", dynamic=tiles > 1 or None
            )
        gradients.append([])
        for batch in batches:
            model(**batch).loss.backward()
            gradients[-1].append({n: p.grad.clone() for n, p in model.named_parameters()})
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert graphs[3] and graphs[4] == graphs[5]


@pytest.mark.parametrize("policy, forwards", [("recompute_all", 4), ("keep_attention", 2)])
def test_attention_of_packed_rows_is_kept_where_the_policy_says_so(policy, forwards, tmp_path):
    """2 blocks, whose attention runs once, or again in backward."""
    model = AutoModelForCausalLM.from_pretrained(
        save_tiny(tmp_path), use_cache=False, attn_implementation="varlen"
    ).train()
    apply_activation_policy(model, policy)
    with Calls() as mode:
        model(**collate_packed(BINS, 0)).loss.backward()
    assert mode.counts["torch_attn::_varlen_attn"] == forwards
    assert mode.counts["torch_attn::_varlen_attn_backward"] == 2


# ---- some heads after the others ---------------------------------------------------------------


def adapted(folder: str, way: str):
    """transformers' model with PEFT's adapters, none of them zero."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=way, use_cache=False
    )
    return get_peft_model(
        model, LoraConfig(target_modules=TARGETS, init_lora_weights=False)
    ).train()


@pytest.mark.parametrize(
    "tiles, parts, policy",
    [
        (2, 2, "recompute_all"),
        (3, 2, "keep_attention"),
        (8, 4, "keep_attention"),
        (8, 1, "keep_all"),
    ],
)
def test_attention_of_some_heads_after_the_others_equals_whole_attention(
    tiles, parts, policy, tmp_path
):
    """8 heads with 4 for keys and values, in 2 blocks; packed, in the same line with a mask, and alone.

    A block that keeps everything is left as it is."""
    folder = save_tiny(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    alone, packed = [collate([row], 0) for row in ROWS], [collate_packed(BINS, 0)]
    reference = loss_and_gradients(adapted(folder, "eager"), alone)
    op = dict(sdpa="aten::_scaled_dot_product_flash_attention_for_cpu")
    op |= dict(varlen="torch_attn::_varlen_attn")
    for way, batches in (("varlen", packed), ("sdpa", packed), ("sdpa", alone)):
        model = apply_attention_tiles(adapted(folder, way), tiles, [policy] * 2)
        apply_activation_policy(model, policy)
        with Calls() as mode:
            found = loss_and_gradients(model, batches)
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
        forwards = 2 if policy == "recompute_all" else 1
        assert mode.counts[op[way]] == 2 * parts * len(batches) * forwards
        assert mode.counts[f"{op[way]}_backward"] == 2 * parts * len(batches)


# ---- whole runs --------------------------------------------------------------------------------


def trained_losses(argvs: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and what was printed, of `fsdp-qlora train` for each command line, in this rank."""
    from fsdp_qlora.cli import main

    results = []
    for argv in argvs:
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            code = main(["train", *argv])
        results.append((code, text.getvalue()))
    return results


def test_a_packed_run_on_two_ranks_equals_a_padded_run_on_one(tmp_path):
    folder, rows = save_tiny(tmp_path, vocab_size=VOCAB_SIZE), tmp_path / "rows.jsonl"
    save_tokenizer(folder)
    rows.write_text(
        "".join(
            json.dumps(dict(prompt=f"{i} plus {i}?", completion=f"{2 * i} " * (i % 4) + "done"))
            + "\n"
            for i in range(16)
        )
    )

    def command(name, *more):
        return [
            "--model_name",
            folder,
            "--dataset",
            str(rows),
            "--precision",
            "fp32",
            "--lora_rank",
            "4",
            "--lora_dropout",
            "0",
            "--lr",
            "1e-2",
            "--global_batch_size",
            "8",
            "--context_length",
            "96",
            "--num_epochs",
            "2",
            "--log_to",
            "jsonl",
            "--output_dir",
            str(tmp_path / name),
            *more,
        ]

    padded = run_ranks(trained_losses, 1, [command("padded")], grouped=False)[0]
    packed = run_ranks(trained_losses, 2, [command("packed", "--packing")], grouped=False)[0]
    assert padded[0][0] == packed[0][0] == 0, (padded, packed)
    assert "attention: sdpa (a mask keeps packed rows apart: varlen needs a GPU)" in packed[0][1]

    def column(name, key):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return torch.tensor([r[key] for r in map(json.loads, lines) if r["kind"] == "step"])

    assert len(column("padded", "loss")) == 4
    for key in ("loss", "grad_norm"):
        torch.testing.assert_close(column("packed", key), column("padded", key), rtol=1e-5, atol=0)
    assert torch.equal(column("packed", "trained_tokens"), column("padded", "trained_tokens"))


# ---- refusals ----------------------------------------------------------------------------------


def choose(config, wanted="sdpa", packing=True):
    return attention.choose_attention(wanted, packing, config, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    "config", [MambaConfig(), Qwen3NextConfig(), Lfm2Config(full_attn_idxs=[1])]
)
def test_a_model_with_other_mixers_is_packed_under_a_mask_where_its_code_takes_no_kernel(config):
    assert choose(config)[0] == "sdpa"


@pytest.mark.parametrize("packing", [False, True])
def test_capped_scores_are_refused_where_the_cap_would_be_lost(packing):
    with pytest.raises(ValueError, match="sdpa: gemma2 caps .* use eager or flex_attention"):
        choose(Gemma2Config(), packing=packing)
    assert choose(Gemma2Config(), "eager", packing)[0] == "eager"


@pytest.mark.parametrize("packing", [False, True])
def test_left_to_itself_a_model_takes_a_kernel_that_caps_its_scores_if_it_does(packing):
    gpu = torch.device("cuda")
    assert choose(Gemma2Config(), "auto", packing) == ("eager", "gemma2 caps its attention scores")
    assert attention.choose_attention("auto", packing, Gemma2Config(), gpu, torch.bfloat16)[0] == (
        "flex_attention"
    )
    assert choose(DeepseekV4Config(), "auto", packing) == ("eager", "deepseek_v4 has no sdpa")
    assert choose(LlamaConfig(), "auto", packing)[0] == "sdpa"


def test_varlen_is_refused_without_packing_and_where_it_has_no_kernels():
    with pytest.raises(ValueError, match="varlen needs packed rows; add --packing true"):
        RunConfig(attn_implementation="varlen")
    with pytest.raises(ValueError, match="varlen: needs a GPU; use sdpa"):
        choose(LlamaConfig(), "varlen")
    assert choose(LlamaConfig())[0] == "sdpa"


def test_a_batch_that_does_not_say_where_rows_begin_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path), attn_implementation="varlen")
    with pytest.raises(ValueError, match="--packing true needs cu_seq_lens_q"):
        model(**padded_batch(tiny_rows(1, 2)[0]))


# ---- rows alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, spared", [("llama", True), ("qwen2", True), ("mistral", False), ("falcon", None)]
)
def test_rows_alone_have_the_loss_of_transformers_and_no_question_to_the_gpu(
    family, spared, tmp_path, monkeypatch
):
    """transformers' question is `.all()` of positions; a sliding window still needs its mask.
    Falcon asks nothing, and knows no attention but sdpa and eager.
    """
    import transformers.masking_utils as masks

    window = dict(sliding_window=4) if family == "mistral" else {}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=97,
            use_cache=False,
            **window,
        ),
        attn_implementation="sdpa",
    )
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, labels=ids).loss
    asked, plain = [], masks.find_packed_sequence_indices
    monkeypatch.setattr(
        masks, "find_packed_sequence_indices", lambda p: asked.append(1) or plain(p)
    )
    found = apply_chunked_cross_entropy(model)(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert spared is None or bool(asked) is not spared
    assert model.config._attn_implementation == "sdpa"
