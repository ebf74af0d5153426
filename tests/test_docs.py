"""What the docs say is so: pages build, commands exist, errors have entries, tables are the code's."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fsdp_qlora.cli import COMMANDS, main
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.migration import SAME, TABLES, flag_table
from fsdp_qlora.sharding import STRATEGIES

from .tokenizers import save_chat_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HISTORY = {"LOG.md"}  # what was done once, with the flags of its day
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    p for p in DOCS.rglob("*.md") if p.name not in HISTORY
)
# Programs of others; of these, only that they are meant is known.
OTHERS = {
    "git",
    "cd",
    "pip",
    "python",
    "hf",
    "export",
    "cat",
    ".",
    "ulimit",
    "docker",
    "nvidia-smi",
    "kubectl",
    "sbatch",
    "srun",
    "ssh",
    "ray",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "ls",
    "torchrun",
    "llama.cpp/build/bin/llama-quantize",
}
# Flags of others that the docs name.
FOREIGN = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "max_restarts",
    "standalone",
    "master_addr",
    "local_addr",
    "config_file",
    "gpus",
    "outfile",
    "outtype",
    "layers",
    "ranks",
    "write",
}


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags that a command of fsdp-qlora takes, as its --help lists them."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_qlora.cli", command, "--help", "all"],
        text=True,
        capture_output=True,
        env=os.environ | {"COLUMNS": "1000"},
    )
    return frozenset(re.findall(r"^ +(?:-h [^,]*, )?--([a-z_0-9]+)", done.stdout, flags=re.M))


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's bash blocks, in words."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        block = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.M | re.S)  # the text of a file
        lines = block.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        for line in words:
            for part in " ".join(map(shlex.quote, line)).split("'&&'"):
                if part.strip():
                    found.append(shlex.split(part))
    return found


def own_command(words: list[str]) -> list[str] | None:
    """The arguments for fsdp-qlora in a command; None for one that is not its."""
    words = [w for i, w in enumerate(words) if not re.fullmatch(r"[A-Z_0-9]+=.*", w) or i > 3]
    if words[0] == "fsdp-qlora":
        return words[1:]
    if "train.py" in words:
        return ["train", *words[words.index("train.py") + 1 :]]
    if words[:3] == ["python", "-m", "fsdp_qlora.cli"]:
        return words[3:]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_of_a_page_exists_with_its_flags(page):
    for words in commands(page):
        argv = own_command(words)
        if argv is None:
            assert is_known(words), f"{page.name}: {' '.join(words)}"
        else:
            check_flags(argv, page.name)


def is_known(words: list[str]) -> bool:
    """Whether a command is of another program, or names a file, module or target that is there."""
    program = words[0]
    if program == "make":
        return all(
            re.search(rf"^{w}:", (ROOT / "Makefile").read_text(), flags=re.M) for w in words[1:]
        )
    files = [w for w in words if re.fullmatch(r"(scripts|benchmarks|examples|tests)/[\w/.-]+", w)]
    if "-m" in words[:3] and words[words.index("-m") + 1].split(".")[0] in ("tests", "fsdp_qlora"):
        files.append(words[words.index("-m") + 1].replace(".", "/"))
    there = all((ROOT / f).exists() or (ROOT / f"{f}.py").exists() or "results" in f for f in files)
    return there and (program in OTHERS or bool(files) or program.startswith(".venv/bin/"))


def check_flags(argv: list[str], page: str):
    """A command of fsdp-qlora: its name, its flags, and the values of those that are settings."""
    command = argv[0]
    if command in ("--help", "COMMAND"):
        return
    assert command in COMMANDS, f"{page}: fsdp-qlora {command}"
    named = {w.removeprefix("--").split("=")[0] for w in argv if re.match(r"--[a-z]", w)}
    unknown = named - flags_of(command) - {"help"}
    assert not unknown, f"{page}: {command} {sorted(unknown)}"
    if "..." not in argv:
        parse(settings_only(argv[1:]))


def settings_only(argv: list[str]) -> list[str]:
    """The arguments that are settings of a run; a recipe of the user's is left out."""
    found, settings = [], flags_of("train") - {"config", "dry_run", "on_end", "help"}
    for place, word in enumerate(argv):
        if not word.startswith("--") or word[2:].split("=")[0] not in settings:
            continue
        follows = argv[place + 1 : place + 2]
        found += [word, *(w for w in follows if not w.startswith("--"))]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_flag_that_a_page_names_exists(page):
    known = frozenset().union(*map(flags_of, COMMANDS)) | FOREIGN | frozenset(SAME)
    named = re.findall(r"(?<![\w-])--([a-z][a-z_0-9]*[a-z0-9])(?![\w-])", page.read_text())
    unknown = set(named) - known
    assert not unknown


