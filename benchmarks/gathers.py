"""How blocks are gathered under full_shard: each way alone, on the GPUs of torchrun.

    torchrun --nproc_per_node 2 benchmarks/gathers.py plain last_kept plain --layers 16
    torchrun --nproc_per_node 2 benchmarks/gathers.py symmetric --layers 16
    NCCL_CTA_POLICY=2 torchrun --nproc_per_node 2 benchmarks/gathers.py copy_engine --layers 16

plain: as `train.py` does. last_kept: the last block stays gathered between its forward and its backward.
symmetric: gathers into NCCL's symmetric memory, by its kernels. copy_engine: the same, and with
NCCL_CTA_POLICY=2 in the environment the GPU's copy engines gather, so that no multiprocessor does.
Settings of a run replace those of the row `8b_qlora_full_shard` of speed_rows.py.
"""

from __future__ import annotations

import argparse
import os

import torch
from speed_rows import CASES, config_folder, run_case
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fsdp_qlora.build
from fsdp_qlora.config.flags import parse, typed_flags
from fsdp_qlora.dist import print_main
from fsdp_qlora.model.blocks import decoder_blocks

ROW = "8b_qlora_full_shard"


def keep_last(model: nn.Module):
    """Leave the last block gathered until its backward."""
    decoder_blocks(model)[-1].set_reshard_after_forward(False)


def gather_symmetrically(model: nn.Module):
    """Gather into symmetric memory; raises ValueError with a torch that can't."""
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise ValueError(
            f"symmetric memory for FSDP came after torch 2.11; this is {torch.__version__}"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()


def gather_by_copies(model: nn.Module):
    """Gather by the copy engines; raises ValueError without the setting of NCCL that asks for them."""
    if os.environ.get("NCCL_CTA_POLICY") != "2":
        raise ValueError("copy_engine: set NCCL_CTA_POLICY=2 before torchrun")
    gather_symmetrically(model)


WAYS = dict(
    plain=lambda model: None,
    last_kept=keep_last,
    symmetric=gather_symmetrically,
    copy_engine=gather_by_copies,
)


def sharded_by(way):
    """`apply_sharding`, and then a way of gathering."""
    plain = fsdp_qlora.build.apply_sharding

    def apply_sharding(model, *args, **kwargs):
        units = plain(model, *args, **kwargs)
        way(model)
        return units

    return plain, apply_sharding


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--profile", help="folder for a trace and its table of each way")
    parser.add_argument("--results")
    options, rest = parser.parse_known_args()
    (config,) = parse(["--model_name", ".", *rest])
    changes = {name: getattr(config, name) for name in typed_flags(rest)}
    folder = config_folder(CASES[ROW].model, options.layers)
    for way in options.ways:
        plain, fsdp_qlora.build.apply_sharding = sharded_by(WAYS[way])
        try:
            print_main(f"{way}:")
            run_case(ROW, folder, options, **changes)
        finally:
            fsdp_qlora.build.apply_sharding = plain


if __name__ == "__main__":
    main()
