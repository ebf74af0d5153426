"""The command line: forms of a flag, help, and mistakes that end in one line and exit code 2."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fsdp_qlora import __version__
from fsdp_qlora.bench.command import BenchOptions
from fsdp_qlora.catalog.known_models import hub_name
from fsdp_qlora.cli import COMMANDS, TrainOptions, main, parse
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.flags import COMMON, EXAMPLES
from fsdp_qlora.config.migration import SAME, TABLES
from fsdp_qlora.config.reference import schema
from fsdp_qlora.config.run import GROUPS

from .tiny import TARGETS, save_tiny

ROOT = Path(__file__).parent.parent
BOOLEANS = [f.name for f in fields(RunConfig) if type(f.default) is bool]


def parsed(*argv) -> RunConfig:
    return parse(list(argv))[0]


# ---- forms of a flag ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["save_model", "use_gradient_checkpointing", "use_cpu_offload"])
def test_a_switch_is_set_bare_or_with_a_value_in_any_case(name):
    for form in (
        [f"--{name}"],
        [f"--{name}", "true"],
        [f"--{name}", "True"],
        [f"--{name}=true"],
        [f"--{name}=True"],
        [f"--{name}", "1"],
        [f"--{name}", "yes"],
    ):
        assert getattr(parsed(*form), name) is True
    for form in (
        [f"--{name}", "false"],
        [f"--{name}", "False"],
        [f"--{name}=false"],
        [f"--{name}=False"],
        [f"--{name}", "0"],
        [f"--{name}", "no"],
    ):
        assert getattr(parsed(*form), name) is False


def test_a_bare_switch_does_not_swallow_the_next_flag():
    config = parsed("--verbose", "--lr", "0.1", "--no_sync")
    assert (config.verbose, config.lr, config.no_sync) == (True, 0.1, True)


@pytest.mark.parametrize("name", [n for n in BOOLEANS if getattr(RunConfig(), n)])
def test_every_switch_that_is_on_by_default_can_be_turned_off(name):
    assert getattr(parsed(f"--{name}", "false"), name) is False


def test_values_have_the_type_of_their_setting():
    config = parsed(
        "--lr",
        "1e-4",
        "--batch_size=8",
        "--max_steps",
        "-1",
        "--name",
        "run 1",
        "--lora_target_modules",
        "q_proj,v_proj",
    )
    assert config == RunConfig(
        lr=1e-4, batch_size=8, name="run 1", lora_target_modules="q_proj,v_proj"
    )


def test_without_flags_every_setting_has_its_default():
    assert parsed() == RunConfig()


def test_the_last_of_a_repeated_flag_counts():
    assert parsed("--lr", "1", "--lr", "2").lr == 2.0


def test_extra_groups_are_parsed_beside_the_settings():
    config, options = parse(["--lr", "1", "--on_end", "true"], TrainOptions)
    assert (config.lr, options.on_end) == (1.0, "true")


# ---- help --------------------------------------------------------------------------------------


def without_torch(*argv) -> str:
    """What `main(argv)` prints in a process that must not import torch."""
    code = (
        "import sys\nfrom fsdp_qlora.cli import main\n"
        f"try: main({list(argv)!r})\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_all_of_train_lists_every_group_and_flag_and_imports_no_torch():
    text = without_torch("train", "--help", "all")
    for group in GROUPS:
        assert f"{group.__doc__}:" in text
        assert all(f"--{f.name} " in text for f in fields(group))


def test_help_shows_the_common_settings_and_says_how_many_more_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    own = {"dry_run", "on_end", "config", "defaults"}
    assert set(re.findall(r"^  --(\w+)", text, re.M)) - own == COMMON and 20 <= len(COMMON) <= 32
    more = len(fields(RunConfig)) - len(COMMON)
    assert f"\n{more} more settings: fsdp-qlora train --help all\n" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_does(command, capsys):
    assert COMMANDS[command].__doc__.splitlines()[0] in help_of(command, capsys)


def help_of(command: str, capsys) -> str:
    """What --help of a command prints, on one line."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command, group", [("bench", BenchOptions)])
def test_help_of_other_commands_lists_their_own_flags_too(command, group):
    text = without_torch(command, "--help", "all")
    assert all(f"--{f.name} " in text for f in (*fields(group), *fields(RunConfig)))


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_command_all_commands_are_listed_with_a_line_each(argv, capsys):
    assert main(argv) == 0
    text = capsys.readouterr().out
    for name, function in COMMANDS.items():
        assert f"{name} " in text and function.__doc__.splitlines()[0] in text


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fsdp_qlora {__version__}\n"


