"""What only a GPU can show: NCCL, streams, CUDA kernels. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_parity import train_cases
from tests.distributed.test_seen_bytes import LINEARS, SHAPE, STEPS, train_watched
from tests.ranks import run_ranks
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_every_forward_sees_the_stored_bytes_and_strategies_agree(tmp_path):
    folder = save_tiny(tmp_path, **SHAPE)
    cases = [
        dict(sharding_strategy=s, compile=False) for s in ("ddp", "shard_grad_op", "full_shard")
    ]
    cases += [dict(sharding_strategy="full_shard", compile=False, use_cpu_offload=True)]
    results = run_ranks(train_watched, 2, folder, cases, "cuda", device="cuda")[0]
    for case, result in zip(cases, results, strict=True):
        assert result["seen"] == LINEARS and result["bytes_equal"], case
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(results[0]["losses"]), rtol=2**-8, atol=0
        )


def test_fp32_on_gpus_equals_fp32_on_cpus_also_compiled(tmp_path):
    folder = save_tiny(tmp_path, **SHAPE)
    cases = [
        dict(sharding_strategy="full_shard", precision="fp32", compile=False),
        dict(sharding_strategy="full_shard", precision="fp32", compile=True),
    ]
    (cpu,) = run_ranks(train_cases, 2, folder, STEPS, cases[:1])[0]
    for gpu in run_ranks(train_watched, 2, folder, cases, "cuda", device="cuda")[0]:
        torch.testing.assert_close(
            torch.tensor(gpu["losses"]), torch.tensor(cpu["losses"]), rtol=1e-4, atol=0
        )