def test_the_quickstart_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    """With a tiny model in the place of the demo's, and rows as short as its context."""
    page = DOCS / "quickstart.md"
    model = save_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (rows,) = re.findall(r"rows.jsonl <<'END'\n(.*?)END\n", page.read_text(), flags=re.S)
    Path("rows.jsonl").write_text(rows)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words in commands(page):
        argv = own_command(words)
        if argv is None or argv[0] == "doctor":
            continue  # tests/test_doctor.py
        argv = [model if w == ".cache/SmolLM2-135M-Instruct" else w for w in argv]
        assert main(argv) == 0, f"{argv}: {capsys.readouterr().err}"
    assert {p.name for p in Path("first").iterdir()} >= {"adapter", "metrics.jsonl", "loss.png"}
    assert Path("merged/config.json").exists()


# ---- errors -------------------------------------------------------------------------------------

WARN = (
    "settings_without_effect",
    "lost_updates",
    "of_gradient_checkpointing",
    "odd_rates",
    "batch_above_data",
)  # functions whose texts are warnings


def literal_words() -> list[tuple[str, str]]:
    """(place, longest literal part) of each ValueError of the package."""
    found = []
    for path in sorted((ROOT / "fsdp_qlora").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "ValueError":
                continue
            parts = [
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) > 3
            ]
            if parts:
                found.append((f"{path.name}:{node.lineno}", max(parts, key=len)))
    return found


def words_of(text: str) -> str:
    """A text's letters and digits."""
    return re.sub(r"[^a-z0-9]+", " ", text.replace("&lt;", "<").lower()).strip()


def test_every_error_message_has_its_entry():
    page = words_of((DOCS / "messages.md").read_text())
    parts = literal_words()
    assert len(parts) > 200
    for place, text in parts:
        for half in re.split(r"[;:.] ", text):
            assert words_of(half) in page, (
                f"{place}: {half!r}; run: python scripts/make_reference.py"
            )


def texts_about_flags() -> list[tuple[str, str]]:
    """(place, text) of what begins with a flag anywhere in the package, but for what is only printed."""
    tools, found = runpy.run_path(str(ROOT / "scripts/messages.py")), []
    places = tools["read_source"]().places
    for node in places:
        if isinstance(node, ast.Call) and tools["called"](node) in (
            "print",
            "print_main",
            "choose",
        ):
            for inside in ast.walk(node):
                inside.is_printed = True
    for node, (file, function) in places.items():
        if not isinstance(node, ast.JoinedStr) or hasattr(node, "is_printed"):
            continue
        if getattr(function, "name", "") in WARN:
            continue
        text = "".join(map(tools["plain_text"], tools["pieces_of"](node)))
        if re.match(r"--[a-z_]+[ :]", text):
            found.append((file, text))
    return found


def test_a_message_that_a_function_hands_to_the_one_that_raises_it_has_its_entry():
    page, texts = words_of((DOCS / "messages.md").read_text()), texts_about_flags()
    assert any(text.startswith("--dataset has different rows") for _, text in texts)
    for file, text in texts:
        for half in re.split(r"[A-Z_]{3,}|[;:.] ", text):  # what is filled in, or is the remedy
            assert words_of(half) in page, (
                f"{file}: {text!r}; run: python scripts/make_reference.py"
            )


