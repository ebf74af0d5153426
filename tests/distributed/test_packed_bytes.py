"""4-bit bytes reach the forward as they are stored, under every strategy, whatever carries them.

The bytes travel as floats, and about one value in a thousand has the pattern of a NaN. A gather that
converts them gives finite and wrong outputs; FSDP does so if it is told a compute dtype.
"""

from __future__ import annotations

from functools import partial

import torch

from fsdp_qlora.choices import STRATEGIES
from tests.ranks import run_ranks
from tests.tiny import padded_batch, reference_model, save_tiny, tiny_rows

CASES = [
    *[dict(sharding_strategy=s) for s in STRATEGIES],
    dict(sharding_strategy="full_shard", use_cpu_offload=True),
    dict(sharding_strategy="full_shard", precision="bf16", use_gradient_checkpointing=False),
    dict(sharding_strategy="full_shard", wrap_policy="min_params", min_wrap_params=1),
]
ROWS = tiny_rows(1, 4)[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8).clone()


def same(a, b) -> bool:
    """Whether bytes and scales are equal."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def record(seen: dict, name: str, module, _):
    """Before a module's forward, when its weights are whole."""
    layer = getattr(module, "base_layer", module)
    seen.setdefault(name, []).append((as_bytes(layer.weight), as_bytes(layer.absmax)))


def bytes_in_forward(folder: str, cases) -> list[tuple[int, int]]:
    """For each case, layers that saw in every forward what is stored, and NaN patterns among it."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import LoraLinear
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor, local_rows
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    results = []
    for case in cases:
        model = build_model(
            RunConfig(**dict(model_name=folder, precision="fp32", lora_rank=2) | case),
            torch.device("cpu"),
        )
        layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}
        for layer in layers.values():  # every pattern there is, each rank its own rows
            local, start, stop = local_rows(layer.base_layer.weight)
            wide = local.shape[1]
            patterns = torch.arange(start * wide, stop * wide) * 31 % 65536
            local.copy_(patterns.to(torch.uint16).view(torch.bfloat16).view(-1, wide))

        def stored(layers=layers):
            return {
                n: (
                    as_bytes(full_tensor(m.base_layer.weight)),
                    as_bytes(full_tensor(m.base_layer.absmax)),
                )
                for n, m in layers.items()
            }

        before, seen = stored(), {}
        hooks = [m.register_forward_pre_hook(partial(record, seen, n)) for n, m in layers.items()]
        batch = padded_batch(ROWS[dist.get_rank() :: dist.get_world_size()])
        result = train_step(model, build_optimizer(model), [batch])
        for hook in hooks:
            hook.remove()
        after = stored()
        equal = sum(all(same(found, before[n]) for found in (*seen[n], after[n])) for n in layers)
        nans = sum(int(before[n][0].view(torch.bfloat16).isnan().sum()) for n in layers)
        results.append((equal, nans, result.loss))
    return results


def test_every_forward_sees_the_stored_bytes_nan_patterns_among_them(tmp_path):
    for rank in run_ranks(bytes_in_forward, 4, save_tiny(tmp_path), CASES):
        for case, (equal, nans, loss) in zip(CASES, rank, strict=True):
            assert equal == 14 and nans > 20, case
            assert 0 < loss < 100, case


def bitsandbytes_bytes(folder: str, storages) -> list[bool]:
    """Whether bitsandbytes layers see their bytes, for each dtype that stores them."""
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig

    from fsdp_qlora import apply_sharding, make_mesh

    results = []
    for storage in storages:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=storage,
        )
        model = reference_model(folder, "qlora", quantization=quantization)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear4bit)}
        stored = {n: as_bytes(m.weight).flatten() for n, m in layers.items()}
        apply_sharding(model, "full_shard", make_mesh("full_shard", torch.device("cpu")))
        seen = {}
        for n, m in layers.items():
            m.register_forward_pre_hook(
                lambda m, _, n=n, seen=seen: seen.update({n: as_bytes(m.weight).flatten()})
            )
        loss = model(**padded_batch(ROWS)).loss
        loss.backward()
        results.append(
            bool(loss.isfinite())
            and len(seen) == 14
            and all(torch.equal(seen[n], stored[n]) for n in stored)
        )
    return results


def test_bitsandbytes_layers_see_their_bytes_in_any_floating_storage(tmp_path):
    storages = [torch.float32, torch.bfloat16, torch.float16]
    assert run_ranks(bitsandbytes_bytes, 2, save_tiny(tmp_path), storages) == [[True] * 3] * 2
