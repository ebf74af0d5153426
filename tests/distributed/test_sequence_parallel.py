"""Ranks that share the tokens of their rows train as one process does.

The reference is plain transformers, bitsandbytes and PEFT in fp32 on the same rows, each by itself. What
differs is the order of sums: over the parts of a row, and over ranks. Losses, and the norms of adapters,
keep to 1e-6 of theirs. But AdamW's first step is as long for a gradient that is nothing but such rounding as
for any other, so trained weights, and norms where all weights train, may be off by some times as much.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_qlora.data.collate import collate
from fsdp_qlora.dist import simulated_world
from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from fsdp_qlora.model.attention_kernels import span_borders
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.model.sequence_parallel import SequenceParallel, apply_sequence_parallel
from tests.distributed.test_full_bins import BINS, CONTEXT, data, reference, train_each  # noqa: F401
from tests.distributed.test_parity import flat, relative
from tests.distributed.test_rotary_scaling import ORIGINAL, SCALINGS
from tests.families import family_config, save_family
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny
from tests.tokenizers import VOCAB_SIZE, save_chat_model, save_tokenizer

STEPS = 8
PACKED = dict(packing=True)
PADDED = dict(global_batch_size=BINS)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "full bins": dict(PACKED),
    "padded": dict(PADDED),
    "streamed": dict(packing=True, stream=True, shuffle_buffer=16),
    "ddp": dict(PACKED, sharding_strategy="ddp"),
    "offloaded": dict(PADDED, use_cpu_offload=True, use_activation_cpu_offload=True),
    "compiled": dict(PACKED, compile=True, activation_policy="keep_linears"),
    "eager attention": dict(PACKED, attn_implementation="eager"),
    "tiled": dict(PADDED, mlp_tiles=2, use_gradient_checkpointing=True),
    "NF4": dict(PACKED, train_type="qlora"),
    "NF4, padded, offloaded": dict(PADDED, train_type="qlora", use_cpu_offload=True),
    "full": dict(PACKED, train_type="full"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def with_windows(tmp_path_factory):
    """A model that sees 8 tokens back."""
    return save_chat_model(
        tmp_path_factory.mktemp("mistral"), family="mistral", num_hidden_layers=2, sliding_window=8
    )


def shared(cases: dict[str, dict], world: int, size: int) -> dict[str, dict]:
    """The cases with rows shared by `size` of `world` ranks, and as many bins a step as one rank has."""
    given = dict(batch_size=BINS * size // world, save_model=True, max_steps=STEPS)
    given |= dict(sequence_parallel=size)
    return {name: given | case for name, case in cases.items()}


def held_out(folder: str, rows: str, size: int) -> tuple[float, int, list]:
    """Loss and tokens of held-out rows, with rows shared by `size` ranks; answers to three prompts."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import open_source, tokenize_rows
    from fsdp_qlora.observe.evaluate import held_out_loss
    from fsdp_qlora.observe.samples import _greedy_answers
    from fsdp_qlora.preflight.run_data import run_tokenizer

    config = RunConfig(
        model_name=folder, train_type="lora", precision="fp32", sequence_parallel=size, device="cpu"
    )
    model = build_model(config, torch.device("cpu"))
    dataset = tokenize_rows(
        open_source(rows).rows(), run_tokenizer(config), context_length=CONTEXT, train_on="all"
    )
    device, prompts = torch.device("cpu"), [dataset[i][0][:4].tolist() for i in range(3)]
    found = held_out_loss(model, dataset, device, batch_size=3, ranks_per_row=size)
    return *found, _greedy_answers(model, prompts, device, max_new_tokens=4, stops=())


def check(folder, rows, out: Path, found: list[dict], cases: dict, what: str = "", **model):
    """Every rank's losses and norms, and what was saved under `out`, against one process."""
    for name, case in cases.items():
        kind = case.get("train_type", "lora")
        losses, norms, weights = reference(folder, rows, found[0][name]["rows"], kind, **model)
        for rank in found:
            assert rank[name]["rows"] == found[0][name]["rows"], (name, what)
            assert relative(rank[name]["losses"], losses) < 1e-6, (name, what)
            assert relative(rank[name]["norms"], norms) < (1e-5 if kind == "full" else 1e-6), name
        weights = {key.replace(".default", ""): value for key, value in weights.items()}
        saved = trained_of(out / name)
        assert saved.keys() == weights.keys(), (name, what)
        error = relative(flat(saved, weights), flat(weights, weights))
        assert error < (1e-4 if kind == "full" else 1e-5), (name, what)


