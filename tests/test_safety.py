"""No pickle, no code from elsewhere, no secret in anything that is printed or written."""

from __future__ import annotations

import ast
import configparser
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.loading import read_config
from fsdp_qlora.redact import HIDDEN, redact, redact_all, without_folders

from .fakehub import fake_hub
from .tokenizers import save_chat_model

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    [*(ROOT / "fsdp_qlora").rglob("*.py"), ROOT / "train.py", *(ROOT / "examples").glob("*.py")]
)
ROW = json.dumps({"instruction": "say hi", "output": "hi you"}) + "\n"

# ---- pickle ---------------------------------------------------------------------------------------

PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "pd.read_pickle",
    "pandas.read_pickle",
    "torch.package",
    "torch.hub.load",
    # YAML may build any Python object, but for its safe loader.
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "yaml.FullLoader",
}
# torch's own checkpoint files are pickled (`.metadata`), unlike its helpers for state dicts.
CHECKPOINT_FILES = {"FileSystemReader", "FileSystemWriter", "dcp.load", "dcp.save"}


def names_of(tree: ast.AST):
    """Dotted names that are imported or used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node.id


def faults_of(source: str) -> list[str]:
    """Ways in which a program could read or write pickles, or run text as code."""
    tree, found = ast.parse(source), []
    for name in names_of(tree):
        first, last = name.split(".")[0], name.split(".")[-1]
        if first in PICKLERS or last in CHECKPOINT_FILES:
            found.append(name)
        if name in LOADERS | CHECKPOINT_FILES | {"eval", "exec"}:
            found.append(name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if given.get("weights_only") == "False":
            found.append("weights_only=False")
        if given.get("allow_pickle", "False") != "False":
            found.append("allow_pickle")
        if given.get("trust_remote_code") == "True" and not isinstance(node.func, ast.Name):
            found.append("trust_remote_code=True")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_reads_or_writes_pickles_or_runs_text(path):
    assert not faults_of(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "yaml.load(text)",
        "from yaml import FullLoader",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.save(x, 'y')",
        "np.load('x', allow_pickle=True)",
        "torch.load('x', weights_only=False)",
        "import joblib",
        "eval('1')",
        "from torch.distributed.checkpoint import FileSystemReader",
        "AutoModel.x('y', trust_remote_code=True)",
    ],
)
def test_the_check_finds_each_way(source):
    assert faults_of(source)


def test_objects_travel_between_ranks_in_one_file_only():
    """torch pickles these, between the processes of one run; SECURITY.md says so."""
    users = {
        path.name
        for path in SOURCES
        if re.search(r"(broadcast|gather|scatter)_object|object_list", path.read_text())
    }
    assert users <= {"collectives.py"}


def test_floors_of_dependencies_are_above_known_faults():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [
        line.split(">=") for line in setup["options"]["install_requires"].split() if ">=" in line
    ]
    numbers = {name: tuple(map(int, floor.split("."))) for name, floor in wanted}
    assert numbers["torch"] >= (2, 10) and numbers["transformers"] >= (5, 3)


# ---- code of models -------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:-1], COMMIT.upper()])
def test_code_of_a_model_needs_a_full_commit(revision):
    with pytest.raises(
        ValueError, match="--trust_remote_code true .*--revision with 40 hex digits"
    ):
        RunConfig(model_name="org/model", trust_remote_code=True, revision=revision)


def test_code_of_a_folder_is_fixed_by_no_commit(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        RunConfig(model_name=str(tmp_path), trust_remote_code=True, revision=COMMIT)
    assert RunConfig(
        model_name="org/model", trust_remote_code=True, revision=COMMIT
    ).trust_remote_code


@pytest.fixture
def model_with_code(tmp_path):
    """A folder whose configuration is a Python class that leaves a trace when it runs."""
    folder, trace = tmp_path / "model", tmp_path / "trace"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    )
    (folder / "own.py").write_text(
        f"from transformers import PretrainedConfig\nopen({str(trace)!r}, 'w').close()\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    return folder, trace


def test_code_of_a_model_is_not_run_unasked_and_the_remedy_is_said(model_with_code, capsys):
    folder, trace = model_with_code
    assert main(["train", "--model_name", str(folder), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--trust_remote_code true" in line and "--revision" in line and not trace.exists()


@pytest.mark.slow
def test_only_the_given_commit_is_read_code_and_all(model_with_code, tmp_path):
    folder, trace = model_with_code
    program = (
        f"from fsdp_qlora.loading import read_config\nread_config('org/model', {COMMIT!r}, True)"
    )
    with fake_hub() as hub:
        hub.served["org/model"] = folder
        env = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=ROOT
        )
        read = [path for _, path in hub.requests if "/resolve/" in path]
    assert done.returncode == 0, done.stderr
    assert trace.exists() and any(path.endswith("own.py") for path in read)
    assert all(f"/resolve/{COMMIT}/" in path for path in read), read


def test_transformers_loaders_are_called_with_code_switched_off():
    """Every Auto class is told, or it would ask on the terminal."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.fullmatch(r"(transformers\.)?Auto\w+\.from_\w+", name):
                told = {k.arg for k in node.keywords}
                assert None in told or "trust_remote_code" in told, (path, node.lineno)


