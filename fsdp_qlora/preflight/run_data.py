"""A run's tokenizer and its rows: what to train on and what to evaluate on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from ..catalog.families import positions_in
from ..config import RunConfig
from ..config.settings import counted
from ..data import (
    SAMPLED_NAMES,
    Source,
    Subset,
    TokenizedDataset,
    choose_pad_token_id,
    hold_out,
    keep_prompt_format,
    load_dataset,
    open_source,
    preview,
    shared_rows,
    tokenize_rows,
)
from ..dist import print_main, ranks_from_env, run_on_node
from ..loading import read_config
from ..loading.tokenizer import grow_vocabulary, load_tokenizer
from ..observe.samples import choose_prompts
from .chat_template import use_chat_template

_FIRST_ROWS = 1000  # of a stream, read before the ranks meet


def run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a run: with --added_tokens, --chat_template and a pad token that is embedded."""
    tokenizer = load_tokenizer(config.model_name, **config.source, added_tokens=config.new_tokens)
    if config.chat_template:
        use_chat_template(tokenizer, config.chat_template)
    settings = read_config(config.model_name, **config.source)
    if config.new_tokens:
        grow_vocabulary(settings, tokenizer)
    return _with_pad_token_of(tokenizer, settings.get_text_config().vocab_size)


def _with_pad_token_of(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> PreTrainedTokenizerBase:
    """The tokenizer with a pad token that the model embeds; it is also saved beside the weights.

    One that was added and never embedded is an index error for whoever pads with it.
    """
    pad = tokenizer.pad_token_id
    if pad is None or pad < vocab_size:
        return tokenizer
    was, token_id = tokenizer.pad_token, choose_pad_token_id(tokenizer, vocab_size)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token_id)
    print_main(
        f"the pad token {was} has id {pad}, but the model embeds only ids below {vocab_size}: "
        f"using {tokenizer.pad_token} instead, also in the saved tokenizer"
    )
    return tokenizer


@dataclass
class RunData:
    """What a run trains on and what it is evaluated on."""

    rows: TokenizedDataset | Subset  # to train on; under --stream only the first ones
    held_out: TokenizedDataset | Subset | None
    stream: Source | None

    @property
    def train(self) -> TokenizedDataset | Subset | Source:
        return self.rows if self.stream is None else self.stream


def load_data(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """The run's data; prints the data report, and the preview if asked, on rank 0.

    A tokenizer without a chat template gets the one that asks as the rows do, for samples and for
    whoever uses what is saved.
    """
    data = read_data(config, tokenizer)
    rows, held_out = data.rows, data.held_out
    if data.stream:
        print_main(f"the first {counted(rows.report.rows_read, 'row')} of the stream:")
    print_main(rows.report.format_report())
    if config.preview:
        print_main(preview(rows, tokenizer, config.preview))
    if held_out is not None:
        print_main(
            f"held out: {counted(len(held_out), 'row')}, {held_out.lengths.sum():,} tokens, "
            f"{held_out.trained_counts.sum():,} of them trained on"
        )
        for line in held_out.report.dropped_lines() if config.holds_out_a_data_set else ():
            print_main(f"  {line}")
        _warn_of_shared_rows(config, data)
    if asked := keep_prompt_format(tokenizer, rows.report):
        print_main(
            "the tokenizer has no chat template; the saved tokenizer gets one with the prompt "
            f"format of these rows ({asked})"
        )
    _check_prompts(config, tokenizer, held_out)
    return data


def _warn_of_shared_rows(config: RunConfig, data: RunData):
    """Say if held-out rows are trained on; of a stream, whose rows are not known, nothing."""
    if data.stream is not None or not config.holds_out_a_data_set:
        return
    if shared := shared_rows(data.rows, data.held_out):
        print_main(
            f"warning: {shared} of {counted(len(data.held_out), 'held-out row')} "
            f"{'is' if shared == 1 else 'are'} trained on too, so the held-out loss says little; hold out "
            "other rows"
        )


def _check_prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: TokenizedDataset | Subset | None,
):
    """A mistake in prompts is said before the ranks meet, on every rank."""
    prompts = choose_prompts(config, tokenizer, held_out)
    if not config.sample_prompts:
        return  # rows of the data, which are checked as such
    positions = positions_in(read_config(config.model_name, **config.source))
    longest = max(len(prompt.ids) for prompt in prompts)
    if positions and longest >= positions:
        raise ValueError(
            f"--sample_prompts {config.sample_prompts}: a prompt of {longest:,} tokens leaves no room for "
            f"an answer in the model's {positions:,} positions; shorten it"
        )


