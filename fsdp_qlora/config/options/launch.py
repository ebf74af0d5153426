"""How ranks are started and profiled."""

from __future__ import annotations

from dataclasses import dataclass

from .. import without_effect as rules
from ..settings import AUTO, MAY_CHANGE, opt


@dataclass(kw_only=True)
class LaunchOptions:
    """Launch (without torchrun)"""

    world_size: int = opt(
        AUTO,
        "ranks to start; -1 = one per visible GPU, or one on the CPU (for estimate and "
        "plan, use --gpus and --nodes)",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    master_addr: str = opt(
        "localhost",
        "rendezvous address of the ranks",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.SEVERAL_RANKS,
    )
    master_port: str = opt(
        "12355",
        "rendezvous port of the ranks",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.SEVERAL_RANKS,
    )
    timeout_minutes: float = opt(
        30.0,
        "how long a rank waits for the others",
        unit="minutes",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )


@dataclass(kw_only=True)
class ProfileOptions:
    """Profiling"""

    profile: bool = opt(
        False,
        "trace some steps: where time goes and how much communication is exposed; on a GPU "
        "also a memory snapshot",
        on_resume=MAY_CHANGE,
    )
    profile_memory: bool = opt(
        False,
        "print where GPU memory goes in the second step, beside the estimate, and plot it "
        "as memory.png in --output_dir",
        on_resume=MAY_CHANGE,
    )
    profiling_output: str = opt(
        "profiles",
        "folder for traces",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
        no_effect=rules.PROFILE,
    )
    with_stack: bool = opt(
        False, "record Python stacks", on_resume=MAY_CHANGE, no_effect=rules.PROFILE
    )
    with_shapes: bool = opt(
        False, "record input shapes of operators", on_resume=MAY_CHANGE, no_effect=rules.PROFILE
    )
    export_trace: bool = opt(
        True,
        "accepted for old commands: --profile always exports traces",
        on_resume=MAY_CHANGE,
        no_effect=rules.always("--profile decides"),
    )
    export_memory_timeline: bool = opt(
        False,
        "accepted for old commands: --profile writes a memory snapshot on a GPU",
        on_resume=MAY_CHANGE,
        no_effect=rules.always("--profile decides"),
    )
    wait_steps: int = opt(
        3,
        "steps before the profiler warms up; the first ones compile",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.PROFILE,
    )
    warmup_steps: int = opt(
        1,
        "warmup steps of the profiler",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.needs(
            "--profile; for the learning rate, use --lr_warmup_steps", lambda c: c.profile
        ),
    )
    active_steps: int = opt(
        2, "steps in a recording", on_resume=MAY_CHANGE, least=1, no_effect=rules.PROFILE
    )
    repeat: int = opt(
        1,
        "number of recordings; 0 = until the run ends",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.PROFILE,
    )
    profiling_frequency: int = opt(
        10,
        "steps from the start of one recording to the start of the next",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.PROFILE,
    )
