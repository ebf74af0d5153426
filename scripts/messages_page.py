"""docs/messages.md: each error message of the program, by what it is about, with what to do."""

from __future__ import annotations

import re

from messages import Message, messages, read_source

INTRO = """# Every error message

Made by `python scripts/make_reference.py` from the source; do not edit.

Search this page for some words of your message, and find what to do. A mistake ends every rank with one
line, `error: ...`, and exit code 2; `--verbose` adds the traceback. Capitals stand for what a message fills
in. If there is no message, start from [troubleshooting](troubleshooting.md)."""

# Title, beginnings of the names of files below fsdp_qlora/, what to know.
SECTIONS = [
    (
        "A flag or a recipe",
        ("config/", "cli", "run_plan", "build", "optim/"),
        "Nothing was written yet. [Every setting](flags.md) says what each flag takes; "
        "`train.py --dry_run` shows what a run would do.",
    ),
    (
        "Estimates and plans",
        ("catalog/", "estimate/", "planner/", "commands/dryrun", "commands/probe"),
        "See [estimates and plans](planner.md).",
    ),
    (
        "The data",
        ("data/",),
        "See [data](data.md). `fsdp-qlora data` finds these without weights, and shows which tokens are "
        "trained. `SOURCE` and `PATH:LINE` are the file and line.",
    ),
    (
        "The model and its files",
        ("loading/", "json_input", "model/", "quantization/", "export/save"),
        "See [quantization and loading](quantization.md).",
    ),
    ("Adapters", ("adapters/", "experts/", "lora_init/"), "See [adapters](adapters.md)."),
    (
        "Memory and sharding",
        ("memory/", "sharding/", "observe/"),
        "See [memory](memory.md) and [strategies](strategies.md).",
    ),
    (
        "Starting the ranks",
        (
            "dist/",
            "lifecycle/launcher",
            "training/rank",
            "lifecycle/lock",
            "preflight/",
        ),
        "`fsdp-qlora doctor` checks GPUs, driver, links and versions.",
    ),
    (
        "A run that stops, and resuming",
        ("training/", "lifecycle/", "checkpoint/"),
        "See [checkpoints](checkpoints.md).",
    ),
    ("After training", ("export/", "commands/"), "See [after training](export.md)."),
    ("Benchmarks and the demo", ("bench/", "demo/"), "See [performance](performance.md)."),
    ("Others", ("",), ""),
]