def test_the_package_is_run_as_a_module_too():
    """`torchrun -m fsdp_qlora train` needs no train.py."""
    command = [sys.executable, "-m", "fsdp_qlora"]
    said = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, f"fsdp_qlora {__version__}\n")
    wrong = subprocess.run([*command, "trian"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "did you mean train?" in wrong.stderr


def test_help_shows_choices_units_and_defaults_but_no_value_that_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("{auto,none,nf4,fp4,int8,hqq}", "default full_shard", "in tokens"):
        assert part in text
    assert "hqq_llama_pro" in text


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_at_the_end_of_help_are_commands_that_are_taken(command, capsys):
    for flags in EXAMPLES[command]:
        with pytest.raises(SystemExit) as ended:
            main([command, *shlex.split(flags), "--help", "all"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and f"  fsdp-qlora {command} {flags}\n" in text
        known = {word.split()[0] for word in re.findall(r"--\w+", text.split("examples:")[0])}
        assert set(re.findall(r"--\w+", flags)) <= known


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny llama and a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("model")
    words = ["<s>", "</s>", "<unk>", "###", "Question", "Answer", ":", "say", "hi", "you"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return save_tiny(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    record = json.dumps({"instruction": "say hi", "output": "hi you"})
    path.write_text(f"{record}\n" * 8)
    return str(path)


@pytest.fixture
def mistake(capsys, tmp_path, monkeypatch):
    """Runs `train` with a mistake: the one line on stderr; nothing may be written."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "fsdp_qlora.lifecycle.launcher.share_cores", lambda ranks: None
    )  # outlives a test

    def run(*argv, command="train"):
        capsys.readouterr()  # what fixtures printed
        output = tmp_path / "output"
        where = [f"--output_dir={output}", "--device=cpu"] if command == "train" else []
        assert main([command, *where, *map(str, argv)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        assert not output.exists()
        return line.removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    "argv, near",
    [
        (["--learning_rat", "1"], "--lr"),
        (["--lora_rnak", "8"], "--lora_rank"),
        (["-lr", "1"], "--lr"),
        (["--model", "x"], "--model_name"),
        (["--lora-rank", "8"], "--lora_rank"),
        (["--shardingstrategy=ddp"], "--sharding_strategy"),
        (["--use_gradient_checkpoint"], "--use_gradient_checkpointing"),
        (["--zzz"], None),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_known_one(mistake, argv, near):
    line = mistake(*argv)
    assert line.startswith(f"unknown flag {argv[0]}")
    assert f"did you mean {near}?" in line if near else "--" in line


@pytest.mark.parametrize(
    "argv, says",
    [
        (
            ["--optim", "adamw_8bit"],
            "TRL's optim is here: --optimizer adamw, adamw_8bit, adafactor",
        ),
        (["--report_to", "wandb"], "--log_to wandb"),
        (["--use_dora"], "PEFT's use_dora is here: --adapter dora"),
        (["--train_on_inputs"], "axolotl's train_on_inputs is here: --train_on all"),
        (["--clip_grad_norm", "1"], "torchtune's clip_grad_norm is here: --grad_norm"),
        (["--save-total-limit", "2"], "TRL's save_total_limit is here: --keep_checkpoints"),
        (["--use_liger_kernel"], "here: always: the loss is a chunked cross-entropy"),
    ],
)
def test_another_trainers_name_is_refused_with_what_to_type_here(mistake, argv, says):
    assert says in mistake(*argv)


def names_in_tables() -> dict[str, set[str]]:
    """Each name of the migration tables, with all that is said of it."""
    found: dict[str, set[str]] = {}
    for theirs, here in (row for rows in TABLES.values() for row in rows):
        for name in re.findall(r"`([\w.]+)`", theirs):
            found.setdefault(name.rpartition(".")[2], set()).add(here)
    return found


def test_names_with_the_same_meaning_are_settings_by_the_migration_tables():
    names, told = {field.name for field in fields(RunConfig)}, names_in_tables()
    assert set(SAME.values()) <= names
    for name, own in SAME.items():
        assert any(f"--{own}" in here for here in told[name]), name


def test_no_flag_of_any_command_has_another_trainers_name(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help", "all"])
        flags = re.findall(r"^  (?:-h \S+ )?--(\w+)", capsys.readouterr().out, re.M)
        assert flags and not set(flags) & set(SAME), command


@pytest.mark.parametrize("name, own", SAME.items())
def test_a_name_with_the_same_meaning_is_taken_as_a_flag_and_in_a_recipe(name, own, tmp_path):
    values = {
        "learning_rate": 0.25,
        "model_revision": "main",
        "bnb_4bit_quant_type": "fp4",
        "torch_compile": False,
    }
    default = getattr(RunConfig(), own)
    value = values.get(name, {bool: not default, int: 7, float: 0.25}.get(type(default), "x"))
    if own == "init_lora_weights":
        value = "olora"
    argv = [f"--{name}", str(value).lower()]
    beside = {"target_parameters": ["--lora_dropout=0"], "eval_steps": ["--eval_share=0.1"]}
    more = beside.get(name, [])
    (tmp_path / "recipe.yaml").write_text(f"{name}: {str(value).lower()}\n")
    for given in (argv, [argv[0].replace("_", "-") + "=" + argv[1]]):
        config = parsed(*given, *more)
        assert getattr(config, own) == value and own in config.typed
    assert getattr(parsed("--config", str(tmp_path / "recipe.yaml"), *more), own) == value
    jsonschema.validate({name: value}, schema())


def test_a_setting_under_both_of_its_names_in_a_recipe_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("lr: 1e-4\nlearning_rate: 2e-4\n")
    with pytest.raises(
        ValueError, match="recipe.yaml:2: lr appears twice, first at .*recipe.yaml:1"
    ):
        parsed("--config", str(path))


@pytest.mark.parametrize(
    "command, more",
    [("train", ["--dataset", "dummy"]), ("data", []), ("generate", ["--prompt", "x"])],
)
def test_a_well_known_model_needs_no_owner_in_any_command(
    command, more, monkeypatch, capsys, tmp_path
):
    """Offline: the message names the hub's model, which is not in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([command, "--model_name", "llama-3.1-8b", *more]) == 2
    said = capsys.readouterr().err
    assert "--model_name meta-llama/Llama-3.1-8B: HF_HUB_OFFLINE is set" in said


def test_a_tuned_model_is_not_taken_for_its_base_and_a_folder_is_itself(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="meta-llama/llama-3.1-8b-instruct, or meta-llama/Llama-3.1-8B"
    ):
        hub_name("llama-3.1-8b-instruct")
    assert hub_name("llama-3.3-70b-instruct") == "meta-llama/Llama-3.3-70B-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert hub_name("gpt2") == "gpt2" and hub_name("gpt2-xl") == "openai-community/gpt2-xl"
    assert hub_name("me/llama-3.1-8b") == "me/llama-3.1-8b"


def test_a_flag_is_not_taken_from_its_beginning(mistake):
    assert "unknown flag --lora_ra" in mistake("--lora_ra", "8")


def test_a_word_without_a_flag_is_named(mistake):
    assert "unexpected argument 'q_proj'" in mistake("q_proj")


def test_an_unknown_command_is_named_with_the_choices(mistake):
    line = mistake(command="trian")
    assert "unknown command 'trian'; did you mean train?" in line
    assert all(name in line for name in COMMANDS)


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--batch_size", "1.5"], ["--batch_size", "1.5"]),
        (["--save_model", "maybe"], ["--save_model", "'maybe'", "true or false"]),
        (["--lora_rank"], ["--lora_rank: the value is missing"]),
        (["--precision", "fp8"], ["--precision fp8", "choose bf16, fp32"]),
        (["--batch_size", "0"], ["--batch_size", "1 or more"]),
        (["--log_to", "neptune"], ["--log_to neptune", "choose tqdm", "wandb"]),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_flag(mistake, argv, parts):
    line = mistake(*argv)
    assert all(part in line for part in parts), line


def test_a_missing_model_folder_is_named(mistake, rows, tmp_path):
    line = mistake("--model_name", tmp_path / "absent", "--dataset", rows)
    assert f"--model_name {tmp_path / 'absent'}" in line and "does not exist" in line


def test_a_model_folder_without_a_tokenizer_is_named(mistake, rows, tmp_path):
    folder = save_tiny(tmp_path / "bare")
    line = mistake("--model_name", folder, "--dataset", rows)
    assert f"--model_name {folder}" in line and "tokenizer" in line


def test_a_missing_data_file_is_named(mistake, model, tmp_path):
    line = mistake("--model_name", model, "--dataset", tmp_path / "absent.jsonl")
    assert f"--dataset {tmp_path / 'absent.jsonl'}" in line and "no such file" in line


def test_bad_json_is_named_with_file_and_line(mistake, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"instruction": "say hi", "output": "hi"})
    path.write_text(f"{good}\n\n{good}\n{{'instruction': 1}}\n{good}\n")
    line = mistake("--model_name", model, "--dataset", path)
    assert f"{path}:4" in line and "JSON" in line


def test_a_target_that_does_not_exist_is_named_with_the_candidates(mistake, model, rows):
    line = mistake("--model_name", model, "--dataset", rows, "--lora_target_modules", "qkv_proj")
    assert "--lora_target_modules qkv_proj" in line and all(name in line for name in TARGETS)


def test_a_broken_checkpoint_is_named(mistake, model, rows, tmp_path):
    folder = Path(save_tiny(tmp_path / "model"))
    for file in Path(model).glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    line = mistake("--model_name", folder, "--dataset", rows)
    assert str(folder / "model.safetensors") in line and "download it again" in line


@pytest.mark.parametrize(
    "command, flag",
    [
        ("merge", "adapter_folder"),
        ("check", "adapter_folder"),
        ("export", "folder"),
        ("generate", "adapter_folder"),
        ("convert", "weights"),
        ("report", "run"),
        ("push", "folder"),
    ],
)
def test_what_a_command_is_about_is_its_first_word_or_a_flag(
    capsys, model, tmp_path, command, flag
):
    """A folder that is missing is named alike; two that differ are refused."""
    absent, said = str(tmp_path / "absent"), []
    more = {
        "generate": ["--model_name", model, "--prompt", "hi"],
        "merge": ["--model_name", model],
        "push": ["--repo", "me/tuned"],
    }.get(command, [])
    for given in ([absent], [f"--{flag}", absent], [absent, f"--{flag}={absent}"]):
        assert main([command, *given, *more]) == 2
        said.append(capsys.readouterr().err)
    assert absent in said[0] and len(set(said)) == 1
    assert main([command, absent, *more, f"--{flag}", "other"]) == 2
    assert capsys.readouterr().err == (
        f"error: --{flag} other: {absent} before the flags contradicts it; give only one\n"
    )


def test_a_failed_rank_says_which_it_is(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "--zzz"]) == 2
    assert capsys.readouterr().err.startswith("error (rank 3): unknown flag --zzz")


@pytest.mark.parametrize(
    "verbose, traceback",
    [
        (["--verbose"], True),
        (["--verbose", "true"], True),
        (["--verbose=true"], True),
        (["--verbose", "false"], False),
        (["--verbose=false"], False),
        ([], False),
    ],
)
def test_verbose_adds_the_traceback(capsys, verbose, traceback):
    assert main(["train", "--batch_size", "0", *verbose]) == 2
    assert ("Traceback" in capsys.readouterr().err) is traceback


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--lora_rnak", "8"], "did you mean --lora_rank?"),
        (["--model_name", "./absent", "--device", "cpu"], "--model_name ./absent"),
    ],
)
def test_train_py_ends_with_one_line_and_exit_code_2(tmp_path, argv, part):
    """The whole way: a new process, its exit code, its streams."""
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *argv],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and part in line
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_read_enough_is_no_error():
    command = f"{sys.executable} -m fsdp_qlora.cli --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() in ("0", "141") and "Traceback" not in done.stderr, done.stderr


def test_an_answer_to_a_closed_stdout_is_no_error():
    command = f"{sys.executable} -m fsdp_qlora.cli estimate --params 7B --gpu h100 >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_lacks_a_character_is_shown_its_escape(tmp_path):
    """Rows, answers and names of fields hold any character; some terminals only those of Latin."""
    from .tokenizers import save_chat_model

    (tmp_path / "rows.jsonl").write_text('{"prompt": "\u4e16", "completion": "a", "\\ud83d": 1}\n')
    flags = ["--model_name", save_chat_model(tmp_path / "model"), "--output_dir", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_qlora.cli", "data", *map(str, flags)]
        + ["--dataset", str(tmp_path / "rows.jsonl"), "--preview", "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | dict(PYTHONIOENCODING="latin-1"),
    )
    assert done.returncode == 0, done.stderr
    assert "\\u4e16<|im_end|>" in done.stdout
    assert "unused fields: \\ud83d (1 row)" in done.stdout


def test_files_are_utf8_whatever_the_locale_is(tmp_path):
    """Tokens to add, a chat template in a Modelfile, the settings of a model."""
    (tmp_path / "tokens.txt").write_text("<é>\n", encoding="utf-8")
    code = (
        "import locale, pathlib, sys\n"
        "from fsdp_qlora.atomic_files import write_text\n"
        "from fsdp_qlora.config.lists import token_list\n"
        "assert locale.getencoding().lower() != 'utf-8'\n"
        "[token] = token_list(sys.argv[1])\n"
        "write_text(pathlib.Path(sys.argv[2]), token)"
    )
    locale = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    asked = [sys.executable, "-c", code, *(str(tmp_path / n) for n in ("tokens.txt", "out"))]
    subprocess.run(asked, check=True, cwd=ROOT, env=os.environ | locale)
    assert (tmp_path / "out").read_bytes() == "<é>".encode()
