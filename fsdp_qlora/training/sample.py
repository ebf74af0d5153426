"""A sample of a run's rows, for what is estimated, planned and probed before it starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..data import RowLengths, TokenizedDataset, hold_out, open_source, row_lengths, tokenize_rows
from ..data.lengths import SAMPLE
from ..data.records import parse_row
from ..data.sources import reservoir
from ..loading import read_config
from ..model.attention import check_packing
from .prepare import RunData, num_samples, run_tokenizer


def sampled_lengths(config: RunConfig) -> tuple[RowLengths | None, str]:
    """Lengths of a sample of the run's rows; or None, and why rows are taken as full.

    Nothing is refused here: a run says what is wrong with its data.
    """
    try:
        rows, total = _sampled_rows(config, run_tokenizer(config))
        return row_lengths(
            rows.lengths, config.context_length, total, config.seed, can_pack(config)
        ), ""
    except (ValueError, OSError, ImportError) as error:
        return None, f"rows are taken as full: {str(error).splitlines()[0]}"


def lengths_of(config: RunConfig, data: RunData) -> RowLengths:
    """Lengths of data that are read already."""
    total = None if data.stream else len(data.rows)
    return row_lengths(
        data.rows.lengths, config.context_length, total, config.seed, can_pack(config)
    )


def _sampled_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenizedDataset, int | None]:
    """Up to `SAMPLE` rows as a run trains on them, and how many there are in all; None in a stream."""
    source = open_source(
        config.dataset,
        split=config.dataset_split,
        seed=config.seed,
        samples=num_samples(config, config.dataset),
        streaming=config.stream,
        dummy_words=config.context_length,
    )
    if config.stream:
        records, total = list(islice(source.raw_records(), SAMPLE)), None
    else:
        records, total = reservoir(source.raw_records(), SAMPLE, config.seed)
    rows = tokenize_rows(
        (parse_row(raw, place) for place, raw in records),
        tokenizer,
        context_length=config.context_length,
        train_on=config.train_on,
    )
    if not len(rows):
        raise ValueError(f"--dataset {config.dataset}: no row of a sample is trained on")
    if total == len(records) and config.eval_share:
        rows, _ = hold_out(rows, config.eval_share)
    if total == len(records):
        return rows, len(rows)
    kept = len(rows) / len(records) * (1 - config.eval_share)
    return rows, None if total is None else max(1, round(total * kept))


def can_pack(config: RunConfig) -> bool:
    """Whether the model keeps packed rows apart."""
    try:
        check_packing(read_config(config.model_name, **config.source).get_text_config())
        replace(config, packing=True)
    except ValueError:
        return False
    return True