# What to do about messages that do not say so themselves: words of the message, and the remedy.
REMEDIES = [
    ("no checkpoint to roll back to", "lower `--lr`, or set `--checkpoint_every`"),
    ("takes a single value", "write `name: value`"),
    ("is not available in this version", "the rest of the line says what is"),
    ("left out or have", "leave it out, or give a value"),
    ("unknown flag|unknown setting", "take the nearest name, or one of [these](flags.md)"),
    (
        "not valid JSON|not a JSON object|^nested too deeply",
        "look at the file: it must be one JSON object",
    ),
    (
        "not readable YAML|not valid YAML",
        "look at the line: the usual cause is a missing space after `:`, or a tab",
    ),
    ("is not true or false|is not a (whole )?number|takes HINT", "give a value of that kind"),
    ("--revision with 40 hex digits", "copy the commit from the model's page"),
    ("write settings as `name: value`", "write one `name: value` a line"),
    (
        "whole numbers belong|it has no dtype|its nested_offset|its quant_type",
        "download the model again",
    ),
    ("appears twice", "keep one of the two lines"),
    ("^PATH: REASON", "check that the file exists and is readable"),
    (
        "^NAME=VALUE: WHY",
        "leave the [trainer's argument](own_script.md#a-trainer-in-one-import) out; the line names what to "
        "give instead",
    ),
    ("MESSAGE \\(NAMED\\)", "another message of this page, with the line of the recipe it is from"),
    (
        "--activation_policy TEXT",
        "counts of blocks must add up to those of the model: `keep_linears:16,recompute_all:16`",
    ),
    ("activation policies for", "give a policy for each block"),
    (
        "not a decoder of the Llama kind|mixture of experts",
        "there is no estimate for it; train to see",
    ),
    ("MAX_POSITIONS positions", "lower `--context_length`"),
    ("is no price", "write a number"),
    ("has the splits", "give one of these"),
    ("expected (an object|\\{)", "write the record in one of [these shapes](data.md)"),
    (
        "chat template|tool calls|^empty text|^no messages|^weight 0",
        "nothing, if it is a few rows: they are dropped and counted. If it is all, check the template "
        "or the records",
    ),
    ("no row (is left )?to train on", "read the data report: it says what was dropped, and why"),
    (
        "the probe failed",
        "run `fsdp-qlora bench` with the flags of the plan to see the whole error",
    ),
    ("no \\*.safetensors file", "give the folder that holds the weights"),
    ("can't read from byte|become shorter", "download the file again; check the disk"),
    ("--attn_implementation ATTN", "use sdpa or eager"),
    ("is not computed here", "leave it out, or use what the line names"),
    ("wrap policy is true for no module", "give another function, or `--wrap_policy block`"),
    (
        r"rank \w+ could not write|no checkpoint could be written|different bytes than were|"
        "bytes differ from",
        "check for a full or broken disk; the line has the reason",
    ),
    (
        "copied to every machine|s file:",
        "check that machine's disk and link; rerun the command",
    ),
    (
        "^rank R: WORD",
        "check for a full or broken disk on that rank's machine; the line has the reason",
    ),
    (
        "reached the rendezvous",
        "read the logs of the missing ranks; all machines must run the same command",
    ),
    (
        "sent nothing for",
        "find the reason in that rank's own output; raise `--timeout_minutes` if it was only slow",
    ),
    ("GIVEN: VALUE", "another message of this page, about the held-out rows"),
    ("rows PLACE to STOP", "take the checkpoint before it with `--resume FOLDER`"),
    ("embedding with DoRA", "use PEFT's merge_and_unload"),
    (
        "a trained bias|has ROWS rows|has shape SHAPE, but the base's",
        "give the model that it was trained on",
    ),
    ("peft_type is|CONFIG_FILE: REASON", "give an adapter folder that PEFT or this project wrote"),
    ("--weights WEIGHTS: NAME", "give the file as the original script saved it"),
    ("--repo REPO", "log in with `hf auth login`, and check the name"),
    ("no cell of GRID", "take a name from the grid"),
    ("goes with --report", "add it, or leave this flag out"),
    ("cells are named", "give each cell a `name`"),
    ("cell NUMBER", "correct the setting in that cell"),
    ("not a row of measurements|no name or no model", "give a file that `fsdp-qlora bench` wrote"),
    ("no measured row", "give a file with rows other than those"),
    ("not wanted", "nothing: a plan of other versions is made anew"),
    ("demo's model is missing", "run that command"),
    (
        "a sample of its rows",
        "check the rows and --train_on; `fsdp-qlora data` prints which tokens are trained",
    ),
    ("SQL|one answer for each row", "nothing: that answer counts as wrong"),
]

VERBS = "choose|give|use|save|run|download|takes|convert|rename|set|needs"
SPLITS = ("; ", rf": (?=(?:{VERBS})\b)", r"\. (?=[A-Z])")


def fault_and_remedy(text: str) -> tuple[str, str]:
    """A message's two halves; the second is empty if neither it nor REMEDIES says what to do."""
    if found := re.match(r"(.*? must be (?!left)(.+?), got \w+)$", text):
        return text, f"give {found[2]}"
    for split in SPLITS:
        fault, *rest = re.split(split, text, maxsplit=1)
        if rest and not rest[0].isupper():
            return fault, rest[0]
    return text, next((remedy for words, remedy in REMEDIES if re.search(words, text)), "")


def flag_of(fault: str) -> str:
    """The first flag that a fault names."""
    found = re.search(r"--[a-z_0-9]+[a-z0-9]\b", fault)
    return f"`{found[0]}`" if found else ""


def section_of(message: Message) -> str:
    """The title under which a message stands."""
    return next(title for title, files, _ in SECTIONS if message.file.startswith(files))


def cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def messages_page() -> str:
    """The page."""
    found = messages(read_source())
    parts = [INTRO]
    for title, _, note in SECTIONS:
        halves = {fault_and_remedy(m.text) for m in found if section_of(m) == title}
        if not halves:
            continue
        rows = sorted(
            ((flag_of(fault), fault, remedy) for fault, remedy in halves),
            key=lambda row: (not row[0], row),
        )
        table = [f"| {flag} | {cell(fault)} | {cell(remedy)} |" for flag, fault, remedy in rows]
        parts.append(
            "\n".join(
                [
                    f"## {title}",
                    "",
                    *([note, ""] if note else []),
                    "| flag | it says | do |",
                    "|---|---|---|",
                    *table,
                ]
            )
        )
    return "\n\n".join(parts) + "\n"
