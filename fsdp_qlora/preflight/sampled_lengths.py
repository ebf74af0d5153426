"""A sample of a run's rows, for what is estimated, planned and probed before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappush, heappushpop
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..data import (
    RowLengths,
    Subset,
    TokenizedDataset,
    hold_out,
    open_source,
    row_lengths,
    tokenize_rows,
)
from ..data.lengths import SAMPLE
from ..data.sources import reservoir
from ..loading import meta_model, read_config
from ..model.attention import choose_attention
from ..model.packing_probe import keep_rows_apart
from .run_data import RunData, num_samples, run_tokenizer

LARGEST = 32  # records whose rows may be the longest


def sampled_lengths(config: RunConfig) -> tuple[RowLengths | None, str]:
    """Lengths of a sample of the run's rows; or None, and why rows are taken as full.

    Nothing is refused here: a run says what is wrong with its data.
    """
    try:
        tokenizer = run_tokenizer(config)
        rows, total, others = _sampled_rows(config, tokenizer)
        if config.holds_out_a_data_set:
            others += _sampled_held_out(config, tokenizer)
        found = row_lengths(
            rows.lengths,
            config.context_length,
            total,
            config.seed,
            can_pack(config),
            [some.lengths for some in others],
        )
        return found, ""
    except (ValueError, OSError, ImportError) as error:
        return None, f"assuming full rows: {str(error).splitlines()[0]}"


def lengths_of(config: RunConfig, data: RunData) -> RowLengths:
    """Lengths of data that are read already."""
    total = None if data.stream else len(data.rows)
    others = [] if data.held_out is None else [data.held_out.lengths]
    return row_lengths(
        data.rows.lengths, config.context_length, total, config.seed, can_pack(config), others
    )


def _sampled_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenizedDataset | Subset, int | None, list[TokenizedDataset]]:
    """Up to `SAMPLE` rows as a run trains on them, how many there are in all, and others it may meet.

    How many a stream has is not known: None. Raises ValueError if no row is trained on.
    """
    rows, read, total, largest = _sample_of(
        config, tokenizer, config.dataset, config.dataset_split, config.weight_column
    )
    others = [rows, largest]
    if not len(rows):
        raise ValueError(f"--dataset {config.dataset}: a sample of its rows has no trained token")
    if total == read and config.eval_share:
        rows, _ = hold_out(rows, config.eval_share)
    if total == read:
        return rows, len(rows), others
    kept = len(rows) / read * (1 - config.eval_share)
    return rows, None if total is None else max(1, round(total * kept)), others


def _sampled_held_out(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> list[TokenizedDataset]:
    """A sample of --eval_dataset or --eval_split, and some of its longest rows."""
    dataset, split = config.eval_dataset or config.dataset, config.eval_split or "train"
    rows, _, _, largest = _sample_of(replace(config, stream=False), tokenizer, dataset, split)
    return [rows, largest]


def _sample_of(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: str,
    split: str,
    weight_column: str | None = None,
) -> tuple[TokenizedDataset, int, int | None, TokenizedDataset]:
    """The rows of a sample of records, how many of these, how many in all, rows of the largest."""
    source = open_source(
        dataset,
        split=split,
        seed=config.seed,
        samples=num_samples(config, dataset),
        streaming=config.stream,
        dummy_words=config.context_length,
        weight_column=weight_column,
    )
    largest: list = []
    if config.stream:
        records, total = list(islice(source.raw_records(), SAMPLE)), None
    else:
        seen = _keeping_largest(source.raw_records(), largest)
        records, total = reservoir(seen, SAMPLE, config.seed)
    rows, longest = (
        tokenize_rows(
            (source.row(raw, place) for place, raw in some),
            tokenizer,
            context_length=config.context_length,
            train_on=config.train_on,
        )
        for some in (records, [record for _, _, record in largest])
    )
    return rows, len(records), total, longest


def _keeping_largest(records: Iterator, largest: list) -> Iterator:
    """The records; `largest` is a heap of (size, number, record) of the largest of them.

    A sample of a large data set may lack its longest rows, and they decide what memory must hold.
    """
    for number, (place, raw) in enumerate(records):
        size = len(raw) if isinstance(raw, bytes) else len(str(raw))
        (heappush if number < LARGEST else heappushpop)(largest, (size, number, (place, raw)))
        yield place, raw


def can_pack(config: RunConfig) -> bool:
    """Whether the model keeps packed rows apart."""
    try:
        settings = read_config(config.model_name, **config.source)
        used, _ = choose_attention("auto", True, settings, torch.device("cpu"), torch.float32)
        keep_rows_apart(meta_model(settings, torch.float32, used, **config.source))
        replace(config, packing=True)
    except ValueError:
        return False
    return True