# ---- secrets --------------------------------------------------------------------------------------

TOKEN, KEY, PASSWORD = "hf_canaryCanaryCanary123", "wbCanary0123456789abcdef", "canaryPass99"
CANARIES = re.compile("canary", re.IGNORECASE)


@pytest.mark.parametrize(
    "text, shown",
    [
        (f"token {TOKEN}.", "token hf_***."),
        (f"https://me:{PASSWORD}@host/x/y", "https://***@host/x/y"),
        (f"s3://{PASSWORD}@bucket/rows.jsonl", "s3://***@bucket/rows.jsonl"),
        ("https://host/x?a=1&token=canary123&b=2", "https://host/x?a=1&token=***&b=2"),
        ("https://host/x?X-Amz-Signature=canary", "https://host/x?X-Amz-Signature=***"),
        ("https://host/x?lr=1", "https://host/x?lr=1"),
        ("rank 0 at C:/x@y", "rank 0 at C:/x@y"),
        ("half_precision and me@example.org", "half_precision and me@example.org"),
    ],
)
def test_secrets_are_hidden_and_the_rest_is_left(text, shown):
    assert redact(text) == shown


def test_values_of_secret_variables_are_hidden_wherever_they_are(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_SECRET", "short")
    monkeypatch.setenv("MASTER_PORT", "canary-port-number")
    found = redact_all({"a": [f"x{KEY}y", 3, None], "b": ("short", "canary-port-number")})
    assert found == {"a": [f"x{HIDDEN}y", 3, None], "b": ["short", "canary-port-number"]}


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.text(max_size=20))
def test_a_password_in_a_url_never_survives(before, after):
    assert "pass1Canary" not in redact(f"{before} https://me:pass1Canary@host/{after}")


def test_names_for_others_have_no_folders(tmp_path):
    assert without_folders(str(tmp_path / "my model")) == "my model"
    assert without_folders("meta-llama/Llama-2-7b-hf") == "meta-llama/Llama-2-7b-hf"
    assert without_folders("/home/me/x") == "x" and without_folders("~/models/y") == "y"
    assert (
        without_folders(f"https://me:{PASSWORD}@host/rows.jsonl") == "https://***@host/rows.jsonl"
    )


