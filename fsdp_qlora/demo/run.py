"""The demo: take a small real model, score it, fine-tune it, score it again.

    fsdp-qlora demo [--output_dir demo_output] [any flag of train]

Training is the command a user would type, on all GPUs, or on two CPU ranks where there is none.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ..commands.generate import load_for_inference
from ..config import RunConfig
from ..lifecycle.launcher import share_cores
from ..loading.tokenizer import load_tokenizer
from ..preflight.precision import has_bf16_instructions
from .answers import generate_answers
from .prompts import HELDOUT_FILE, base_messages, load_rows, tuned_messages
from .score import Score, score
from .smollm2 import smollm2_folder

_CPU_RANKS = 2
# Two thirds of the time of the recipe as it is: no gathers, less padding, and torch's fused attention is
# slow in the backward of rows this short.
_ON_CPUS = dict(
    world_size=_CPU_RANKS, sharding_strategy="ddp", batch_size=4, attn_implementation="eager"
)
# Of 93, on processors that don't multiply bf16: 59% right instead of 90%, in minutes.
_STEPS_IN_FP32 = 30
# Found on the training schemas alone; docs/LOG.md has what else was tried.
RECIPE = dict(
    dataset="text_to_sql",
    sharding_strategy="full_shard",
    train_type="qlora",
    lora_rank=16,
    lora_alpha=32,
    lora_dropout=0.0,
    lr=2e-3,
    wd=0.0,
    lr_scheduler="linear",
    apply_gradient_clipping=True,
    grad_norm=1.0,
    global_batch_size=16,
    batch_size=8,
    context_length=256,
    use_gradient_checkpointing=False,
)


def run_demo(config: RunConfig, argv: list[str], cache_dir: str):
    """Score, train, score; prints what it does and where everything is."""
    started, output = time.perf_counter(), Path(config.output_dir)
    print("SmolLM2-135M-Instruct learns to write SQL; it is scored on databases it never saw.")
    disable_progress_bar()
    folder, rows = str(smollm2_folder(cache_dir)), load_rows(HELDOUT_FILE)
    print(f"Scoring the base model on {len(rows)} held-out questions ...", flush=True)
    before = _score_model(folder, None, rows)
    print(f"  {before.accuracy:.1%} right, {before.executable:.1%} run at all", flush=True)
    train(folder, output, argv)
    print("Scoring the tuned model ...", flush=True)
    after = _score_model(folder, str(output / "adapter"), rows)
    print(after)
    print(
        f"\nheld-out questions answered right: base {before.accuracy:.1%}, "
        f"tuned {after.accuracy:.1%} ({after.accuracy - before.accuracy:+.1%})"
    )
    print(
        f"adapter {output / 'adapter'}, loss picture {output / 'loss.png'}, "
        f"{time.perf_counter() - started:.0f} s in all"
    )
    print(
        f"ask it: fsdp-qlora generate --model_name {folder} --adapter_folder {output / 'adapter'} "
        "--prompt ..."
    )


def train(folder: str, output: Path, argv: list[str]):
    """Run `fsdp-qlora train` with the demo's recipe; flags of the user's come last and win."""
    flags = RECIPE | dict(model_name=folder, output_dir=output, precision=_fastest_precision())
    if not torch.cuda.is_available():
        flags |= _ON_CPUS
    if flags["precision"] == "fp32":
        flags["max_steps"] = _STEPS_IN_FP32
        print(
            f"This processor does not multiply bf16, so {_STEPS_IN_FP32} of 93 steps are taken; "
            "--max_steps 93 takes them all."
        )
    command = [f"--{name}={value}" for name, value in flags.items()]
    print("fsdp-qlora train " + " ".join(command + argv), flush=True)
    run = subprocess.run([sys.executable, "-m", "fsdp_qlora.cli", "train", *command, *argv])
    if run.returncode:
        sys.exit(run.returncode)


def _fastest_precision() -> str:
    """bf16 where the processor multiplies it, else fp32."""
    return "bf16" if torch.cuda.is_available() or has_bf16_instructions() else "fp32"


def _score_model(folder: str, adapter: str | None, rows: list[dict]) -> Score:
    """The model's answers to `rows`, run against their databases; CPU processes share the rows."""
    workers = 1 if torch.cuda.is_available() else _CPU_RANKS
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(_answer_rows, folder, adapter, rows[i::workers], workers)
            for i in range(workers)
        ]
        shares = [job.result() for job in jobs]
    answers: list[str] = [""] * len(rows)
    for i, share in enumerate(shares):
        answers[i::workers] = share
    return score(rows, answers)


def _answer_rows(folder: str, adapter: str | None, rows: list[dict], workers: int) -> list[str]:
    """Answers of the base, which is shown a worked example, or of the tuned model."""
    share_cores(workers)
    disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if _fastest_precision() == "bf16" else torch.float32
    model = load_for_inference(folder, adapter, device="cuda" if on_gpu else "cpu", dtype=dtype)
    messages = tuned_messages if adapter else base_messages
    return generate_answers(model, load_tokenizer(folder), [messages(row) for row in rows])
