"""Streams: the same rows in the same steps on any number of ranks, in little memory, to one end.

Ranks are threads here, which tell each other what real ranks tell through a process group.
"""

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import datasets
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_qlora.data import (
    Source,
    StreamBinSampler,
    StreamLoader,
    StreamSampler,
    num_trained_tokens,
    open_source,
    stream_sampler,
    tokenize_rows,
)
from fsdp_qlora.data.stream_sampler import shuffled
from tests.patience import patience

from .test_data_tokenizers import chat, make_tokenizer

TOKENIZER = make_tokenizer("chatml")
ROOT = Path(__file__).parent.parent


class Ranks:
    """`gather` for ranks that are threads."""

    def __init__(self, world_size):
        self.values, self.barrier = (
            [None] * world_size,
            threading.Barrier(world_size, timeout=patience(30)),
        )

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        everyone = list(self.values)
        self.barrier.wait()
        return everyone


def write_rows(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def conversations(count):
    return [{"messages": chat(f"ask {i}", "say " * (i % 7 + 1) + str(i))} for i in range(count)]


def stream(
    source,
    world_size=1,
    rows_per_step=6,
    micro_batch_size=2,
    state=None,
    stop_after=None,
    loader_options=None,
    bins_per_step=None,
    **sampler_options,
):
    """For each rank, its steps or its error; and the loaders. bins_per_step: of 64 tokens."""
    ranks = Ranks(world_size)

    def run(rank):
        options = dict(shuffle_buffer=10) | sampler_options
        sampler = (
            StreamBinSampler(source, 64, bins_per_step, **options)
            if bins_per_step
            else StreamSampler(source, rows_per_step, **options)
        )
        if state:
            sampler.load_state_dict(state)
        loader = StreamLoader(
            sampler,
            TOKENIZER,
            rank,
            world_size,
            micro_batch_size,
            gather=lambda value: ranks.gather(rank, value),
            pad_token_id=0,
            **{"context_length": 64} | (loader_options or {}),
        )
        steps = []
        try:
            for step in loader:
                steps.append(step)
                if len(steps) == stop_after:
                    break
            return steps, loader, loader.full_report()
        except ValueError as error:
            return steps, loader, error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def trained_rows(*rank_steps):
    """The trained text of every row in a step of each rank, sorted."""
    batches = [batch for step in rank_steps for batch in step.micro_batches]
    return sorted(
        TOKENIZER.decode(labels[labels != -100].tolist())
        for batch in batches
        for labels in batch["labels"]
        if (labels != -100).any()
    )


@pytest.fixture
def rows(tmp_path):
    return open_source(write_rows(tmp_path / "rows.jsonl", conversations(41)))


# ---- order -----------------------------------------------------------------------------------


@given(count=st.integers(0, 50), size=st.integers(1, 60), seed=st.integers(0, 5))
def test_a_buffer_gives_each_item_once_and_none_before_it_can_hold_it(count, size, seed):
    order = list(shuffled(range(count), size, random.Random(seed)))
    assert sorted(order) == list(range(count))
    assert all(item < place + size for place, item in enumerate(order))
    assert order == list(shuffled(range(count), size, random.Random(seed)))


def test_a_buffer_of_one_keeps_the_order():
    assert list(shuffled(range(9), 1, random.Random(0))) == list(range(9))


def test_each_row_is_in_one_step_of_an_epoch_and_epochs_differ(rows):
    ((steps, _, report),) = stream(rows, epochs=2)
    assert [step.index for step in steps] == list(range(14))
    assert [step.num_rows for step in steps] == [6, 6, 6, 6, 6, 6, 5] * 2
    first, second = (
        [row for step in half for row in trained_rows(step)] for half in (steps[:7], steps[7:])
    )
    assert sorted(first) == sorted(second) and len(set(first)) == 41 and first != second
    assert report.rows_read == report.rows_kept == sum(report.lengths.values()) == 41


def test_rows_that_are_read_again_after_a_rollback_are_counted_once(rows):
    sampler = StreamSampler(rows, 6, shuffle_buffer=10)
    loader, before = StreamLoader(sampler, TOKENIZER, context_length=64, pad_token_id=0), None
    for step in loader:
        if step.index == 2:
            before = sampler.state_dict()
        if step.index == 4:
            break
    sampler.load_state_dict(before)
    assert [step.index for step in loader] == [3, 4, 5, 6]
    assert loader.full_report().rows_read == 41


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(rows, world_size, packing):
    options = dict(loader_options=dict(packing=packing))
    ((alone, _, alone_report),) = stream(rows, **options)
    by_rank = stream(rows, world_size, **options)
    for index, steps in enumerate(zip(*(steps for steps, _, _ in by_rank), strict=True)):
        assert len({len(step.micro_batches) for step in steps}) == 1
        assert {step.num_rows for step in steps} == {alone[index].num_rows}
        if not packing:
            assert trained_rows(*steps) == trained_rows(alone[index])
        trained = sum(num_trained_tokens(batch) for step in steps for batch in step.micro_batches)
        assert {trained} == {step.num_trained_tokens for step in (*steps, alone[index])}
        assert trained == sum(step.num_trained_tokens_local for step in steps)
    assert len(alone) == len(by_rank[0][0]) == 7
    for _, _, report in by_rank:
        assert replace(report, dropped={}) == replace(alone_report, dropped={})


def test_packed_bins_that_ranks_compute_beside_each_other_hold_nearly_the_same_tokens(tmp_path):
    """Though all long rows are one rank's to read, and with fewer rows than it would need bins."""
    records = [{"text": "say " * (12 if i % 2 else 2)} for i in range(64)]
    source = open_source(write_rows(tmp_path / "rows.jsonl", records))
    options = dict(packing=True, train_on="all", context_length=60)
    for micro_batch_size in (1, 2):
        by_rank = stream(
            source, 2, rows_per_step=16, micro_batch_size=micro_batch_size, loader_options=options
        )
        ((alone, _, _),) = stream(
            source, rows_per_step=16, micro_batch_size=2 * micro_batch_size, loader_options=options
        )
        for step, *beside in zip(alone, *(steps for steps, _, _ in by_rank), strict=True):
            assert {len(s.micro_batches) for s in beside} == {len(step.micro_batches)}
            rows = [[lengths_in(batch) for batch in s.micro_batches] for s in beside]
            longest = max(max(lengths) for of_rank in rows for lengths in of_rank)
            assert sum(map(sum, rows[0])) + sum(map(sum, rows[1])) == step.num_tokens
            assert all(abs(sum(a) - sum(b)) <= longest for a, b in zip(*rows, strict=True))


def lengths_in(batch) -> list[int]:
    """Lengths of the rows in a packed batch, without those of padding."""
    labels, starts = batch["labels"].flatten(), (batch["position_ids"].flatten() == 0).nonzero()
    return [len(row) for row in labels.tensor_split(starts.flatten()[1:]) if (row != -100).any()]


def test_the_rows_are_those_that_are_tokenised_at_once(rows):
    reference = tokenize_rows(rows.rows(), TOKENIZER, context_length=64)
    ((steps, _, report),) = stream(rows)
    assert report == reference.report
    answers = sorted(TOKENIZER.decode(labels[labels != -100].tolist()) for _, labels in reference)
    assert sorted(row for step in steps for row in trained_rows(step)) == answers
    assert sum(step.num_trained_tokens for step in steps) == reference.trained_counts.sum()


def test_max_steps_ends_a_stream_early_or_repeats_it(rows):
    for max_steps in (3, 7, 17):
        ((steps, _, _),) = stream(rows, max_steps=max_steps)
        assert [step.index for step in steps] == list(range(max_steps))
    assert [step.epoch for step in steps] == [0] * 7 + [1] * 7 + [2] * 3


@pytest.mark.parametrize("done", [1, 6, 7, 9, 14])
def test_a_stream_resumes_on_another_number_of_ranks(rows, done):
    ((whole, _, _),) = stream(rows, epochs=2)
    (_, loader, _), _ = stream(rows, 2, epochs=2, stop_after=done)
    state = json.loads(json.dumps(loader.sampler.state_dict()))
    by_rank = stream(rows, 3, epochs=2, state=state)
    rest = list(zip(*(steps for steps, _, _ in by_rank), strict=True))
    assert [trained_rows(*steps) for steps in rest] == [trained_rows(s) for s in whole[done:]]


def test_a_stream_does_not_resume_with_another_order(rows):
    state = StreamSampler(rows, 6, seed=1).state_dict()
    with pytest.raises(ValueError, match="resume: --seed was 1 .* is 2 now"):
        StreamSampler(rows, 6, seed=2).load_state_dict(state)


# ---- full bins ---------------------------------------------------------------------------------

PACKED = dict(packing=True, train_on="all", pad_to=64)


@pytest.fixture
def short_rows(tmp_path, monkeypatch):
    """Rows of up to 64 tokens, told apart by the last ones; in windows of 30."""
    monkeypatch.setattr(stream_sampler, "BIN_WINDOW", 30)
    draw = random.Random(0)
    records = [
        {"text": "say " * min(19, int(draw.lognormvariate(1.2, 0.8))) + str(number)}
        for number in range(200)
    ]
    return open_source(write_rows(tmp_path / "short.jsonl", records))


def rows_in(*rank_steps):
    """Places in the file of a step's rows, which its ranks must name alike; its bins in any order."""
    (names,) = {tuple(step.row_ids) for step in rank_steps}
    bins = Counter(
        tuple(labels[labels != -100].tolist())
        for step in rank_steps
        for batch in step.micro_batches
        for labels in batch["labels"]
        if (labels != -100).any()
    )
    return names, bins


@pytest.mark.parametrize("bins_per_step", [4, 64])  # 64: more than a window fills
def test_bins_of_a_stream_are_full_and_hold_each_row_once_an_epoch(short_rows, bins_per_step):
    ((steps, loader, report),) = stream(
        short_rows, bins_per_step=bins_per_step, epochs=2, micro_batch_size=4, loader_options=PACKED
    )
    assert [step.index for step in steps] == list(range(len(steps)))
    assert loader.sampler.total_steps is None and report.rows_read == report.rows_kept == 200
    names = [
        [name for step in steps if step.epoch == epoch for name in step.row_ids] for epoch in (0, 1)
    ]
    assert (
        sorted(names[0]) == sorted(names[1]) and len(set(names[0])) == 200 and names[0] != names[1]
    )
    for step in steps:
        shapes = {tuple(batch["input_ids"].shape) for batch in step.micro_batches}
        assert shapes == {(4, 64)} and step.num_rows == len(step.row_ids)
    full = [step for step, after in pairwise(steps) if step.epoch == after.epoch]
    assert all(len(step.micro_batches) * 4 == bins_per_step for step in full)
    if bins_per_step == 4:
        assert sum(s.num_tokens for s in full) > 0.97 * len(full) * 4 * 64


@pytest.mark.parametrize("world_size, micro_batch_size", [(2, 2), (4, 1), (2, 1)])
def test_bins_of_a_stream_are_the_same_in_the_same_steps_on_any_number_of_ranks(
    short_rows, world_size, micro_batch_size
):
    options = dict(bins_per_step=4, loader_options=PACKED)
    ((alone, _, alone_report),) = stream(short_rows, micro_batch_size=4, **options)
    by_rank = stream(short_rows, world_size, micro_batch_size=micro_batch_size, **options)
    together = list(zip(*(steps for steps, _, _ in by_rank), strict=True))
    assert list(map(lambda steps: rows_in(*steps), together)) == [rows_in(step) for step in alone]
    for steps, whole in zip(together, alone, strict=True):
        assert len({len(step.micro_batches) for step in steps}) == 1
        local = sum(step.num_trained_tokens_local for step in steps)
        assert {step.num_trained_tokens for step in (*steps, whole)} == {local}
    assert {report.rows_kept for _, _, report in by_rank} == {alone_report.rows_kept}


def test_a_stream_of_bins_resumes_at_every_step_on_another_number_of_ranks(short_rows):
    options = dict(bins_per_step=4, epochs=2, micro_batch_size=2, loader_options=PACKED)
    ((whole, _, _),) = stream(short_rows, **options)
    expected, carried = [rows_in(step) for step in whole], 0
    for done in range(1, len(whole) + 1):
        (_, loader, _), _ = stream(short_rows, 2, stop_after=done, **options)
        state = json.loads(json.dumps(loader.sampler.state_dict()))
        carried += len(state["carried"])
        ranks = 4 if done % 5 == 0 else 1
        by_rank = stream(
            short_rows, ranks, state=state, **options | dict(micro_batch_size=4 // ranks)
        )
        rest = zip(*(steps for steps, _, _ in by_rank), strict=True)
        assert [rows_in(*steps) for steps in rest] == expected[done:], done
    assert carried  # rows left by one window were trained in the next


def test_a_stream_of_bins_goes_back_to_a_position_within_the_same_process(short_rows):
    sampler = StreamBinSampler(short_rows, 64, 4, shuffle_buffer=10)
    loader = StreamLoader(
        sampler, TOKENIZER, micro_batch_size=4, context_length=64, pad_token_id=0, **PACKED
    )
    before, seen = {}, []
    for step in loader:
        before[step.index] = sampler.state_dict()
        seen.append(rows_in(step))
    for index, state in before.items():
        sampler.load_state_dict(state)
        assert [rows_in(step) for step in loader] == seen[index + 1 :]
    assert loader.full_report().rows_read == 200


def test_max_steps_ends_a_stream_of_bins_early_or_repeats_it(short_rows):
    for max_steps in (1, 3, 40):
        ((steps, _, _),) = stream(
            short_rows, bins_per_step=4, max_steps=max_steps, loader_options=PACKED
        )
        assert [step.index for step in steps] == list(range(max_steps))
    assert steps[-1].epoch > 0


def test_a_batch_that_is_larger_than_the_stream_is_one_step(short_rows):
    ((steps, _, _),) = stream(short_rows, bins_per_step=1000, loader_options=PACKED)
    assert [step.num_rows for step in steps] == [200]


def test_a_stream_of_bins_does_not_resume_as_one_of_rows_or_of_other_bins(short_rows):
    of_bins = StreamBinSampler(short_rows, 64, 4).state_dict()
    with pytest.raises(ValueError, match="--global_batch_size was None"):
        StreamSampler(short_rows, 6).load_state_dict(of_bins)
    with pytest.raises(ValueError, match="bins per step was None"):
        StreamBinSampler(short_rows, 64, 4).load_state_dict(
            StreamSampler(short_rows, 6).state_dict()
        )
    with pytest.raises(ValueError, match="--context_length was 64"):
        StreamBinSampler(short_rows, 32, 4).load_state_dict(of_bins)


@pytest.mark.parametrize("kept", [0, 1])
def test_windows_without_a_usable_row_are_passed_over_or_the_end(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(stream_sampler, "BIN_WINDOW", 30)
    records = [{"text": ""}] * 70 + [{"text": "a"}] * kept
    source = open_source(write_rows(tmp_path / "rows.jsonl", records))
    for steps, _, end in stream(source, 2, bins_per_step=4, max_steps=2, loader_options=PACKED):
        assert sum(step.num_rows for step in steps) == 2 * kept
        assert isinstance(end, ValueError) == (not kept)


# ---- sources ---------------------------------------------------------------------------------


def test_shards_parquet_and_iterable_datasets_give_the_same_rows(tmp_path):
    import pyarrow

    records = [{"question": f"Q{i}", "answer": f"A{i}"} for i in range(20)]
    write_rows(tmp_path / "part-1.jsonl", records[:9])
    write_rows(tmp_path / "part-2.jsonl", records[9:])
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    iterable = datasets.Dataset.from_list(records).to_iterable_dataset
    sources = [
        open_source(tmp_path / "part-*.jsonl"),
        open_source(tmp_path / "rows.parquet"),
        Source(lambda: open_source(iterable()).raw_records(), str),
    ]  # one for each rank
    streams = [stream(source, 2) for source in sources]
    assert not [end for by_rank in streams for _, _, end in by_rank if isinstance(end, ValueError)]
    rows = [
        [trained_rows(*steps) for steps in zip(*(steps for steps, _, _ in by_rank), strict=True)]
        for by_rank in streams
    ]
    assert rows[0] == rows[1] == rows[2] and sum(map(len, rows[0])) == 20


def test_a_data_set_of_the_hub_is_streamed_and_not_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, **options: asked.append(options) or []
    )
    open_source("someone/their-data", streaming=True)
    open_source("someone/their-data")
    assert asked == [{"split": "train", "streaming": True}, {"split": "train"}]


def test_a_rank_parses_its_own_lines_only(tmp_path, monkeypatch):
    parsed, row = [], Source.row
    monkeypatch.setattr(
        Source, "row", lambda self, raw, place: parsed.append(place) or row(self, raw, place)
    )
    stream(open_source(write_rows(tmp_path / "rows.jsonl", conversations(41))), 4)
    assert len(parsed) == len(set(parsed)) == 41


# ---- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, fault",
    [
        ('{"messages": [', "JSON"),
        ('{"messages": "Hello"}', "expected a list"),
        ('{"prompt": "a"}', "match no format"),
        ('{"text": "\\ud83d"}', "lone surrogate"),
    ],
)
def test_a_broken_row_ends_all_ranks_with_file_and_line(tmp_path, line, fault):
    lines = [json.dumps(record) for record in conversations(30)]
    lines[22] = line
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    results = stream(open_source(path), world_size=3)
    for steps, _, error in results:
        assert len(steps) == len(results[0][0]) >= 2  # the steps before it were trained on
        assert str(error).startswith(f"{path}:23: ") and fault in str(error)


def test_an_error_that_no_one_foresaw_ends_all_ranks_too():
    def records():
        yield from ((f"row {i}", {"text": "a"}) for i in range(8))
        raise OSError("the disk is gone")

    for _, _, error in stream(Source(records, str), world_size=2):
        assert str(error) == "OSError: the disk is gone"


@pytest.mark.parametrize("max_steps", [-1, 5])
@pytest.mark.parametrize(
    "records, reason",
    [([], "no row to train on"), ([{"messages": []}] * 9, "no row is left .* read; dropped")],
)
def test_without_a_usable_row_all_ranks_say_so(tmp_path, records, reason, max_steps):
    source = open_source(write_rows(tmp_path / "rows.jsonl", records))
    for steps, _, error in stream(source, world_size=2, max_steps=max_steps):
        assert not steps
        with pytest.raises(ValueError, match=reason):
            raise error


def test_dropped_rows_leave_steps_smaller_and_are_counted(tmp_path):
    records = conversations(24)
    records[::2] = [{"messages": []}] * 12
    source = open_source(write_rows(tmp_path / "rows.jsonl", records))
    by_rank = stream(source, world_size=2)
    assert sum(step.num_rows for step in by_rank[0][0]) == 12
    assert [report.dropped["no messages"].rows for _, _, report in by_rank] == [12, 12]


def test_ranks_that_read_different_files_end_together(tmp_path):
    sources = [open_source(write_rows(tmp_path / f"{n}.jsonl", conversations(n))) for n in (6, 26)]
    ranks = Ranks(2)

    def run(rank):
        loader = StreamLoader(
            StreamSampler(sources[rank], 6),
            TOKENIZER,
            rank,
            2,
            2,
            pad_token_id=0,
            context_length=64,
            gather=lambda value: ranks.gather(rank, value),
        )
        return [len(step.micro_batches) for step in loader]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second and len(first) == 5


def test_a_token_beyond_the_embedding_is_named(rows):
    ((_, _, error),) = stream(rows, loader_options=dict(vocab_size=100))
    assert "the model embeds ids below 100" in str(error)


def test_the_thread_ends_with_the_loop(rows):
    before = threading.active_count()
    loader = StreamLoader(
        StreamSampler(rows, 2, max_steps=1000), TOKENIZER, context_length=64, pad_token_id=0
    )
    iterator = iter(loader)
    next(iterator)
    assert threading.active_count() == before + 1
    iterator.close()
    assert threading.active_count() == before


# ---- memory ----------------------------------------------------------------------------------

MEASURE = """
import sys, psutil
from fsdp_qlora.data import StreamLoader, StreamSampler, open_source
from tests.test_data_tokenizers import make_tokenizer
sampler = StreamSampler(open_source(sys.argv[1]), 16, shuffle_buffer=500)
loader = StreamLoader(sampler, make_tokenizer("chatml"), 0, 8, 2, context_length=512, pad_token_id=0)
process, start, peak, steps = psutil.Process(), None, 0, 0
for step in loader:
    steps += 1
    if steps == 50: start = process.memory_info().rss
    if steps > 50 and steps % 20 == 0: peak = max(peak, process.memory_info().rss)
print(steps, (peak - start) / 2**20)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path):
    path = tmp_path / "rows.jsonl"
    record = json.dumps({"messages": chat("why? " * 100, "because " * 400)})
    with path.open("w") as file:
        file.writelines(f"{record}\n" for _ in range(16_000))
    assert path.stat().st_size > 58e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    steps, growth_mib = done.stdout.split()
    assert int(steps) == 1000 and float(growth_mib) < 20
