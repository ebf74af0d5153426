"""A flipped bit of a frozen weight is found on the rank that has it, and ends all ranks."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.lifecycle.frozen_weights import FrozenWeights, _bit_sum
from tests.allocations import peak_bytes
from tests.distributed.test_resume import run_once, settings
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import save_tiny
from tests.tokenizers import VOCAB_SIZE, save_tokenizer


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_every_single_bit_changes_the_sum(dtype):
    weights = torch.arange(6, dtype=torch.uint8).repeat(8)[:40].view(dtype)
    expected = _bit_sum(weights)
    raw = weights.view(torch.uint8)
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert _bit_sum(weights) != expected, (place, bit)
            raw[place] ^= 1 << bit
    assert _bit_sum(weights) == expected


@pytest.mark.parametrize("first", [0, 1, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 4, 37, 64])
def test_a_sum_is_that_of_whole_words_and_of_the_bytes_before_and_after_them(first, count):
    """A shard may be a part of a larger tensor: its first byte is then no word's first."""
    whole = torch.arange(1, 120, dtype=torch.int16).view(torch.bfloat16)
    raw = whole.view(torch.uint8).tolist()
    start, stop = 2 * first, 2 * (first + count)
    words = [at for at in range(0, len(raw), 8) if start <= at and at + 8 <= stop]
    alone = {*range(start, stop)} - {at + i for at in words for i in range(8)}
    expected = sum(int.from_bytes(bytes(raw[at : at + 8]), "little") for at in words)
    expected += sum(raw[at] for at in alone)
    assert int(_bit_sum(whole[first : first + count])) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_sum_makes_no_copy_of_the_weights(dtype):
    """At 8B, int64 copies of the embedding alone took 3.9 GiB."""
    weights = torch.zeros(2**20, dtype=torch.uint8).view(dtype)
    assert peak_bytes(lambda: _bit_sum(weights)) < 1024


def flipped_run(config, at: int | None) -> str:
    """Train; on rank 1 a bit of the second frozen shard flips in step `at`. The error, if any."""
    import torch.distributed as dist

    from fsdp_qlora.training import loop

    step = loop.Training.step

    def watched(self, given):
        if given.index == at and dist.get_rank() == 1:
            list(self.frozen.shards.values())[1].view(-1).view(torch.uint8)[3] ^= 4
        self.frozen.compare()  # as the thread does
        return step(self, given)

    loop.Training.step = watched
    try:
        run_once(config)
        return ""
    except OSError as error:
        return str(error)
    finally:
        loop.Training.step = step


@pytest.mark.parametrize(
    "layout",
    [
        dict(sharding_strategy="full_shard"),
        rest(dict(sharding_strategy="ddp")),
        rest(dict(sharding_strategy="shard_grad_op", use_cpu_offload=True)),
    ],
)
def test_a_flipped_bit_names_rank_and_weight_and_a_whole_run_changes_none(tmp_path, layout):
    folder = tmp_path / "model"
    save_tiny(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    save_tokenizer(folder)
    config = settings(str(folder), tmp_path / "out", train_type="qlora", resume="none", **layout)
    for said in run_ranks(flipped_run, 2, config, 3):
        assert "changed in the memory of rank 1" in said and "weight" in said, said
    assert run_ranks(flipped_run, 2, config, None) == ["", ""]


def test_nothing_is_summed_when_the_run_is_over():
    frozen = FrozenWeights(torch.nn.Linear(2, 2).requires_grad_(False), torch.device("cpu"), 9.0)
    with frozen.watching():
        assert len(frozen.sums()) == 2
    assert frozen.sums() == {} and not frozen.has_changed()


def test_without_minutes_nothing_is_summed():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with FrozenWeights(model, torch.device("cpu"), 0.0).watching() as nothing:
        assert nothing is None
