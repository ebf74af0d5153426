"""What only a GPU can show: NCCL, streams, CUDA kernels. Needs 2 GPUs; `pytest -m gpu`."""
from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
STEPS = tiny_rows(steps=5, rows_per_step=4)
SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=97)


def train_on_gpu(folder: str, cases: list[dict]) -> list[dict]:
    """Losses of each case, and whether each forward saw the bytes that are stored."""
    import torch.distributed as dist

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor, rank_device
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.quantize import QuantLinear
    from fsdp_qlora.trainer import train_step
    results, device = [], rank_device("cuda")
    for case in cases:
        config = RunConfig(**dict(model_name=folder, lora_rank=8, lora_dropout=0.0, lora_alpha=8,
                                  seed=7) | case)
        model = build_model(config, device)
        watched = [(n, m) for n, m in model.named_modules() if isinstance(m, QuantLinear)]
        stored = {n: (full_tensor(m.weight).cpu().view(torch.int16).clone(),
                      full_tensor(m.absmax).cpu().clone()) for n, m in watched}
        seen: dict = {}
        blocks = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
        # After FSDP's own pre-forward hook the parameters are whole.
        hooks = [block.register_forward_pre_hook(partial(record_bytes, seen)) for block in blocks]
        optimizer = build_optimizer(model, "adamw", 1e-3)
        losses = []
        for rows in STEPS:
            mine = rows[dist.get_rank()::dist.get_world_size()]
            losses.append(train_step(model, optimizer, [padded_batch([r]) for r in mine],
                                     max_grad_norm=1.0).loss)
            if not losses[1:]:
                equal = all(torch.equal(a.flatten(), b.flatten()) for n, m in watched
                            for a, b in zip(stored[n], seen[id(m)], strict=True))
                for hook in hooks: hook.remove()
        results.append(dict(losses=losses, bytes_equal=equal and len(watched) == 28))
    return results


def record_bytes(seen: dict, block, _):
    """Copy the packed bytes and scales that a block's forward is about to use."""
    for m in block.modules():
        if type(m).__name__ == "QuantLinear":
            seen[id(m)] = (m.weight.detach().cpu().view(torch.int16).clone(),
                           m.absmax.detach().cpu().clone())


def test_strategies_offload_and_compile_agree_and_see_the_stored_bytes(tmp_path):
    folder = save_tiny(tmp_path, **SHAPE)
    cases = [dict(sharding_strategy=s) for s in ("ddp", "shard_grad_op", "full_shard")]
    cases += [dict(sharding_strategy="full_shard", use_cpu_offload=True),
              dict(sharding_strategy="full_shard", compile=True),
              dict(sharding_strategy="full_shard", compile=True, use_gradient_checkpointing=False)]
    results = run_ranks(train_on_gpu, 2, folder, cases, device="cuda")[0]
    for case, result in zip(cases, results, strict=True):
        if not case.get("compile"): assert result["bytes_equal"], case  # hooks need eager blocks
        torch.testing.assert_close(torch.tensor(result["losses"]),
                                   torch.tensor(results[0]["losses"]), rtol=2**-8, atol=0)


def test_fp32_on_gpu_equals_fp32_on_cpu(tmp_path):
    from tests.distributed.test_parity import train_cases
    folder = save_tiny(tmp_path, **SHAPE)
    cases = [dict(sharding_strategy="full_shard", train_type="qlora")]
    (cpu,) = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    cases = [dict(sharding_strategy="full_shard", precision="fp32", lora_rank=4)]
    (gpu,) = run_ranks(train_on_gpu, 2, folder, cases, device="cuda")[0]
    torch.testing.assert_close(torch.tensor(gpu["losses"]), torch.tensor(cpu["losses"]),
                               rtol=1e-4, atol=0)
