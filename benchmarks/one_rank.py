r"""One rank of several on a single GPU: what of a sharded step is the GPU's and what is the host's.

    python benchmarks/one_rank.py 70b_qlora_fp8 --world_size 4 --layers 10 --profile profiles
    python benchmarks/one_rank.py 70b_qlora_fp8 --world_size 4 --layers 10 --context_length 64

    python benchmarks/one_rank.py 8b_qlora_full_shard --model 01-ai/Yi-34B --world_size 2 \
        --use_cpu_offload true --context_length 2048 --activation_policy recompute_all

    python benchmarks/one_rank.py 8b_qlora_full_shard --world_size 8 --sequence_parallel 8 --layers 4 \
        --batch_size 1 --context_length 1048576 --activation_policy keep_attention \
        --use_activation_cpu_offload true --mlp_tiles 4 --warmup 1 --steps 1

Settings of a run (`--activation_policy keep_linears`) replace those of the row.

There are no other ranks: a gather copies this rank's own shard into each part of its output, a
reduce-scatter keeps a part of its input, an all-reduce changes nothing, and an exchange of heads for
tokens copies what it would send; the bytes that would leave the GPU are printed. Every token is taken for one
of those whose embedding is here. So hooks, copies, memory and the work between gathers are those of a
rank among `--world_size`, and waiting for a link or for another rank is left out: what a real run takes
beyond this is communication. Losses fall, and mean nothing else.

With so few tokens that the GPU waits (`--context_length 64`), a step's time is what the host takes.
"""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from speed_rows import CASES, config_folder, measured_row, profile_settings
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_qlora.bench.measure import summary
from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.config import AUTO
from fsdp_qlora.config.flags import parse, typed_flags
from fsdp_qlora.dist import collectives, rank_device
from fsdp_qlora.memory import vocab_parallel
from fsdp_qlora.model.sequence_parallel import SequenceParallel


class Done:
    """What an asynchronous collective returns when there is nothing to wait for."""

    def wait(self):
        return True


def gather_own(output, part, group=None, async_op=False):
    """An all-gather where every rank has what this one has."""
    for each in output.view(-1).split(part.numel()):
        if each.data_ptr() != part.data_ptr():
            each.copy_(part.reshape(-1))
    return Done() if async_op else None


def keep_own(output, input, op=None, group=None, async_op=False):
    """A reduce-scatter of which only this rank's part is there."""
    output.copy_(input.reshape(-1)[: output.numel()].view(output.shape))
    return Done() if async_op else None


class Exchanged:
    """What this rank would have sent to those that share its rows."""

    bytes = 0


@torch.library.custom_op("one_rank::exchange", mutates_args=())
def copy_own(sent: Tensor) -> Tensor:
    """An all-to-all where every rank has what this one has: as many bytes copied."""
    Exchanged.bytes += sent.nbytes
    return sent.clone()


copy_own.register_fake(torch.empty_like)
copy_own.register_autograd(lambda ctx, grad: copy_own(grad.contiguous()))


def rows_for_all(own_rows, ids, local, first, in_pieces):
    """Rows of an embedding for all ids, also those of other ranks.

    With zeros for these, where a row begins with them, nothing would come to its first tokens, and what
    a norm makes of the gradient of zeros grows from block to block until it is infinite.
    """
    return own_rows(first + ids % len(local), local, first, in_pieces)


@contextmanager
def rank_zero_of(world_size: int, device: torch.device):
    """A process group of so many ranks in which this process, rank 0, is alone."""
    os.environ |= dict(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    names = dict(
        all_gather_into_tensor=gather_own,
        all_gather_single=gather_own,
        reduce_scatter_tensor=keep_own,
        reduce_scatter_single=keep_own,
    )
    stood_for = {name: function for name, function in names.items() if hasattr(dist, name)}
    before = {name: getattr(dist, name) for name in stood_for}
    ours = collectives.gather_into, collectives.reduce_into, vocab_parallel.own_rows
    exchange = SequenceParallel._exchanged
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        for name, function in stood_for.items():
            setattr(dist, name, function)
        collectives.gather_into, collectives.reduce_into = gather_own, keep_own
        vocab_parallel.own_rows = partial(rows_for_all, ours[-1])
        SequenceParallel._exchanged = lambda self, sent: copy_own(sent.contiguous())
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        collectives.gather_into, collectives.reduce_into, vocab_parallel.own_rows = ours
        SequenceParallel._exchanged = exchange
        dist.destroy_process_group()


def settings_of(flags: list[str]) -> dict:
    """The settings that flags of a run ask for."""
    (config,) = parse(flags)
    return {name: getattr(config, name) for name in typed_flags(flags)}


def run_row(name: str, folder: str, options: argparse.Namespace, **changes) -> BenchRow:
    """Measure one row of speed_rows.py, with the model of a folder, as a rank of `--world_size`."""
    changes |= settings_of(options.settings) | profile_settings(name, options)
    if "gradient_accumulation_steps" in changes:
        changes["global_batch_size"] = AUTO
    config = CASES[name].config(folder, **changes)
    device = rank_device(config.device)
    Exchanged.bytes = 0
    what = options.model.rsplit("/", 1)[-1] if options.model else name
    with rank_zero_of(options.world_size, device):
        row = measured_row(f"{what}, one rank of {options.world_size}", config, options, device)
    row.peer = "one rank"
    blocks = row.num_hidden_layers * row.gradient_accumulation_steps
    each = (
        f"  {row.seconds_per_step / blocks * 1e3:.2f} ms a block and micro-batch"
        if row.status == "ok"
        else ""
    )
    print(summary(row) + each + exchanged_in_a_step(row, options), flush=True)
    if options.results:
        append_row(row, options.results)
    return row


def exchanged_in_a_step(row: BenchRow, options: argparse.Namespace) -> str:
    """Bytes that a step sends to the ranks that share its rows, and those that stay here."""
    if row.sequence_parallel == 1 or row.status != "ok":
        return ""
    each, ranks = Exchanged.bytes / (options.warmup + options.steps), row.sequence_parallel
    return f"  exchanges {each / 2**30:.3g} GiB, of which {(ranks - 1) / ranks:.0%} leave the GPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", help="names in speed_rows.py")
    parser.add_argument("--world_size", type=int, default=4)
    parser.add_argument("--model", help="another known model, in place of the row's")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--profile", help="folder for a trace and its table of each row")
    parser.add_argument("--results")
    options, options.settings = parser.parse_known_args()
    if unknown := [name for name in options.rows if name not in CASES]:
        parser.error(f"no row is named {', '.join(unknown)}; there are {', '.join(CASES)}")
    for flag, least in (("world_size", 2), ("steps", 1), ("warmup", 0)):
        if (given := getattr(options, flag)) < least:
            parser.error(f"--{flag} must be {least} or more, got {given}")
    for name in options.rows:
        run_row(name, config_folder(options.model or CASES[name].model, options.layers), options)


if __name__ == "__main__":
    main()
