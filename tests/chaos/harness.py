"""Ranks that run train.py's command and can be killed, signalled or stalled where a test says.

The harness plays torchrun: when one rank ends badly it ends the others, and the same command is
started again. Ranks are forked with the heavy imports done, so a start costs a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_qlora.dist import free_port
from tests.patience import patience
from tests.ranks import PRELOAD
from tests.tiny import save_tiny
from tests.tokenizers import VOCAB_SIZE, save_tokenizer

WORLD, STEPS = 2, 12

# Where a rank can be hit: the function that is being run then.
PHASES = {
    "tokenize": "fsdp_qlora.training.rank.load_data",
    "load": "fsdp_qlora.training.trainer.build_model",
    "restore": "fsdp_qlora.training.trainer.find_run",
    "step": "fsdp_qlora.training.loop.train_step",
    "eval": "fsdp_qlora.observe.evaluate.on_device",
    "stage": "fsdp_qlora.checkpoint.writer.weight_rows",
    "write": "fsdp_qlora.checkpoint.tensors.write_tensors",
    "verify": "fsdp_qlora.checkpoint.tensors.read_back",
    "manifest": "fsdp_qlora.checkpoint.folder.write_text",
    "rename": "fsdp_qlora.checkpoint.folder.Path.rename",
    "prune": "fsdp_qlora.atomic_files.shutil.rmtree",
    "forward": "fsdp_qlora.adapters.lora_layer.LoraLinear.forward",
    "optimizer": "fsdp_qlora.training.step.step_if",
    "save": "fsdp_qlora.training.loop.save_trained",
    "export": "fsdp_qlora.training.trainer.save_trained",
}
MAIN_ONLY = ("manifest", "rename", "prune")  # what only rank 0 does
ONCE = ("tokenize", "load", "restore", "export")  # a start


@dataclass
class Hit:
    """Something that befalls `rank` at the `nth` time (from 0) it comes to `phase`."""

    rank: int
    phase: str
    nth: int
    action: str  # kill, stop (SIGTERM), usr1, stall, freeze (SIGSTOP)
    after: bool = False  # when the function is done, not when it begins

    @classmethod
    def at_random(cls, rng: random.Random, action: str, phases=tuple(PHASES)) -> Hit:
        phase = rng.choice(phases)
        rank = 0 if phase in MAIN_ONLY else rng.randrange(WORLD)
        nth = 0 if phase in ONCE else rng.randrange(4)
        return cls(rank, phase, nth, action, rng.random() < 0.5)

    def strike(self):
        """Called in the rank."""
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.action == "usr1":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.action == "stall":
            time.sleep(600)
        elif self.action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def patched(hit: Hit):
    """The function of the hit's phase, struck at its nth call."""
    import importlib

    module, _, name = PHASES[hit.phase].rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:  # a function of a class or of a module that another imports
        module, _, inner = module.rpartition(".")
        owner = getattr(importlib.import_module(module), inner)
    original, calls = getattr(owner, name), []

    def struck(*args, **kwargs):
        calls.append(1)
        now = len(calls) == hit.nth + 1
        if now and not hit.after:
            hit.strike()
        result = original(*args, **kwargs)
        if now and hit.after:
            hit.strike()
        return result

    setattr(owner, name, struck)
    try:
        yield
    finally:
        setattr(owner, name, original)


def rank_main(rank: int, world_size: int, port: int, argv: list[str], hit: Hit | None, log: str):
    """A rank: the command line, with what it prints in a file."""
    import torch

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    with open(f"{log}.{rank}", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    from fsdp_qlora.cli import main
    from fsdp_qlora.training import loop

    loop.LAST_WAIT_SECONDS = 2  # long enough on an idle disk
    if hit is None or hit.rank != rank:
        code = main(argv)
    else:
        with patched(hit):
            code = main(argv)
    sys.stdout.flush()
    sys.exit(code)


@dataclass
class Ended:
    """How the ranks of one start ended."""

    codes: list[int]
    seconds: float  # from the first rank's end to the last one's
    text: str  # what they printed


class Command:
    """One run's command, started as often as it takes."""

    def __init__(self, argv: list[str], out: Path):
        self.argv, self.out, self.log = [*argv, "--output_dir", str(out)], out, f"{out}.log"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def start(
        self,
        hit: Hit | None = None,
        kill_after: float | None = None,
        timeout: float = 120,
        world_size: int = WORLD,
    ) -> Ended:
        """Run until all ranks have ended; `kill_after` seconds one of them is killed."""
        port = free_port()
        ranks = [
            self.context.Process(
                target=rank_main, args=(r, world_size, port, self.argv, hit, self.log)
            )
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        began, first, told = time.monotonic(), None, False
        timeout, last = patience(timeout), patience(30)
        while any(p.is_alive() for p in ranks):
            now = time.monotonic()
            if kill_after is not None and now - began > kill_after:
                ranks[int(kill_after * 1000) % world_size].kill()
                kill_after = None
            bad = [p for p in ranks if not p.is_alive() and p.exitcode]
            if bad and first is None:
                first = now
            if first and not told and now - first > 0.2:  # torchrun polls, then tells the others
                for p in ranks:
                    p.terminate()
                told = True
            if told and hit and hit.action == "freeze":
                for p in ranks:
                    p.kill()
            if now - began > timeout or first and now - first > last:
                for p in ranks:
                    p.kill()
            time.sleep(0.01)
        text = "".join(Path(f"{self.log}.{r}").read_text() for r in range(world_size))
        for r in range(world_size):
            Path(f"{self.log}.{r}").write_text("")
        return Ended(
            [p.exitcode for p in ranks], time.monotonic() - (first or time.monotonic()), text
        )


def command(folder: Path, out: Path, *flags: str) -> Command:
    """A run of twelve steps with dropout, evaluations every three and checkpoints every two."""
    return Command(
        [
            "train",
            "--model_name",
            str(folder),
            "--dataset",
            str(folder / "rows.jsonl"),
            "--eval_dataset",
            str(folder / "held.jsonl"),
            "--eval_every",
            "3",
            "--device",
            "cpu",
            "--precision",
            "fp32",
            "--lora_rank",
            "2",
            "--lora_dropout",
            "0.1",
            "--lr",
            "0.01",
            "--lr_scheduler",
            "cosine",
            "--num_epochs",
            "2",
            "--global_batch_size",
            "4",
            "--checkpoint_every",
            "2",
            "--checkpoint_minutes",
            "0",
            "--log_to",
            "jsonl",
            *flags,
        ],
        out,
    )


def make_inputs(folder: Path) -> Path:
    """A tiny model with its tokenizer, rows and held-out rows."""
    save_tiny(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    save_tokenizer(folder)
    for name, first, count in (("rows", 0, 23), ("held", 40, 4)):
        rows = [
            dict(prompt="?" * (i % 5), completion=chr(65 + i % 26) * (1 + i % 4))
            for i in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def outcome(out: Path) -> tuple:
    """What a finished run left: figures of steps and evaluations in order, and the adapters' bytes."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures = [
        (r["kind"], r["step"], r.get("loss"), r.get("eval_loss"), r.get("lr"), r.get("tokens"))
        for r in records
        if r["kind"] in ("step", "eval")
    ]
    return figures, *(
        (out / name / "adapter_model.safetensors").read_bytes()
        for name in ("adapter", "adapter-best")
    )