def with_heads(folder: Path, **heads: tuple[int, int]) -> dict[str, str]:
    """Models with so many heads, and key-value heads, by name."""
    return {
        name: save_chat_model(
            folder / name,
            num_hidden_layers=2,
            num_attention_heads=queries,
            num_key_value_heads=keys,
            hidden_size=8 * queries,
        )
        for name, (queries, keys) in heads.items()
    }


def train_models(out: str, models: dict[str, str], data: str, cases: dict) -> dict:  # noqa: F811
    """`train_each` of each model, by name."""
    return {name: train_each(model, data, f"{out}/{name}", cases) for name, model in models.items()}


def check_models(train, world: int, models: dict, rows, out: Path, cases: dict, **model):
    """`train_models`, or one made of it, on ranks that all share rows, against one process."""
    found = run_ranks(train, world, str(out), models, rows, shared(cases, world, world))
    for name, folder in models.items():
        of_model = [rank[name] for rank in found]
        check(folder, rows, out / name, of_model, cases, name, **model)


def trained_of(output: Path) -> dict:
    """The adapter, or the weights, that a run saved."""
    (file,) = [
        f
        for name in ("adapter_model", "model")
        for f in output.rglob(f"{name}.safetensors")
        if "checkpoint" not in str(f.relative_to(output))
    ]
    return load_file(file)


QUICK = ("full bins", "NF4, padded, offloaded")


@pytest.mark.parametrize("names", [QUICK, rest([name for name in CASES if name not in QUICK])])
def test_2_ranks_that_share_rows_have_the_losses_and_norms_of_one_process(
    folder,
    data,  # noqa: F811
    tmp_path,
    names,
):
    cases = {name: CASES[name] for name in names}
    found = run_ranks(train_each, 2, folder, data, str(tmp_path), shared(cases, 2, 2))
    check(folder, data, tmp_path, found, cases)