# Commands one after another, in a process that has its environment from the start.
ALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from fsdp_qlora.cli import main
printed = {}
for name, argv in json.loads(sys.argv[1]).items():
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):
        code = main(argv)
    printed[name] = code, text.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """All that train, generate, merge, push and several mistakes print and write, with canaries set.

    The folders have spaces and letters beyond ASCII.
    """
    folder = tmp_path_factory.mktemp("a run") / "größe é 数据"
    base = save_chat_model(folder / "base model")
    (folder / "meine Zeilen ü.jsonl").write_text(ROW * 2)
    out, url = (
        folder / "out put ß",
        f"https://me:{PASSWORD}@example.invalid/rows.jsonl?token={TOKEN}",
    )
    tune = [
        "--model_name",
        base,
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--lora_rank",
        "2",
        "--compile",
        "false",
        "--world_size",
        "1",
        "--output_dir",
        str(out),
        "--name",
        f"r-{TOKEN}",
    ]
    rows, adapter = str(folder / "meine Zeilen ü.jsonl"), str(out / "adapter")
    with fake_hub() as hub:
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | {
            "HF_TOKEN": TOKEN,
            "WANDB_API_KEY": KEY,
            "HF_ENDPOINT": hub.url,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline",
        }

        commands = {
            "train": [
                "train",
                *tune,
                "--dataset",
                rows,
                "--verbose",
                "--checkpoint_every",
                "1",
                "--log_to",
                "tqdm,tensorboard,wandb",
            ],
            "generate": [
                "generate",
                "--model_name",
                base,
                "--adapter_folder",
                adapter,
                "--prompt",
                "größe?",
                "--max_new_tokens",
                "2",
                "--device",
                "cpu",
            ],
            "merge": [
                "merge",
                "--adapter_folder",
                adapter,
                "--output_dir",
                str(folder / "mérged 1"),
            ],
            "push": ["push", adapter, "me/tuned"],
        }
        done = subprocess.run(
            [sys.executable, "-c", ALL, json.dumps(commands)],
            env=env,
            capture_output=True,
            text=True,
            cwd=folder,
        )
        *rest, said = done.stdout.splitlines()
        printed = json.loads(said) | {"the rest": (done.returncode, "\n".join(rest) + done.stderr)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HF_TOKEN=TOKEN, WANDB_API_KEY=KEY, HF_HUB_OFFLINE="1").items():
            patch.setenv(name, value)

        def here(*argv):
            text = io.StringIO()
            with redirect_stdout(text), redirect_stderr(text):
                code = main(list(argv))
            return code, text.getvalue()

        printed |= {
            "bad data": here("train", *tune, "--dataset", url, "--verbose"),
            "bad model": here("train", *tune, "--model_name", url, "--verbose"),
            "bad flag": here("train", f"--lr={TOKEN}", "--verbose"),
            "bad repo": here("push", adapter, url),
            "a fault": here("merge", "--adapter_folder", f"\0{KEY}", "--verbose"),
        }
    written = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "cache" not in p.parts
    }
    return folder, printed, written, hub


def test_paths_with_spaces_and_any_letters_work_from_training_to_the_hub(outputs):
    folder, printed, written, hub = outputs
    for name in ("train", "generate", "merge", "push"):
        assert printed[name][0] == 0, printed[name][1]
    assert "Loading weights" not in printed["generate"][1]
    assert "mérged 1/model.safetensors" in written
    name = "adapter_model.safetensors"
    assert hub.pushed[name] == written[f"out put ß/adapter/{name}"]


def test_mistakes_are_said_without_the_secrets_in_them(outputs):
    _, printed, _, _ = outputs
    for name in ("bad data", "bad model", "bad flag", "bad repo"):
        code, text = printed[name]
        assert code == 2 and HIDDEN in text and "error: " in text, (name, text)


def test_no_secret_is_printed_written_or_pushed(outputs):
    folder, printed, written, hub = outputs
    for name, (_, text) in printed.items():
        assert not CANARIES.search(text), (name, text)
    for name, data in written.items():
        assert not CANARIES.search(data.decode("utf-8", "ignore")), name
    for name, data in hub.pushed.items():
        assert not CANARIES.search(data.decode("utf-8", "ignore")), name
    assert any(name.endswith("run.json") for name in written)
    assert any(name.endswith(".wandb") for name in written)
    assert any("out put ß/tensorboard/" in name for name in written)
    assert "out put ß/metrics.jsonl" in written and "out put ß/adapter/fsdp_qlora.json" in written


def test_the_pushed_files_and_cards_name_no_folder_of_this_machine(outputs):
    folder, _, written, hub = outputs
    pushed = {name: data.decode("utf-8", "ignore") for name, data in hub.pushed.items()}
    assert hub.private == {"me/tuned": True}
    assert {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "fsdp_qlora.json",
    } <= pushed.keys()
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == "base model"
    cards = {"pushed": pushed["README.md"], "merged": written["mérged 1/README.md"].decode()}
    for text in (*pushed.values(), *cards.values()):
        assert str(folder) not in text and str(folder.parent) not in text
        assert json.dumps(str(folder))[1:-1] not in text
    for card in cards.values():
        for part in (
            "base model",
            "meine Zeilen ü.jsonl",
            "1 x CPU",
            "torch 2",
            "optimizer steps",
            "training loss",
            "lora_rank",
        ):
            assert part in card, part
        assert re.search(r"sha256 of the tokenized rows \| [0-9a-f]{16,}", card)
    assert "rounded to nf4 and back" in cards["merged"]


def test_a_config_of_a_missing_model_is_an_error_of_one_line():
    with pytest.raises(ValueError, match="--model_name"):
        read_config("./absent")
