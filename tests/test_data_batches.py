"""Padding, packing, and the sharing of an optimizer step among ranks and micro-batches."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_qlora.data import (
    BinSampler,
    DataReport,
    Row,
    StepLoader,
    StepSampler,
    TokenizedDataset,
    block_diagonal_mask,
    choose_pad_token_id,
    collate,
    collate_packed,
    filler,
    num_trained_tokens,
    pack,
    rank_share,
    tokenize_rows,
)
from fsdp_qlora.data.packing import balanced

from .test_data_tokenizers import chat, make_tokenizer


def example(length, start=10, prompt=1):
    ids = torch.arange(start, start + length)
    return ids, torch.where(torch.arange(length) < prompt, -100, ids)


# ---- padding ---------------------------------------------------------------------------------


def test_padding_is_on_the_right_and_untrained_even_where_pad_is_a_real_token():
    pad = 12  # also the last token of the first row
    batch = collate([example(3), example(5)], pad_token_id=pad)
    assert batch["input_ids"].tolist() == [[10, 11, 12, pad, pad], [10, 11, 12, 13, 14]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, -100], [-100, 11, 12, 13, 14]]
    assert set(batch) == {"input_ids", "labels"}  # positions and masks are the model's own business
    assert num_trained_tokens(batch) == 6


def test_the_width_is_rounded_up_or_fixed():
    assert collate([example(5)], 0, pad_to_multiple_of=8)["input_ids"].shape == (1, 8)
    assert collate([example(5)], 0, pad_to=11)["labels"].shape == (1, 11)
    with pytest.raises(ValueError, match="pad_to=4: a row has 5 tokens"):
        collate([example(5)], 0, pad_to=4)


def test_the_pad_token_is_one_that_the_model_embeds():
    assert choose_pad_token_id(make_tokenizer(pad="<unk>")) == 2
    assert choose_pad_token_id(make_tokenizer()) == 1  # no pad, no unk: EOS
    added = make_tokenizer(pad="[PAD]")
    size = added.pad_token_id  # the model's embedding ends where the added token begins
    assert choose_pad_token_id(added) == size and choose_pad_token_id(added, size) == 1
    assert choose_pad_token_id(make_tokenizer(eos=None)) == 0


# ---- packing ---------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 50), max_size=60), seed=st.integers(0, 3))
def test_packing_uses_every_row_once_and_no_bin_overflows(lengths, seed):
    bins = pack(lengths, 50, seed)
    assert sorted(index for bin in bins for index in bin) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in bin) <= 50 for bin in bins)
    # Best fit never leaves two bins that would fit into one.
    loads = sorted(sum(lengths[index] for index in bin) for bin in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > 50
    assert bins == pack(lengths, 50, seed)


def test_packing_fills_bins_exactly_where_it_can():
    assert sorted(map(sorted, pack([6, 4, 7, 3, 5, 5], 10))) == [[0, 1], [2, 3], [4, 5]]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80), parts=st.integers(1, 9))
def test_balanced_bins_hold_each_row_once_within_the_capacity(lengths, parts):
    packed = pack(lengths, 50)
    bins = balanced(lengths, packed, 50, parts)
    assert sorted(row for bin in bins for row in bin) == list(range(len(lengths)))
    assert all(bin and sum(lengths[row] for row in bin) <= 50 for bin in bins)
    assert bins == packed or len(bins) == min(-(-len(packed) // parts) * parts, len(lengths))


def test_ranks_that_compute_beside_each_other_get_the_same_number_of_tokens():
    """Three full bins on two ranks would be two rounds, one of them with a rank that idles."""
    lengths = [10] * 30  # bins of 100
    bins = balanced(lengths, pack(lengths, 100), 100, parts=4)
    assert sorted(len(bin) for bin in bins) == [7, 7, 8, 8]
    full = [[0, 1], [2, 3, 4]]  # 5 5 and 4 3 3: the longest into the emptiest does not fit
    assert balanced([5, 5, 4, 3, 3], full, 10, parts=2) == full


def test_a_row_longer_than_a_bin_is_refused():
    with pytest.raises(ValueError, match="a row of 11 tokens does not fit a bin of 10"):
        pack([11], 10)


def test_a_packed_batch_keeps_its_rows_apart():
    batch = collate_packed(
        [[example(3), example(2, 20)], [example(4, 30)]], pad_token_id=0, pad_to_multiple_of=6
    )
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 0], [30, 31, 32, 33, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, 11, 12, -100, 21, -100],
        [-100, 31, 32, 33, -100, -100],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 3, 5, 6, 10, 12]
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == 4


def test_the_first_token_of_a_packed_row_is_never_a_target():
    whole = example(3, prompt=0)  # a label at position 0, as an outside data set may have
    labels = collate_packed([[whole, whole]], pad_token_id=0)["labels"]
    assert labels.tolist() == [[-100, 11, 12, -100, 11, 12]]


def test_the_block_diagonal_mask_is_causal_within_sequences():
    position_ids = torch.tensor([[0, 1, 0, 0, 1]])
    allowed = block_diagonal_mask(position_ids)
    assert allowed.shape == (1, 1, 5, 5)
    assert allowed[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    added = block_diagonal_mask(position_ids, torch.float32)
    assert (added[allowed] == 0).all() and (added[~allowed] == torch.finfo(torch.float32).min).all()


def tiny_llama(vocab_size=97):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def test_packed_padded_and_single_rows_give_the_same_logits():
    model, examples = tiny_llama(), [example(5), example(3, 40), example(4, 60)]
    with torch.no_grad():
        single = [model(input_ids=ids[None]).logits[0] for ids, _ in examples]
        batch = collate(examples, pad_token_id=0)
        padded = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        packed = collate_packed([examples], pad_token_id=0, pad_to=14)
        mask = block_diagonal_mask(packed["position_ids"], torch.float32)
        joined = model(
            input_ids=packed["input_ids"], attention_mask=mask, position_ids=packed["position_ids"]
        ).logits[0]
    for row, logits in enumerate(single):
        torch.testing.assert_close(padded[row, : len(logits)], logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined[:12], torch.cat(single), rtol=1e-4, atol=1e-5)
    assert joined.isfinite().all()


# ---- steps -----------------------------------------------------------------------------------


@given(num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 12), epochs=st.integers(1, 3))
def test_every_row_is_used_once_per_epoch(num_rows, rows_per_step, epochs):
    sampler = StepSampler(num_rows, rows_per_step, seed=3, epochs=epochs)
    steps = list(sampler)
    assert len(steps) == sampler.total_steps == len(sampler)
    for epoch in range(epochs):
        in_epoch = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        assert sorted(row for rows in in_epoch for row in rows) == list(range(num_rows))
        assert all(len(rows) == rows_per_step for rows in in_epoch[:-1])


def test_each_epoch_and_each_seed_has_its_own_order():
    def orders(seed):
        return list(StepSampler(50, 50, seed=seed, epochs=2))

    first, second = orders(1)
    assert first != second and orders(1) == [first, second] and orders(2)[0] != first
    assert list(StepSampler(5, 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_max_steps_is_exact_and_goes_through_as_many_epochs_as_it_takes():
    sampler = StepSampler(5, 2, epochs=1, max_steps=7)
    assert len(list(sampler)) == 7 and sampler.epoch(6) == 2
    assert len(list(StepSampler(5, 2, epochs=9, max_steps=1))) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_rows=0, rows_per_step=1), "no row to train on"),
        (dict(num_rows=5, rows_per_step=0), "--global_batch_size 0"),
        (dict(num_rows=5, rows_per_step=1, epochs=0), "--num_epochs 0"),
        (dict(num_rows=5, rows_per_step=1, max_steps=0), "--max_steps 0"),
    ],
)
def test_a_run_without_steps_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepSampler(**arguments)


def test_a_resumed_sampler_goes_on_with_the_next_step():
    whole = list(StepSampler(23, 4, epochs=3))
    sampler = StepSampler(23, 4, epochs=3)
    for _, _ in zip(range(8), sampler, strict=False):
        pass
    resumed = StepSampler(23, 4, epochs=3)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == whole[8:]


@pytest.mark.parametrize("other, flag", [((24, 4), "--dataset"), ((23, 5), "--global_batch_size")])
def test_resuming_with_other_data_or_batch_size_is_refused(other, flag):
    state = StepSampler(23, 4).state_dict()
    with pytest.raises(ValueError, match=f"resume: {flag}"):
        StepSampler(*other).load_state_dict(state)


@given(
    num_rows=st.integers(0, 40),
    world_size=st.integers(1, 5),
    micro_batch_size=st.integers(1, 4),
    with_lengths=st.booleans(),
)
def test_ranks_have_equally_many_micro_batches_and_each_row_once(
    num_rows, world_size, micro_batch_size, with_lengths
):
    rows = list(range(100, 100 + num_rows))
    lengths = [row * 7 % 13 for row in rows] if with_lengths else None
    shares = [
        rank_share(rows, rank, world_size, micro_batch_size, lengths) for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == -(-num_rows // (world_size * micro_batch_size))
    micro_batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in micro_batches for row in batch) == rows
    sizes = {len(batch) for batch in micro_batches}
    assert not sizes or (max(sizes) <= micro_batch_size and max(sizes) - min(sizes) <= 1)


def test_micro_batches_that_run_together_hold_rows_of_similar_length():
    lengths = np.random.default_rng(0).integers(1, 1000, 64)

    def padded_tokens(given):  # (ranks, micro-batches)
        shares = [rank_share(range(64), rank, 4, 2, given) for rank in range(4)]
        return np.array(
            [[2 * max(lengths[row] for row in batch) for batch in share] for share in shares]
        )

    def waiting(padded):  # tokens that the fastest rank waits for, at most
        return (padded.max(0) - padded.min(0)).max()

    balanced, unaware = padded_tokens(lengths), padded_tokens(None)
    assert balanced.sum() < 1.1 * lengths.sum() < unaware.sum()
    assert waiting(balanced) < waiting(unaware) / 2
    assert balanced.sum(1).max() < 1.05 * balanced.sum(1).min()
    assert balanced[:, 0].max() == balanced.max()  # the longest first


# ---- the loader ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset():
    rows = [
        Row(f"row {i}", messages=chat("Hello " * (i % 4), f"the answer is {i} " * (i % 6 + 1)))
        for i in range(23)
    ]
    return tokenize_rows(rows, make_tokenizer("chatml"), context_length=128)


def load(dataset, rank=0, world_size=1, rows_per_step=6, micro_batch_size=2, epochs=1, **options):
    sampler = StepSampler(len(dataset), rows_per_step, seed=5, epochs=epochs)
    return StepLoader(
        dataset, sampler, rank, world_size, micro_batch_size, pad_token_id=0, **options
    )


def trained_ids(steps):
    """How often each token id is a target."""
    labels = torch.cat(
        [batch["labels"][:, 1:].flatten() for step in steps for batch in step.micro_batches]
    )
    return Counter(labels[labels != -100].tolist())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 1), (2, 4), (3, 2), (8, 1)])
def test_any_split_of_a_step_trains_the_same_tokens(dataset, world_size, micro_batch_size, packing):
    whole = list(load(dataset, micro_batch_size=6))
    ranks = [
        list(load(dataset, rank, world_size, micro_batch_size=micro_batch_size, packing=packing))
        for rank in range(world_size)
    ]
    for number, steps in enumerate(zip(*ranks, strict=True)):
        assert trained_ids(steps) == trained_ids([whole[number]])
        assert len({len(step.micro_batches) for step in steps}) == 1
        total = sum(step.num_trained_tokens_local for step in steps)
        assert {step.num_trained_tokens for step in steps} == {total}
        assert {step.num_rows for step in steps} == {whole[number].num_rows}
        assert {step.num_tokens for step in steps} == {whole[number].num_tokens}


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_a_rank_without_rows_gets_a_filler_and_every_rank_the_same_steps(dataset, num_rows):
    few = tokenize_rows(
        [Row("row", messages=chat("Hello", f"{i}")) for i in range(num_rows)],
        make_tokenizer("chatml"),
        context_length=64,
    )
    ranks = [list(load(few, rank, 4, rows_per_step=3, micro_batch_size=1)) for rank in range(4)]
    for steps in zip(*ranks, strict=True):
        assert [len(step.micro_batches) for step in steps] == [1] * 4
        local = [step.num_trained_tokens_local for step in steps]
        assert sum(count > 0 for count in local) == steps[0].num_rows
        idle = [step.micro_batches[0] for step in steps if step.num_trained_tokens_local == 0]
        assert all(batch["input_ids"].shape == (1, 2) for batch in idle)


def test_a_filler_has_a_finite_loss_of_zero_tokens():
    batch = collate([filler(0)], pad_token_id=0)
    assert num_trained_tokens(batch) == 0
    logits = tiny_llama()(input_ids=batch["input_ids"]).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    assert loss == 0 and loss.requires_grad


def test_packing_needs_fewer_lines(dataset):
    def lines(**options):
        return sum(
            len(batch["input_ids"])
            for step in load(dataset, **options)
            for batch in step.micro_batches
        )

    assert lines(packing=True) < lines()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_loader_resumes_from_the_position_of_the_last_step_taken(dataset, num_workers):
    whole = [step.index for step in load(dataset, epochs=3)]
    loader = load(dataset, epochs=3, num_workers=num_workers)
    for step in loader:
        if step.index == 5:
            break  # steps read ahead must not count
    assert loader.sampler.position == 6 and len(loader) == len(whole) - 6
    assert [step.index for step in loader] == whole[6:]
    assert [(step.index, step.epoch) for step in load(dataset, epochs=3)][3:5] == [(3, 0), (4, 1)]


def test_an_error_in_a_thread_reaches_the_loop(dataset):
    with pytest.raises(ValueError, match="pad_to=3"):
        list(load(dataset, pad_to=3))


# ---- full bins ---------------------------------------------------------------------------------


def log_normal(count: int, capacity: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(capacity / 16), 0.8, count)
    return lengths.astype(np.int64).clip(2, capacity)


@pytest.mark.parametrize(
    "count, capacity, per_step, epochs",
    [(1, 64, 4, 2), (7, 64, 1, 3), (3000, 512, 8, 2), (40_000, 2048, 6, 1)],
)
def test_each_row_is_in_one_bin_of_an_epoch_and_bins_are_full(count, capacity, per_step, epochs):
    lengths = log_normal(count, capacity)
    sampler = BinSampler(lengths, capacity, per_step, epochs=epochs)
    steps = [sampler.bins(step) for step in range(len(sampler))]
    by_epoch = [
        [bin for step, bins in enumerate(steps) if sampler.epoch(step) == epoch for bin in bins]
        for epoch in range(epochs)
    ]
    for bins in by_epoch:
        assert sorted(row for bin in bins for row in bin) == list(range(count))
        assert max(int(lengths[bin].sum()) for bin in bins) <= capacity
        if count > 1000:
            assert lengths.sum() / (capacity * len(bins)) > 0.97
    assert by_epoch[0] != by_epoch[-1] or epochs == 1 or count == 1
    assert all(
        len(bins) == per_step
        for step, bins in enumerate(steps[:-1])
        if sampler.epoch(step) == sampler.epoch(step + 1)
    )
    loader = StepLoader(
        tokenized_of_lengths(lengths, capacity), sampler, pad_token_id=0, packing=True
    )
    places = capacity * sum(map(len, by_epoch))
    assert loader.bin_fill(len(sampler)) == pytest.approx(epochs * lengths.sum() / places)
    assert sampler.rows(0) == [row for bin in steps[0] for row in bin]


def test_bins_are_the_same_from_any_position_and_for_any_steps_asked():
    lengths = log_normal(500, 256)
    whole = BinSampler(lengths, 256, 4, epochs=3)
    expected = [whole.bins(step) for step in range(len(whole))]
    for position in (0, 1, len(expected) // 2, len(expected) - 1):
        resumed = BinSampler(lengths, 256, 4, epochs=3)
        resumed.load_state_dict(whole.state_dict() | dict(position=position))
        assert [resumed.bins(step) for step in range(position, len(resumed))] == expected[position:]
    longer = BinSampler(lengths, 256, 4, max_steps=len(expected) + 5)
    assert [longer.bins(step) for step in range(len(expected))] == expected
    assert len(longer) == len(expected) + 5
    for name, flag in dict(capacity="--context_length", bins_per_step="bins per step").items():
        with pytest.raises(ValueError, match=flag):
            resumed.load_state_dict(whole.state_dict() | {name: 3})


@pytest.mark.parametrize("ranks, micro", [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)])
def test_ranks_share_the_same_full_bins_however_many_they_are(ranks, micro):
    dataset = tokenized_of_lengths(np.random.default_rng(0).integers(4, 90, 300), 128)
    sampler = BinSampler(dataset.lengths, 128, 8)
    loaders = [
        StepLoader(dataset, sampler, rank, ranks, micro, pad_token_id=0, packing=True, pad_to=128)
        for rank in range(ranks)
    ]
    for index in range(len(sampler)):
        steps = [loader.step(index) for loader in loaders]
        shapes = {tuple(b["input_ids"].shape) for step in steps for b in step.micro_batches}
        assert shapes == {(micro, 128)}
        rows = sorted(sampler.rows(index))
        assert all(sorted(step.row_ids) == rows and step.num_rows == len(rows) for step in steps)
        trained = sum(step.num_trained_tokens_local for step in steps)
        assert trained == steps[0].num_trained_tokens == int(dataset.trained_counts[rows].sum())
        assert steps[0].num_tokens == int(dataset.lengths[rows].sum())


def tokenized_of_lengths(lengths: np.ndarray, context_length: int) -> TokenizedDataset:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    trained = np.ones(offsets[-1], dtype=bool)
    trained[offsets[:-1]] = False
    return TokenizedDataset(
        np.arange(offsets[-1], dtype=np.int32) % 90,
        trained,
        offsets,
        DataReport(context_length, "all"),
    )


@pytest.mark.parametrize("epochs, steps", [(0.5, 5), (0.1, 1), (1.25, 13), (2, 20), (0.01, 1)])
def test_a_part_of_an_epoch_trains_the_first_steps_of_a_whole_one(epochs, steps):
    whole = StepSampler(40, 4, seed=3, epochs=3)
    part = StepSampler(40, 4, seed=3, epochs=epochs)
    assert part.total_steps == steps
    assert list(part) == [whole.rows(step) for step in range(steps)]


def test_a_part_of_an_epoch_of_bins_counts_the_steps_of_that_epoch():
    lengths = np.random.default_rng(0).integers(5, 60, size=80)
    starts = [BinSampler(lengths, 64, 3, epochs=n).total_steps for n in (1, 2)]
    part = BinSampler(lengths, 64, 3, epochs=1.5)
    assert part.total_steps == starts[0] + math.ceil((starts[1] - starts[0]) / 2)
    whole = BinSampler(lengths, 64, 3, epochs=2)
    assert [part.bins(n) for n in range(len(part))] == [whole.bins(n) for n in range(len(part))]
