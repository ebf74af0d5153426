"""`--config recipe.yaml`: values as on the command line, flags on top, mistakes with file and line."""

import subprocess
import sys
from dataclasses import fields

import pytest

from fsdp_qlora.cli import main, parse
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.defaults import CLASSIC
from fsdp_qlora.config.flags import given_settings


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and returns its path."""
    path = tmp_path / "recipe.yaml"

    def write(text: str) -> str:
        path.write_text(text)
        return str(path)

    return write


def read(path: str, *flags: str) -> RunConfig:
    return parse(["--config", path, *flags])[0]


def refusal(*argv: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_gives_what_the_same_flags_give(recipe):
    path = recipe("""
# 1e-4 is text to YAML, and no is false
lr: 1e-4
batch_size: 8
max_steps: -1
packing: yes
save_model: No
name: "run: 1"
lora_target_modules: [q_proj, v_proj]
activation_policy: keep_linears:16,recompute_all:16
eval_dataset: null
activation_budget_gib:
""")
    flags = [
        "--lr",
        "1e-4",
        "--batch_size",
        "8",
        "--max_steps",
        "-1",
        "--packing",
        "--save_model",
        "no",
        "--name",
        "run: 1",
        "--lora_target_modules",
        "q_proj,v_proj",
        "--activation_policy",
        "keep_linears:16,recompute_all:16",
    ]
    assert read(path) == parse(flags)[0]


def test_ranks_of_modules_may_be_a_block_of_names(recipe):
    """As PEFT's LoraConfig and axolotl have them."""
    path = recipe("lora_rank_pattern:\n  q_proj: 16\n  .*\\.0\\..*_proj$: 8\nlora_rank: 4\n")
    config = read(path)
    assert config.rank_pattern == {"q_proj": 16, r".*\.0\..*_proj$": 8}
    spaced = parse(["--lora_alpha_pattern", "q_proj = 16 , k_proj=8"])[0]
    assert spaced.alpha_pattern == {"q_proj": 16, "k_proj": 8}


def test_variables_and_home_in_paths_are_written_out(recipe, monkeypatch, tmp_path):
    """A shell does that for flags; without it, a run writes into a folder called ${SCRATCH}."""
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    names = [f.name for f in fields(RunConfig) if f.metadata["is_path"]]
    assert {"output_dir", "sample_prompts", "eval_dataset", "llama_pro_path"} <= {*names}
    for name in names:
        text = f"train_type: bnb_llama_pro\nname: $SCRATCH\n{name}: "
        config = read(recipe(text + "${SCRATCH}/a"))
        assert (getattr(config, name), config.name) == (f"{tmp_path}/a", "$SCRATCH")
        assert getattr(read(recipe(text + "~/a")), name) == "/home/me/a"
        message = refusal("--config", recipe(text + "/data/$NOWHERE/a"))
        assert f"--{name} /data/$NOWHERE/a: $NOWHERE is not set in the environment" in message
        assert "recipe.yaml:3" in message
    (tmp_path / "a$NOWHERE").touch()
    assert read(recipe(f"dataset: {tmp_path}/a$NOWHERE")).dataset == f"{tmp_path}/a$NOWHERE"


@pytest.mark.parametrize("form", [["--lr", "1"], ["--lr=1"]])
def test_a_flag_wins_over_the_recipe_wherever_it_stands(recipe, form):
    path = recipe("lr: 2\nlora_rank: 8\n")
    for argv in ([*form, "--config", path], [f"--config={path}", *form]):
        (config,) = parse(argv)
        assert (config.lr, config.lora_rank) == (1.0, 8)


def test_an_empty_recipe_changes_nothing(recipe):
    assert read(recipe("# nothing yet\n")) == RunConfig()


