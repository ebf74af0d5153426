"""Rows to train on and to evaluate on."""

from __future__ import annotations

from dataclasses import dataclass

from .. import without_effect as rules
from ..settings import AUTO, MAY_CHANGE, MUST_MATCH, one_of, opt

_SAMPLED = ("alpaca_sample", "dummy", "orca_math")  # of which --dataset_samples rows are taken


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    dataset: str = opt(
        "alpaca_sample",
        "a .jsonl, .json, .csv, .tsv or .parquet file, a folder or glob of them, a hub name, or "
        "one of alpaca, alpaca_sample, dummy, guanaco, sql, orca_math, text_to_sql; several joined "
        "by commas: name[:N] is the first N rows of one, name*2 and name*0.5 say how often an epoch "
        "has each of its rows",
        example="rows.jsonl",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    dataset_split: str = opt(
        "train",
        "split of a hub dataset",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("a dataset with splits", lambda c: c.dataset != "dummy"),
    )
    dataset_samples: int = opt(
        512,
        "rows to take from alpaca_sample, dummy or orca_math",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            f"--dataset {one_of(_SAMPLED)}", lambda c: {c.dataset, c.eval_dataset} & {*_SAMPLED}
        ),
    )
    context_length: int = opt(
        512,
        "maximum row length; longer rows are truncated, and the data report counts them",
        unit="tokens",
        on_resume=MUST_MATCH,
        least=1,
    )
    train_on: str = opt(
        "completion",
        "tokens with a loss: completion = only answers, all = every token",
        choices=("completion", "all"),
        on_resume=MUST_MATCH,
    )
    weight_column: str | None = opt(
        None,
        "field of each row with the weight of its loss, relative to other rows; 0 leaves the row out",
        example="weight",
        bare="weight",
        on_resume=MUST_MATCH,
    )
    chat_template: str | None = opt(
        None,
        "how conversations are written, in place of the tokenizer's own template: a Jinja file, "
        "chatml, or a model whose template is taken; saved with the tokenizer",
        example="template.jinja",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    data_cache: str | None = opt(
        None,
        "folder that caches tokenized data between runs",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
        no_effect=rules.needs(
            "rows that are read before training, without --stream", lambda c: not c.stream
        ),
    )
    stream: bool = opt(
        False,
        "read and tokenize rows during training, for data larger than memory",
        on_resume=MUST_MATCH,
    )
    shuffle_buffer: int = opt(
        5000,
        "rows that each rank buffers to shuffle a stream; 1 keeps the order of the files",
        unit="rows",
        on_resume=MUST_MATCH,
        least=1,
        no_effect=rules.needs("--stream", lambda c: c.stream),
    )
    preview: int = opt(
        0,
        "print this many rows with their trained tokens marked; 3 without a number",
        unit="rows",
        bare=3,
        on_resume=MAY_CHANGE,
        least=0,
        per_rank=True,
    )


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    eval_dataset: str | None = opt(
        None,
        "held-out rows, in any form that --dataset takes",
        example="heldout.jsonl",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    eval_split: str | None = opt(
        None,
        "held-out split of --eval_dataset, or of --dataset",
        example="validation",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs(
            "a dataset with splits", lambda c: (c.eval_dataset or c.dataset) != "dummy"
        ),
    )
    eval_share: float = opt(
        0.0,
        "share of --dataset to hold out; always the same rows",
        unit="share of rows",
        example=0.05,
        on_resume=MAY_CHANGE,
    )
    eval_every: int = opt(
        AUTO,
        "optimizer steps between evaluations; -1 = only at the end",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    early_stopping_patience: int = opt(
        0,
        "end the run after so many evaluations in a row without a lower held-out loss, with the best "
        "weights beside the last ones; 0 = never",
        unit="evaluations",
        example=3,
        on_resume=MAY_CHANGE,
        least=0,
    )
    eval_command: str | None = opt(
        None,
        "command that scores the weights after each evaluation, on rank 0 while the others wait; it "
        "finds them in $FSDP_QLORA_WEIGHTS, and the number or JSON that it prints last is recorded",
        example="'lm_eval ...'",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    samples: int = opt(
        0,
        "generate answers to the prompts of this many held-out rows before training and at "
        "each evaluation; each token costs a forward pass",
        unit="rows",
        example=3,
        on_resume=MAY_CHANGE,
        least=0,
    )
    sample_prompts: str | None = opt(
        None,
        "text file with one prompt per line to answer instead: all, or the first --samples",
        example="prompts.txt",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    sample_tokens: int = opt(
        64,
        "maximum length of generated answers",
        unit="tokens",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs("--samples", lambda c: c.samples or c.sample_prompts),
    )
