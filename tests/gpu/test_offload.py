"""Offload on a GPU: copies beside compute change no gradient and do free memory. `pytest -m gpu`."""
from __future__ import annotations

import os

import pytest
import torch

from tests.distributed.test_offload import OFFLOADS, accumulated_gradients, assert_all_equal
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS, HIDDEN, TOKENS, REPEATS = 8, 1024, 2048, 20
SHAPE = dict(hidden_size=HIDDEN, intermediate_size=2048, num_hidden_layers=LAYERS,
             num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("wide"), **SHAPE)


def long_rows(count: int) -> list[tuple[list, list]]:
    """Rows of full and of half length, all tokens trained."""
    generator = torch.Generator().manual_seed(0)
    lengths = [TOKENS if i % 3 else TOKENS // 2 for i in range(count)]
    rows = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    return [(row, row) for row in rows]


def repeated_gradients(folder: str, cases: list[dict], world_size: int):
    """`accumulated_gradients` with kernels that give the same bits every time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    return accumulated_gradients(folder, "cuda", cases, REPEATS, long_rows(3 * world_size))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_twenty_accumulated_steps_are_bit_equal_with_every_offload(folder, world_size, compiled):
    if torch.cuda.device_count() < world_size: pytest.skip("needs 2 GPUs")
    cases = [o | dict(precision="bf16", compile=compiled, no_sync=no_sync)
             for o in OFFLOADS for no_sync in (False, True)]
    results = run_ranks(repeated_gradients, world_size, folder, cases, world_size, device="cuda")
    for synced in (0, 1):  # one micro-batch's gradients are rounded before the next is added, or not
        assert_all_equal(results[0][synced::2], cases[synced::2])


def allocated_after_forward(folder: str, cases: list[dict]) -> list[int]:
    """Bytes on the GPU that a second step holds between its forward and its backward."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    device, found = torch.device("cuda", 0), []
    batch = {k: v.to(device) for k, v in padded_batch(long_rows(2)[1:]).items()}
    for case in cases:
        model = build_model(RunConfig(model_name=folder, lora_rank=4, sharding_strategy="ddp", **case),
                            device)
        model(**batch).loss.backward()
        before = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
        del loss, model
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_block_inputs_leave_the_gpu(folder, compiled):
    cases = [o | dict(compile=compiled) for o in (OFFLOADS[0], OFFLOADS[2])]
    (kept, moved), = run_ranks(allocated_after_forward, 1, folder, cases, device="cuda")
    one_input = TOKENS * HIDDEN * 2
    assert kept - moved == pytest.approx((LAYERS - 1) * one_input, rel=0.05)