def read_data(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """The run's data, without a word."""
    stream = _open_stream(config) if config.stream else None
    if stream is None:
        rows = tokenized(
            config, tokenizer, config.dataset, config.dataset_split, config.weight_column
        )
    else:
        rows = _first_rows(config, tokenizer, stream)
    held_out = _tokenized_held_out(config, tokenizer)
    if config.eval_share:
        rows, held_out = hold_out(rows, config.eval_share)
    return RunData(rows, held_out, stream)


def tokenized(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: str,
    split: str,
    weight_column: str | None,
) -> TokenizedDataset:
    """A data set as token ids and trained masks, made by one rank of each node."""
    ranks = ranks_from_env()
    return load_dataset(
        dataset,
        tokenizer,
        split=split,
        samples=num_samples(config, dataset),
        context_length=config.context_length,
        train_on=config.train_on,
        seed=config.seed,
        cache_dir=config.data_cache,
        is_writer=ranks.local_rank == 0,
        shows_progress=ranks.is_main,
        share=run_on_node() if ranks.local_world_size > 1 else None,
        weight_column=weight_column,
    )


def num_samples(config: RunConfig, dataset: str) -> int | None:
    """How many rows of a data set are taken; None is all."""
    return config.dataset_samples if dataset in SAMPLED_NAMES else None


def _tokenized_held_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase):
    """The rows of --eval_dataset and --eval_split, or None."""
    if not config.holds_out_a_data_set:
        return None
    dataset = config.eval_dataset or config.dataset
    try:
        split = config.eval_split or "train"
        return tokenized(
            config, tokenizer, dataset, split, _held_out_weights(config, dataset, split)
        )
    except ValueError as error:
        given = (
            f"--eval_dataset {config.eval_dataset}"
            if config.eval_dataset
            else f"--eval_split {config.eval_split}"
        )
        raise ValueError(f"{given}: {str(error).removeprefix(f'--dataset {dataset}: ')}") from error


def _held_out_weights(config: RunConfig, dataset: str, split: str) -> str | None:
    """--weight_column, unless the first held-out row lacks it: then all of them weigh the same."""
    if config.weight_column is None:
        return None
    source = open_source(dataset, split=split, samples=num_samples(config, dataset))
    _, first = next(source.records(), ("", {}))
    return config.weight_column if config.weight_column in first else None


def _open_stream(config: RunConfig) -> Source:
    """The stream of --dataset, at its beginning."""
    return open_source(
        config.dataset,
        split=config.dataset_split,
        seed=config.seed,
        samples=num_samples(config, config.dataset),
        dummy_words=config.context_length,
        streaming=True,
        weight_column=config.weight_column,
    )


def _first_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, stream: Source
) -> TokenizedDataset:
    """The first rows of a stream as tokens: most mistakes show in these, before ranks meet.

    Raises ValueError if these are all, and none is left to train on.
    """
    asked = max(_FIRST_ROWS, config.preview)
    rows = tokenize_rows(
        islice(stream.rows(), asked),
        tokenizer,
        context_length=config.context_length,
        train_on=config.train_on,
    )
    rows.report.files = list(stream.files)
    if not len(rows) and rows.report.rows_read < asked:
        raise ValueError(
            f"--dataset {config.dataset}: no row is left to train on "
            f"({rows.report.format_dropped()}); {rows.report.format_remedy()}"
        )
    return rows