@pytest.mark.parametrize("world, heads, keys", [(2, 4, 1), rest(4, 6, 2)])
def test_a_block_whose_ranks_share_rows_of_any_length_is_one_graph(world, heads, keys):
    """With heads for every rank, and with more ranks than divide them. Where a graph breaks, the whole
    block would run eager, with the same results."""
    sizes = dict(hidden_size=8 * heads, intermediate_size=16, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=keys)
    model = AutoModelForCausalLM.from_config(config).train()
    with simulated_world(world, world):
        apply_chunked_cross_entropy(model, apply_sequence_parallel(model, world))
        (block,) = decoder_blocks(model)
        block.forward = torch.compile(
            block.forward, dynamic=True, fullgraph=True, backend="eager"
        )  # which raises an error where a graph breaks
        for tokens in (16, 21):
            ids = torch.ones(2, tokens, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def attend_in_tiles(out: str, models: dict[str, str], data: str, cases: dict) -> dict:  # noqa: F811
    """`train_models` with attention in as many tiles as long rows have it, of one key-value head each.

    Of which one model's has two query heads, the other's one.
    """
    from fsdp_qlora.estimate import resolve

    sys.modules[resolve.__module__]._TOKENS_OF_TILE = 1
    attend, heads = torch.nn.functional.scaled_dot_product_attention, set()

    def watched(query, *args, **kwargs):
        if query.requires_grad:  # not that of a trial
            heads.add(query.shape[1])
        return attend(query, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = watched
    found = train_models(out, models, data, cases)
    assert heads == {1, 2}, heads
    return found


@pytest.mark.parametrize("world", [2, rest(4)])
def test_tiles_of_mlps_and_of_heads_change_nothing_where_ranks_share_rows(data, tmp_path, world):  # noqa: F811
    """With several key-value heads for each rank, and where its queries are spans of all heads."""
    models = with_heads(tmp_path, many=(16, 8), odd=(3, 3))
    tiled = dict(mlp_tiles=2, use_gradient_checkpointing=True, max_steps=4)
    cases = dict(packed=PACKED | tiled, padded=PADDED | tiled)
    check_models(attend_in_tiles, world, models, data, tmp_path, cases)


def losses_of_parts(models: list[str], batches: list[list[list[int]]]) -> list[float]:
    """Of each model, the loss of the rows of each batch, shared by all ranks."""
    found = []
    for rows, name in product(batches, models):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()
        sequence = apply_sequence_parallel(model, dist.get_world_size())
        apply_chunked_cross_entropy(model, sequence)
        batch = collate([(torch.tensor(row), torch.tensor(row)) for row in rows], 0)
        loss = model(**batch, num_items_in_batch=1, use_cache=False).loss
        loss.backward()
        dist.all_reduce(loss := loss.detach())
        found.append(loss.item())
    return found


def test_frequencies_that_follow_a_rows_length_are_those_of_the_whole_row(tmp_path):
    """Also where a part of it is short enough for other ones, and a row is shorter than the ranks."""
    longrope = dict(family="phi3", pad_token_id=0, original_max_position_embeddings=ORIGINAL)
    dynamic = dict(max_position_embeddings=ORIGINAL)
    models = [
        save_tiny(tmp_path / "longrope", **longrope, rope_parameters=SCALINGS["longrope"]),
        save_tiny(tmp_path / "dynamic", **dynamic, rope_parameters=SCALINGS["dynamic"]),
        save_tiny(tmp_path / "one head", num_attention_heads=1, num_key_value_heads=1),
    ]
    batches = [[[*range(3, 3 + n)] for n in lengths] for lengths in ((2, 1), (ORIGINAL + 9, 3))]
    expected = []
    for rows, name in product(batches, models):
        batch = padded_batch([(row, row) for row in rows])
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        of_token = (logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        expected.append(torch.nn.functional.cross_entropy(*of_token, reduction="sum").item())
    for found in run_ranks(losses_of_parts, 2, models, batches):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cases", [dict(packed=PACKED), rest(dict(padded=PADDED))])
def test_windows_end_where_they_do_in_whole_rows(with_windows, data, tmp_path, cases):  # noqa: F811
    found = run_ranks(train_each, 2, with_windows, data, str(tmp_path), shared(cases, 2, 2))
    check(with_windows, data, tmp_path, found, cases)


@pytest.mark.slow
def test_attention_sinks_go_with_their_heads(data, tmp_path):  # noqa: F811
    model = save_family(tmp_path / "model", "gpt-oss", vocab_size=VOCAB_SIZE)
    save_tokenizer(model)
    adapted = dict(lora_target_modules=",".join(ATTENTION))
    cases = dict(packed=PACKED | adapted, padded=PADDED | adapted)
    found = run_ranks(train_each, 2, model, data, str(tmp_path), shared(cases, 2, 2))
    check(model, data, tmp_path, found, cases, targets=ATTENTION)
    sinks = [v for k, v in load_file(f"{model}/model.safetensors").items() if "sinks" in k]
    assert len(sinks) == 2 and all(len(v) == len(set(v.tolist())) for v in sinks)


@pytest.mark.parametrize("size", [rest(2), slow(4)])
def test_4_ranks_share_rows_by_two_or_all_of_them_with_fewer_key_value_heads(
    folder,
    data,  # noqa: F811
    tmp_path,
    size,
):
    cases = {
        "full bins": PACKED,
        "hybrid": dict(PADDED, sharding_strategy="hybrid_full_shard", shard_group_size=2),
        "hybrid, offloaded, NF4": dict(
            PACKED,
            sharding_strategy="hybrid_full_shard",
            shard_group_size=2,
            train_type="qlora",
            use_cpu_offload=True,
        ),
    }
    found = run_ranks(train_each, 4, folder, data, str(tmp_path), shared(cases, 4, size))
    check(folder, data, tmp_path, found, cases, f"by {size}")
    assert CONTEXT % size == 0 and json.loads(open(f"{folder}/config.json").read())[
        "num_key_value_heads"
    ] in (1, 2)


SPANS = ("full bins", "padded", "compiled", "eager attention", "NF4, padded, offloaded")


@pytest.mark.parametrize(
    "world, heads, names", [(2, 1, ["padded"]), rest(2, 1, SPANS), slow(4, 2, SPANS)]
)
def test_more_ranks_than_heads_share_rows(data, tmp_path, world, heads, names):  # noqa: F811
    """A rank's queries are two spans of each row, over keys and values that are gathered."""
    sizes = dict(num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=1)
    few = save_chat_model(tmp_path / "few", **sizes)
    cases = {name: CASES[name] for name in names}
    found = run_ranks(train_each, world, few, data, str(tmp_path), shared(cases, world, world))
    check(few, data, tmp_path, found, cases)
    if world == 2 and len(names) > 1:
        windows = save_chat_model(tmp_path / "mistral", family="mistral", sliding_window=8, **sizes)
        cases = dict(windows=PADDED)
        found = run_ranks(train_each, 2, windows, data, str(tmp_path), shared(cases, 2, 2))
        check(windows, data, tmp_path, found, cases)


def test_circles_of_ranks_have_every_token_once_and_as_many_scores_to_compute():
    circles = 3
    for tokens in (12, 27, 96):
        shares = []
        for turn in range(circles):
            of = SimpleNamespace(circles=circles, turn=turn)
            shares.append(SequenceParallel.spans(of, tokens))
        places = sorted(t for spans in shares for s in spans for t in range(tokens)[s])
        assert places == list(range(tokens))
        scores = [sum(t + 1 for s in spans for t in range(tokens)[s]) for spans in shares]
        assert max(scores) - min(scores) <= tokens * (tokens // circles % 2)


def test_rows_that_are_packed_begin_where_they_do_within_a_span():
    """Two bins of 8 tokens: rows of 3 and 5, and of 8; of which tokens 2 to 6 are asked for."""
    borders = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    assert span_borders(borders, 8, 2, 6).tolist() == [0, 1, 4, 8]
    assert span_borders(borders, 8, 0, 6).tolist() == [0, 3, 6, 12]
    assert span_borders(borders, 8, 4, 6).tolist() == [0, 0, 2, 4]


def test_held_out_rows_have_the_loss_of_one_process_and_prompts_its_answers(folder, data):  # noqa: F811
    (alone,) = run_ranks(held_out, 1, folder, data, 1)
    for loss, *others in run_ranks(held_out, 2, folder, data, 2):
        assert others == [*alone[1:]] and loss == pytest.approx(alone[0], rel=1e-5)
    assert all(len(answer) == 4 for answer in alone[2])


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(sequence_parallel=3, context_length=64), "not a multiple of it; use 63"),
        (dict(sequence_parallel=2, cuda_graphs=True), "leave one of them out"),
        (dict(sequence_parallel=0), "1 or more"),
    ],
)
def test_rows_that_can_not_be_shared_are_refused_in_one_line(settings, message):
    from fsdp_qlora.config import RunConfig

    with pytest.raises(ValueError, match=message):
        RunConfig(model_name="m", **settings)


def test_models_and_ranks_that_can_not_share_rows_are_named():
    from transformers import (
        BloomConfig,
        DogeConfig,
        Qwen3NextConfig,
        RecurrentGemmaConfig,
    )

    from fsdp_qlora.model.sequence_parallel import check_sequence_parallel

    def said(config, size: int, world: int) -> str:
        with torch.device("meta"), pytest.raises(ValueError) as caught:
            check_sequence_parallel(AutoModelForCausalLM.from_config(config), size, world)
        return str(caught.value)

    small = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    assert "3 ranks are not a multiple" in said(LlamaConfig(**small), 2, 3)
    flexible = LlamaConfig(**small, attn_implementation="flex_attention")
    assert "4 heads to divide with flex_attention; use one of [2, 4]" in said(flexible, 3, 3)
    assert "no other attention" in said(BloomConfig(hidden_size=64, n_layer=1, n_head=4), 2, 2)
    experts = dict(num_experts=4, moe_intermediate_size=32, intermediate_size=64)
    assert "linear_attention" in said(Qwen3NextConfig(**small | experts), 2, 2)
    assert "does not tell its attention" in said(family_config("Nemotron"), 2, 2)
    assert "makes masks from the tokens" in said(DogeConfig(**small), 2, 2)
    mixers = dict(lru_width=64, block_types=["recurrent", "attention"], num_key_value_heads=1)
    several = said(RecurrentGemmaConfig(**small | mixers), 2, 2)
    assert "layers of recurrent_gemma other than attention see several tokens" in several
    dropping = LlamaConfig(**small, attention_dropout=0.1)
    assert "attention dropout" in said(dropping, 3, 3) and "use one of [2, 4]" in said(
        dropping, 3, 3
    )


@pytest.mark.slow
def test_a_run_goes_on_with_rows_shared_by_another_number_of_ranks(folder, data, tmp_path):  # noqa: F811
    moved, whole_run = str(tmp_path / "moved"), {"full": PACKED | dict(max_steps=STEPS)}
    (whole,) = run_ranks(train_each, 1, folder, data, str(tmp_path / "whole"), whole_run)
    run_ranks(train_each, 2, folder, data, moved, shared({"full": PACKED}, 2, 2), 5)
    found = run_ranks(train_each, 2, folder, data, moved, shared({"full": PACKED}, 2, 1))
    lines = (tmp_path / "moved" / "full" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]
    assert losses == pytest.approx(whole["full"]["losses"], rel=1e-5)
    assert all(rank["full"]["rows"] == whole["full"]["rows"][4:] for rank in found)
