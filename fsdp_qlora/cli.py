"""The command line: `fsdp-qlora train|estimate|plan|generate|...`, and `train.py`, which is `train`.

Flags are made from the fields of `RunConfig` (`config/flags.py`). A user's mistake ends in one line on
stderr and exit code 2, on every rank; --verbose adds the traceback.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from dataclasses import dataclass
from difflib import get_close_matches

from . import __version__
from .bench.command import bench_command
from .catalog.known_models import hub_name
from .choices import FORMATS
from .commands.calibrate import calibrate_command
from .commands.doctor import doctor_command
from .commands.export import DELIVERY
from .commands.planning import GUIDE
from .commands.report import report_command
from .commands.simulate import simulate_command
from .config import RunConfig
from .config.flags import (
    Parser,
    boolean,
    given_settings,
    parse,
    parse_alone,
    parse_own,
    with_named_words,
)
from .config.settings import opt
from .lifecycle.closed_terminal import outlive_terminal
from .lifecycle.notify import told_at_end
from .lifecycle.signals import EXIT_STOPPED, StopRequested, StopSignals, end_beside_threads
from .observe.startup import part_ended
from .redact import redact


@dataclass
class TrainOptions:
    """Train"""

    dry_run: bool = opt(
        False,
        "print the settings, the prediction and the first batch with its trained tokens "
        "marked, without training or writing anything",
    )
    on_end: str | None = opt(
        None,
        "shell command to run when the run ends; $FSDP_QLORA_STATUS (finished, stopped, "
        "failed), $FSDP_QLORA_MESSAGE and $FSDP_QLORA_OUTPUT_DIR tell it how",
        example="'notify-send \"$FSDP_QLORA_STATUS\"'",
    )


def train_command(argv: list[str]):
    """Fine-tune a model."""
    config, options = parse(argv, TrainOptions, about=train_command.__doc__)
    from .preflight.precision import faster_precision  # needs torch, and --help does not

    if flags := faster_precision(config, given_settings(argv)):
        argv = [*argv, *flags]
        config, _ = parse(argv, TrainOptions)
    config.model_name = hub_name(config.model_name)
    if options.dry_run:
        from .commands.dryrun import dry_run

        return dry_run(config, argv)
    if config.is_auto:
        from .commands.probe import planned_argv

        argv = planned_argv(config, argv, TrainOptions)
        config, _ = parse(argv, TrainOptions)
        config.model_name = hub_name(config.model_name)
        part_ended("plan and probe")
    from .dist import ranks_from_env
    from .lifecycle.launcher import run_on_ranks

    def in_a_rank(config: RunConfig):
        on_end = options.on_end if ranks_from_env().is_main else None
        outlive_terminal()
        with (
            StopSignals(config.stop_grace_seconds) as signals,
            told_at_end(on_end, config.output_dir, signals.seconds_left),
        ):
            from .training.rank import train_rank  # takes seconds, which only ranks need

            train_rank(config, signals)

    run_on_ranks(config, "train", argv, in_a_rank)


@dataclass
class GenerateOptions:
    """Generate"""

    adapter_folder: str | None = opt(
        None, "trained adapter folder, also as the first argument", example="output/adapter"
    )
    model_name: str | None = opt(
        None,
        "base model, or a model trained in full: folder or hub name; default: the adapter's own",
        example="./SmolLM2-135M-Instruct",
        is_path=True,
    )
    revision: str | None = opt(
        None,
        "branch, tag or commit of the model on the hub; default: the adapter's own, without "
        "--model_name",
    )
    trust_remote_code: bool = opt(
        False, "run the Python code of a model from the hub; needs the full commit as --revision"
    )
    prompt: str = opt("", "user message", example="'Who are you?'")
    system: str = opt("", "system prompt", example="'Answer in one sentence.'")
    chat: bool = opt(
        False, "talk in the terminal: a line is a message, an empty line or Ctrl-D ends the chat"
    )
    max_new_tokens: int = opt(128, "maximum length of an answer", unit="tokens", least=1)
    temperature: float = opt(
        0.0,
        "0 = always the most likely token; above, samples from the tokens",
        example=0.7,
        least=0,
    )
    top_p: float = opt(
        1.0, "with --temperature, sample only from the most likely tokens that add up to this share"
    )
    top_k: int = opt(
        0,
        "with --temperature, sample only from this many most likely tokens; 0 = from all",
        least=0,
    )
    repetition_penalty: float = opt(1.0, "above 1, tokens that were there become less likely")
    seed: int = opt(42, "seed of samples")
    base_quant: str = opt(
        "auto",
        "format that the base weights are rounded to; auto = as in training",
        choices=("auto", "none", *FORMATS),
    )
    load_in: str = opt(
        "16bit",
        "how weights are held: written out in 16 bits, or by bitsandbytes in 4 bits (the same "
        "values after training on nf4 or fp4) or 8 bits, in a quarter or half of the memory; on "
        "GPUs, a model is spread over all of them, and what does not fit waits in host memory",
        choices=("16bit", "8bit", "4bit"),
    )
    dtype: str = opt(
        "auto",
        "dtype of matmuls; auto = bf16 on a GPU that has it, else fp16; fp32 on the CPU",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    device: str = opt("auto", "auto = cuda if there is a GPU", choices=("auto", "cpu", "cuda"))
    verbose: bool = opt(False, "after an error, print the traceback")


def _generate_command(argv: list[str]):
    """Answer prompts with a trained adapter or model: one, or a chat in the terminal."""
    options = parse_alone(
        with_named_words(argv, "adapter_folder"),
        GenerateOptions,
        "fsdp-qlora generate",
        about=_generate_command.__doc__,
    )
    from .commands.generate import answer

    answer(options)


def _data_command(argv: list[str]):
    """Tokenize a data set and report on it; --preview shows rows with trained tokens marked."""
    (config,) = parse(argv, prog="fsdp-qlora data", about=_data_command.__doc__)
    config.model_name = hub_name(config.model_name)
    from .commands.data import report_on_data

    report_on_data(config)


@dataclass
class _DemoOptions:
    """Demo"""

    cache_dir: str = opt(".cache", "folder that caches the unpacked model")


def _demo_command(argv: list[str]):
    """Fine-tune a small real model to write SQL, and score it before and after."""
    config, options = parse(argv, _DemoOptions, prog="fsdp-qlora demo", about=_demo_command.__doc__)
    _, flags = parse_own(argv, _DemoOptions)
    from .demo.run import run_demo

    run_demo(config, flags, options.cache_dir)


COMMANDS = {
    "train": train_command,
    **GUIDE,
    "generate": _generate_command,
    "data": _data_command,
    "bench": bench_command,
    "calibrate": calibrate_command,
    "demo": _demo_command,
    "simulate": simulate_command,
    "doctor": doctor_command,
    "report": report_command,
} | DELIVERY


def _overview() -> str:
    """The commands in a few lines."""
    lines = [f"  {name:<10}{function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fsdp-qlora COMMAND [--flag value ...]",
            "",
            *lines,
            "",
            "fsdp-qlora COMMAND --help says what a command does and lists its common flags",
        ]
    )


def _is_verbose(argv: list[str]) -> bool:
    """Whether --verbose is on, also where the rest of the command line can't be parsed."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--verbose", nargs="?", const=True, default=False, type=boolean)
    try:
        return parser.parse_known_args(argv)[0].verbose
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a mistake, 75 if told to stop, 130 if at once."""
    code = run(list(sys.argv[1:] if argv is None else argv))
    end_beside_threads(code)
    return code


def run(argv: list[str]) -> int:
    """Run a command, and say what went wrong."""
    _take_any_text()
    os.environ.setdefault(
        "HF_HUB_VERBOSITY", "error"
    )  # without a network, not a line for each retry
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(_overview())
        elif argv[0] in ("-V", "--version"):
            print(f"fsdp_qlora {__version__}")
        elif argv[0] in COMMANDS:
            COMMANDS[argv[0]](argv[1:])
        else:
            near = "".join(f"did you mean {n}? " for n in get_close_matches(argv[0], COMMANDS, 1))
            raise ValueError(f"unknown command {argv[0]!r}; {near}choose {', '.join(COMMANDS)}")
        print(end="", flush=True)  # also where there is no stdout
        return 0
    except BrokenPipeError:  # `fsdp-qlora --help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if argv[:1] == ["train"]:
            print("stopped: the program reading its output ended", file=sys.stderr)
        return 141
    except (ValueError, OSError, ImportError) as error:
        if _is_verbose(argv):
            _print_traceback()
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        line = redact(str(error))
        print(f"error{rank}: {line}", file=sys.stderr, flush=True)
        if rank:
            _tell_other_ranks(line)
        return 2
    except StopRequested as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("stopped", file=sys.stderr, flush=True)
        return 130
    except (
        Exception
    ) as error:  # a fault of this program: the same words as Python's, without secrets
        if _is_verbose(argv) or not _says_that_a_rank_is_gone(error):
            _print_traceback()
        return 1


def _take_any_text():
    """What a terminal can't show is shown as an escape, and what is no text there is read as "\ufffd"."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # may be closed, or another's
            stream.reconfigure(errors=errors)


def _tell_other_ranks(line: str):
    """Give the others the time to say it too: a launcher ends them when this rank ends."""
    from .dist import broadcast_error

    broadcast_error(line)


def _says_that_a_rank_is_gone(error: Exception) -> bool:
    """Say in a line that this rank ends only because another did, or can't be reached."""
    if "RANK" not in os.environ:
        return False
    from .dist.rank_store import is_lost_connection

    if not is_lost_connection(error):
        return False
    print(
        f"error (rank {os.environ['RANK']}): lost the connection to another rank: it ended, and "
        "its own log says why, or its machine is unreachable",
        file=sys.stderr,
        flush=True,
    )
    return True


def _print_traceback():
    """The traceback of the exception that is being handled, on stderr."""
    print(redact(traceback.format_exc()), end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
