"""`fsdp-qlora data`: the data of a run as it would be trained on, in text and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config import RunConfig, plan_batches
from ..config.run import with_bins_of
from ..config.settings import counted
from ..data import StepLoader, StepSampler, Subset, TokenizedDataset, step_sampler
from ..dist import print_main
from ..preflight.run_data import load_data, run_tokenizer
from ..writable import check_folder


def report_on_data(config: RunConfig):
    """Load the data, and say and draw what there is to know before a run.

    Raises ValueError naming --output_dir where no picture can be written.
    """
    check_folder("output_dir", config.output_dir)
    rows = load_data(config, run_tokenizer(config)).rows
    if not len(rows):
        return
    print_main(padding_line(config, rows))
    picture = Path(config.output_dir) / "lengths.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows.report.plot(picture)
        print_main(f"plot of the row lengths: {picture}")
    except ValueError as error:  # matplotlib is missing, and the text above is the same
        print_main(f"no plot of the row lengths: {error}")


def padding_line(config: RunConfig, rows: TokenizedDataset | Subset) -> str:
    """How much of the computation is spent on rows' own tokens, padded and packed."""
    batches = plan_batches(replace(config, packing=False), world_size=1)
    size = dict(micro_batch_size=batches.micro_batch_size, pad_token_id=0)
    sampler = StepSampler(len(rows), batches.per_step, seed=config.seed)
    padded = StepLoader(rows, sampler, **size).filled_share()
    packing = with_bins_of(replace(config, packing=True), rows.mean_length, world_size=1)
    plan = plan_batches(packing, world_size=1)
    sampler = step_sampler(rows, plan.per_step, plan.unit, seed=config.seed)
    packed = StepLoader(rows, sampler, packing=True, **size).filled_share()
    return (
        f"of the tokens computed on one GPU, {padded:.0%} are the rows' own with padding "
        f"({counted(batches.per_step, batches.unit)} per step), and {packed:.0%} with --packing "
        f"true ({counted(plan.per_step, plan.unit)}), {batches.micro_batch_size} per micro-batch"
    )
