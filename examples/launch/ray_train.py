"""Ray Train: the ranks of a run as the workers of a `TorchTrainer`.

    python examples/launch/ray_train.py --workers 16 --config examples/recipes/70b-2-nodes.yaml

Ray places the workers and starts all of them again if one fails; the run then goes on from its last
checkpoint. Each worker starts its rank as a process of its own, which may listen for signals. What
follows --workers and --cpu are flags of train.py; this project must be installed on every machine
(`pip install "ray[train]" .`), and --output_dir be an absolute path (see docs/nodes.md).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer


def train_rank(settings: dict):
    """What a worker does: meet the others through Ray's group, then run train.py's command."""
    worker = get_context()
    here = [meeting_point() if worker.get_world_rank() == 0 else ("", 0)]
    dist.broadcast_object_list(here, src=0)  # in place
    dist.destroy_process_group()  # the rank makes its own
    ranks = dict(
        RANK=worker.get_world_rank(),
        WORLD_SIZE=worker.get_world_size(),
        LOCAL_RANK=worker.get_local_rank(),
        LOCAL_WORLD_SIZE=worker.get_local_world_size(),
        MASTER_ADDR=here[0][0],
        MASTER_PORT=here[0][1],
    )
    command = [sys.executable, "-m", "fsdp_qlora.cli", "train", *settings["flags"]]
    code = subprocess.run(
        command, env=os.environ | {k: str(v) for k, v in ranks.items()}
    ).returncode
    if code:
        raise RuntimeError(f"rank {worker.get_world_rank()} ended with code {code}; see its output")


def meeting_point() -> tuple[str, int]:
    """This machine's address and a free port."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(
        description="Start train.py's ranks through Ray", allow_abbrev=False
    )
    parser.add_argument("--workers", type=int, required=True, help="ranks, one per GPU")
    parser.add_argument("--cpu", action="store_true", help="without GPUs, to try it out")
    parser.add_argument(
        "--max_failures", type=int, default=3, help="times that all ranks start again"
    )
    options, flags = parser.parse_known_args()
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"flags": flags},
        torch_config=TorchConfig(backend="gloo"),  # only to meet
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
