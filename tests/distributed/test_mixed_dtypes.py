"""Frozen bf16 linears, fp32 norms and fp32 adapters in one model: every strategy trains it.

FSDP wants one dtype, and one answer to requires_grad, of the weights that it gathers together; a
model prepared for k-bit training has several of both.
"""
from __future__ import annotations

import torch

from tests.distributed.test_parity import relative
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, save_tiny, tiny_rows

STRATEGIES = ("ddp", "shard_grad_op", "full_shard", "hybrid_shard_grad_op", "hybrid_full_shard")
STEPS = tiny_rows(steps=2, rows_per_step=4)


def mixed_model(folder: str, train_type: str, strategy: str):
    """The order of `build_model`, with norms in fp32 between bf16 linears."""
    import fsdp_qlora as fq
    device = torch.device("cpu")
    model = fq.meta_model(fq.read_config(folder), torch.bfloat16)
    if train_type == "qlora": fq.quantize_linears(model, "nf4")
    model = fq.apply_adapters(model, fq.lora_config(rank=RANK, alpha=8))
    for name, p in model.named_parameters():
        if "norm" in name: p.data = p.data.float()
    fq.apply_activation_policy(model, "recompute_all")
    fq.apply_sharding(model, strategy, fq.make_mesh(strategy, device))
    fq.materialize(model, device, device)
    fq.load_weights(model, fq.Checkpoint(folder), device)
    fq.init_adapters(model, SEED)
    return model


def train_mixed(folder: str, cases) -> list[dict]:
    """Losses, and after one backward which parameters hold a gradient, and the stored dtypes."""
    import torch.distributed as dist

    import fsdp_qlora as fq
    results = []
    for train_type, strategy in cases:
        model = mixed_model(folder, train_type, strategy)
        optimizer = fq.build_optimizer(model, "adamw", 1e-3)
        losses = []
        for rows in STEPS:
            batch = padded_batch(rows[dist.get_rank()::dist.get_world_size()])
            with __import__("contextlib").nullcontext():
                losses.append(fq.train_step(model, optimizer, [batch]).loss)
        with __import__("contextlib").nullcontext(): loss = model(**batch).loss
        loss.backward()
        results.append(dict(losses=losses,
                            with_grad={n for n, p in model.named_parameters() if p.grad is not None},
                            dtypes={n: p.dtype for n, p in model.named_parameters()}))
    return results


def test_every_strategy_trains_only_the_adapters_of_a_model_of_two_dtypes(tmp_path):
    folder = save_tiny(tmp_path)
    cases = [(t, s) for t in ("lora", "qlora") for s in STRATEGIES]
    results = run_ranks(train_mixed, 4, folder, cases)[0]
    for (train_type, strategy), result in zip(cases, results, strict=True):
        first = results[cases.index((train_type, "ddp"))]["losses"]
        assert relative(result["losses"], first) < 2**-8, (train_type, strategy)
        for name, dtype in result["dtypes"].items():
            wide = "norm" in name or ".lora_" in name or name.endswith("absmax")
            assert dtype == (torch.float32 if wide else torch.bfloat16), name
            assert (name in result["with_grad"]) == (".lora_" in name), name