def test_every_entry_says_what_to_do():
    """Where a message does not say it, scripts/messages_page.py has to."""
    page = (DOCS / "messages.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "it says" not in line]
    assert not [row for row in rows if not re.split(r"(?<!\\)\|", row)[3].strip()]


@pytest.mark.parametrize(
    "flags",
    [
        ["--lora_rank", "0"],
        ["--lora_rnak", "8"],
        ["--packing", "maybe"],
        ["--quant", "nf3"],
        ["--use_cpu_offload", "--sharding_strategy", "ddp"],
        ["--train_type", "full", "--quant", "nf4"],
    ],
)
def test_an_error_as_it_is_printed_is_found_on_the_page(flags):
    with pytest.raises(ValueError) as error:
        parse(flags)
    rows = re.findall(
        r"^\| [^|]*\| (.*?) \| (.*?) \|$", (DOCS / "messages.md").read_text(), flags=re.M
    )
    shapes = [re.sub(r"[A-Z][A-Z_]+", ".*", re.escape(said)) for said, _ in rows]
    assert any(re.match(shape, str(error.value)) for shape in shapes if len(shape) > 9), error.value


def test_an_error_whose_text_is_elsewhere_only_passes_one_on():
    """Texts that the source does not show, each raised a second time with an entry of its own."""
    tools = runpy.run_path(str(ROOT / "scripts/messages.py"))
    assert set(tools["without_text"](tools["read_source"]())) <= {
        "checkpoint/writer.py: failed[0]",
        "config/flags.py: message",
        "data/cache.py: text",
        "data/node_share.py: data[1:].decode()",
        "data/stream.py: faults[0]",
        "training/loop.py: '; '.join((text for text in found if text))",
    }


# ---- pages --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in ("index.html", "quickstart.html", "pictures/step.svg", "examples/custom_loop.py"):
        assert (tmp_path / name).exists()
    api = (tmp_path / "api.html").read_text()
    assert "Needs a process group" in api  # docstrings are in it


def test_the_picture_is_the_scripts():
    drawn = runpy.run_path(str(ROOT / "scripts/step_picture.py"))["draw"]()
    assert "all-gather" in drawn and drawn.count("<path") == (
        (DOCS / "pictures/step.svg").read_text().count("<path")
    )


def test_the_strategies_table_is_the_one_in_the_code():
    lines = (DOCS / "strategies.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    freed = {None: "-", True: "yes", False: "no"}
    expected = [
        [name, s.fsdp1, s.mesh, freed[s.reshard_after_forward], s.summary]
        for name, s in STRATEGIES.items()
    ]
    assert rows[1:] == expected


@pytest.mark.parametrize("trainer", TABLES)
def test_the_tables_of_migrating_are_those_that_hints_come_from(trainer):
    text = (DOCS / "migrating.md").read_text()
    assert f"## {trainer}\n" in text and f"-->\n{flag_table(trainer)}\n<!-- end -->" in text


def test_migrating_lists_every_name_that_is_taken():
    listed = (DOCS / "migrating.md").read_text().split("<!-- same -->")[1].split("<!-- end")[0]
    assert re.findall(r"`--(\w+)`", listed) == list(SAME)


def test_what_migrating_says_of_old_defaults_is_so():
    defaults = parse([])[0]
    assert (defaults.lora_target_modules, defaults.use_cpu_offload, defaults.save_model) == (
        "all-linear",
        False,
        True,
    )


def test_each_entry_of_the_log_opens_with_its_verdict_and_the_index_lists_it():
    log = (DOCS / "LOG.md").read_text()
    index, *topics = re.split(r"^## ", log.partition("## Index\n")[2], flags=re.M)
    listed = re.findall(r"^    - (\d\d-\d\d) \[(.*?)\]\(#", index, flags=re.M)
    found = []
    for topic in topics:
        entries = re.findall(r"^### 2026-(\d\d-\d\d): (.*)\n\n(.*)", topic, flags=re.M)
        assert len(entries) == topic.count("\n### ")
        assert all(re.fullmatch(r"\*\*.+\*\*", verdict) for _, _, verdict in entries)
        dates = [date for date, _, _ in entries]
        assert dates == sorted(dates, reverse=True)
        found += [(date, title) for date, title, _ in entries]
    assert found == listed and len(found) > 90


def figures(text: str) -> set[str]:
    """Numbers with a point or a comma in them, as a text writes them."""
    return set(re.findall(r"(?<![\w.,])\d+(?:[.,]\d+)+(?![\w.,]*\d)", text))


def test_every_figure_that_the_readme_opens_with_is_measured():
    opening = (ROOT / "README.md").read_text().partition("## Two commands")[0]
    names = "performance.md", "memory.md", "planner.md", "long_context.md"
    known = figures("\n".join((DOCS / name).read_text() for name in names))
    rows = (ROOT / "benchmarks/results/real_rows_h200_2026-11-29.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        if row["tokens_per_second"]:
            known |= {f"{row['tokens_per_second']:,.0f}", f"{row['peak_allocated_gib']:.1f}"}
    versions = figures("Unsloth 2026.10.9, TRL 1.15, TRL 1.16, Llama-3.1")
    assert len(figures(opening)) > 25
    assert not figures(opening) - known - versions


def test_what_contributing_says_of_the_layout_is_so():
    """Every package in the order of imports, and every file that it names."""
    from .test_layout import ORDER

    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("| package | what |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == ORDER
    for path in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / path).exists() or (ROOT / "fsdp_qlora" / path).exists(), path