@pytest.mark.parametrize(
    "text, parts",
    [
        ("lr: 1\nlora_rnak: 8", [":2: unknown setting 'lora_rnak'", "did you mean lora_rank?"]),
        ("\n\nlora-rank: 8", [":3: unknown setting 'lora-rank'", "did you mean lora_rank?"]),
        ("zzz: 8", [":1: unknown setting 'zzz'", "--help"]),
        ("config: other.yaml", [":1: unknown setting 'config'"]),
        ("lr: 1\nlr: 2", [":2: lr appears twice, first at", ":1"]),
        ("seed: 1\nlr: fast", ["--lr", "fast", "recipe.yaml:2)"]),
        ("batch_size: 1.5", ["--batch_size", "1.5", "recipe.yaml:1)"]),
        ("seed: 1\nlora_rank: 0", ["--lora_rank must be 1 or more, got 0", "recipe.yaml:2)"]),
        ("precision: fp8", ["--precision fp8: choose bf16, fp32", "recipe.yaml:1)"]),
        ("save_model: maybe", ["'maybe' is not true or false", "recipe.yaml:1)"]),
        ("name: ''", ["--name must be left out or have a value", "recipe.yaml:1)"]),
        ("wd:", [":1: wd has no value", "default, 0.0"]),
        ("lr: {peak: 1}", [":1: lr takes a single value"]),
        ("lr:\n  peak: 1", [":1: lr takes a single value"]),
        ("- lr", ["write settings as `name: value`"]),
        ("lr 1", ["write settings as `name: value`"]),
        ("? [lr]\n: 1", [":1: write settings as `name: value`"]),
        ("seed: 1\nlr: [1", ["not valid YAML"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_mistake_is_named_with_its_line(recipe, text, parts):
    path = recipe(text)
    message = refusal("--config", path)
    assert path in message and all(part in message for part in parts), message


def test_a_mistake_of_the_command_line_is_not_put_on_the_recipe(recipe):
    path = recipe("lora_rank: 8\nseed: 2\n")
    assert "recipe.yaml" not in refusal("--config", path, "--lora_rank", "0")
    assert "recipe.yaml" not in refusal("--config", path, "--lr", "fast")


def test_settings_that_clash_name_the_line_of_one_that_the_recipe_gave(recipe):
    path = recipe("seed: 1\nsharding_strategy: ddp\n")
    assert f"({path}:2)" in refusal("--config", path, "--use_cpu_offload")


@pytest.mark.parametrize(
    "write, says",
    [
        (lambda p: None, "No such file"),
        (lambda p: p.mkdir(), "directory"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not a text file"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path, write, says):
    path = tmp_path / "absent.yaml"
    write(path)
    message = refusal("--config", str(path))
    assert f"--config {path}: " in message and says in message


def test_a_plan_keeps_what_the_recipe_gives(recipe):
    path = recipe("sharding_strategy: full_shard\nbatch_size: 3\n")
    assert given_settings(["--config", path, "--gpu=h100"]) == {
        "config",
        "gpu",
        "sharding_strategy",
        "batch_size",
    }


def test_a_recipe_is_read_without_torch_by_every_command(recipe):
    path = recipe("model_name: llama-2-7b\ncontext_length: 1024\n")
    code = (
        "import sys; sys.modules['torch'] = None; from fsdp_qlora.cli import main;"
        f"sys.exit(main(['estimate', '--config', {path!r}, '--gpu', 'h100']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 x 1,024 tokens per GPU" in done.stdout


def test_a_mistake_ends_the_command_with_one_line(recipe, capsys):
    path = recipe("lora_rnak: 8\n")
    assert main(["train", "--config", path]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}:1: unknown setting 'lora_rnak'; did you mean lora_rank?\n"
    )


def test_classic_defaults_lie_below_a_recipe_and_flags(recipe):
    classic = parse(["--defaults", "classic"])[0]
    assert {name: getattr(classic, name) for name in CLASSIC} == CLASSIC
    path = recipe("lora_alpha: 64\nwd: 0.2\n")
    config = read(path, "--defaults", "classic", "--wd", "0.3")
    assert (config.lora_alpha, config.wd, config.lr) == (64, 0.3, 1e-5)
    assert "defaults" in refusal("--defaults", "axolotl") and "classic" in refusal("--defaults=x")


@pytest.mark.parametrize("given", [["--grad_norm", "0.5"], ["--max_grad_norm=0.5"], "recipe"])
def test_a_norm_alone_turns_clipping_on_under_any_defaults(given, recipe):
    argv = ["--config", recipe("grad_norm: 0.5\n")] if given == "recipe" else given
    for defaults in ([], ["--defaults", "classic"]):
        config = parse([*argv, *defaults])[0]
        assert config.apply_gradient_clipping and config.grad_norm == 0.5
    off = parse([*argv, "--defaults", "classic", "--apply_gradient_clipping", "false"])[0]
    assert not off.apply_gradient_clipping
