"""`train --dry_run` shows the run and leaves no trace."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedTokenizerFast

from fsdp_qlora.cli import main, parse
from fsdp_qlora.commands.dryrun import _batch_rows
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import StepLoader, StepSampler
from fsdp_qlora.loading.tokenizer import load_tokenizer
from fsdp_qlora.preflight.run_data import load_data

from .tiny import save_tiny

WORDS = "<s> </s> <unk> ### Question Answer : say hi you one two three four".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working folder with a tiny model, its tokenizer and rows of several lengths."""
    folder = tmp_path_factory.mktemp("work")
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, settings in dict(
        model={}, short=dict(max_position_embeddings=16), small=dict(vocab_size=8)
    ).items():
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(folder / name)
        save_tiny(folder / name, **settings)
    shutil.copytree(folder / "model", folder / "trained" / "model")
    rows = [
        {"instruction": f"say {' '.join(WORDS[10 : 11 + i % 4])}", "output": "hi " * (1 + i)}
        for i in range(10)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "recipe.yaml").write_text(
        "model_name: model\ndataset: rows.jsonl\ndevice: cpu\n"
        "world_size: 2\nglobal_batch_size: 4\nlora_rank: 8\nprecision: fp32\n"
    )
    return folder


@pytest.fixture
def shown(folder, monkeypatch, capsys):
    """What a dry run prints; the folder and all files in it must be as before."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANK", raising=False)

    def run(*flags) -> str:
        before = snapshot(folder)
        assert main(["train", "--config", "recipe.yaml", "--dry_run", *flags]) == 0
        assert snapshot(folder) == before
        return capsys.readouterr().out

    return run


def snapshot(folder: Path) -> dict[str, tuple[float, int]]:
    return {str(f): (f.stat().st_mtime, f.stat().st_size) for f in folder.rglob("*")}


def test_the_settings_are_printed_as_a_recipe_that_means_the_same(shown, folder, tmp_path):
    text = shown("--lr", "1e-4", "--data_cache", "cache", "--output_dir", "out")
    recipe = text.split("as a recipe (--verbose: all):\n")[1].split("\n\n")[0]
    again = tmp_path / "again.yaml"
    again.write_text(recipe)
    (wanted,) = parse(
        [
            "--config",
            str(folder / "recipe.yaml"),
            "--lr",
            "1e-4",
            "--data_cache",
            "cache",
            "--output_dir",
            "out",
        ]
    )
    assert parse(["--config", str(again)])[0] == wanted


def test_verbose_prints_every_setting(shown):
    text = shown("--verbose")
    assert all(f"\n{name}: " in text for name in vars(RunConfig()))


def test_the_first_batch_is_that_of_the_run_with_trained_tokens_marked(shown, folder):
    text = shown("--batch_size", "2", "--preview", "5")
    assert "3 steps, of 4 rows: micro-batch 2 rows x accumulation 1 x 2 ranks" in text
    config = parse(["--config", "recipe.yaml"])[0]
    tokenizer = load_tokenizer("model")
    rows = load_data(config, tokenizer).rows
    loader = StepLoader(rows, StepSampler(len(rows), 4, seed=config.seed), 0, 2, 2, pad_token_id=2)
    batch = loader.step(0).micro_batches[0]
    width = batch["input_ids"].shape[1]
    assert f"on rank 0, one of 1 in its first step: 2 x {width} tokens" in text
    printed = text.split("with padding\n")[1]
    for row, (ids, labels) in enumerate(_batch_rows(batch, 2)):
        answer = tokenizer.decode(ids[labels != -100])
        assert f"--- row {row}, {len(ids)} tokens" in printed and f"[[{answer}]]" in printed
    assert "--- row 2" not in printed  # though --preview would show five


def test_the_first_batch_is_as_wide_as_where_blocks_are_compiled_for_it(shown):
    assert "2 x 64 tokens with padding" in shown("--batch_size", "2", "--compile", "true")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--packing"], "micro-batch 1 bin x"),
        (["--stream", "--max_steps", "2"], "rows of the stream"),
        (["--eval_share", "0.2"], "held out: 2 rows"),
    ],
)
def test_other_forms_of_data_are_shown_too(shown, flags, says):
    text = shown(*flags)
    assert says in text and "--- row 0" in text and "[[" in text
    assert text.endswith("dry run: nothing was trained or written\n")


def test_without_a_gpu_it_says_how_to_get_a_prediction(shown):
    assert "no prediction: no GPU here; `fsdp-qlora estimate`" in shown()


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--lora_target_modules", "qkv_proj"], "--lora_target_modules qkv_proj"),
        (["--dataset", "absent.jsonl"], "no such file"),
        (["--model_name", "absent"], "does not exist"),
        (
            ["--model_name", "short"],
            "the data have rows of 38 tokens, but the model has 16 positions",
        ),
        (["--model_name", "small"], "the model embeds ids below 8; use the tokenizer"),
        (["--router_aux_loss_coef", "0.1"], "transformers has no balance loss"),
        (["--sequence_parallel", "4"], "--sequence_parallel 4: 2 ranks are not a multiple of it"),
        (
            ["--sharding_strategy", "hybrid_full_shard", "--world_size", "3"],
            "3 ranks with --shard_group_size -1 can't be divided like this",
        ),
        (
            ["--model_name", "trained/model", "--output_dir", "trained"],
            "--output_dir trained contains --model_name trained/model",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused(folder, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(folder)
    assert main(["train", "--config", "recipe.yaml", "--dry_run", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(num_attention_heads="4"),
            "config.json: .*'num_attention_heads': .* expected int, got str",
        ),
        (dict(model_type="foobar"), "config.json: .*`foobar`.*; look at that file"),
        (dict(model_type="t5"), "no model that continues text can be made .*T5Config"),
        (dict(hidden_act="nonsense"), "no model that continues text .*: KeyError 'nonsense'; look"),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(folder, tmp_path, capsys, change, says):
    file = Path(shutil.copytree(folder / "model", tmp_path / "model")) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert (
        main(
            [
                "train",
                "--model_name",
                str(file.parent),
                "--dataset",
                str(folder / "rows.jsonl"),
                "--device",
                "cpu",
                "--dry_run",
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"--model_name {file.parent}: {says}", line)


def test_a_model_that_can_be_trained_and_not_estimated_is_shown(shown, folder):
    """Bloom's config.json has other fields than the Llama kind's."""
    bloom = shutil.copytree(folder / "model", folder / "bloom")
    config = BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(bloom)
    text = shown("--model_name", "bloom")
    assert (
        re.search("no prediction: .* no intermediate_size", text) and "dry run: nothing was" in text
    )


def test_no_rank_is_started_and_no_thread_count_changes(shown):
    threads = torch.get_num_threads()
    text = shown("--world_size", "64")
    assert "x 64 ranks" in text and torch.get_num_threads() == threads


def test_padding_at_the_end_is_left_out_and_a_trained_end_token_is_not():
    batch = {
        "input_ids": torch.tensor([[5, 6, 1, 1], [5, 1, 1, 1]]),
        "labels": torch.tensor([[-100, 6, 1, -100], [-100, -100, -100, -100]]),
    }
    assert [len(ids) for ids, _ in _batch_rows(batch, 1)] == [3, 1]


def test_what_is_auto_is_planned_and_nothing_is_minus_one(shown):
    text = shown("--batch_size", "auto", "--global_batch_size", "4", "--context_length", "64")
    assert "batch_size: auto" in text and "batch_size: -1" not in text
    chosen = re.search(r"chosen: --batch_size (\d+)", text)[1]
    assert chosen in ("1", "2") and f"micro-batch {chosen} row" in text


def test_the_bins_of_a_step_are_said_with_about_how_many_rows_they_hold(shown):
    """The rows have 14.5 tokens in the mean: 32 of them are 464, nearly two bins of 256 tokens."""
    flags = ("--packing", "--global_batch_size", "-1", "--world_size", "1", "--eval_share", "0")
    text = shown(*flags, "--context_length", "256")
    rows = [int(n) for n in re.search(r"10 of 10 rows, (\d+) tokens", text).groups()]
    bins = round(32 * rows[0] / 10 / 256)
    assert 1 < bins < 8
    assert f"a step has {bins} bins, about {bins * 256 / (rows[0] / 10):.0f} rows of" in text
    assert f"of {bins} bins of 256 tokens: micro-batch 1 bin x accumulation {bins} x 1 rank" in text
    text = shown(*flags, "--context_length", "256", "--gradient_accumulation_steps", "3")
    assert "a step has" not in text and "accumulation 3" in text


def test_a_folder_of_resume_without_a_checkpoint_is_found_before_the_run(
    folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANK", raising=False)
    argv = ["train", "--config", "recipe.yaml", "--dry_run", "--resume", "nowhere"]
    assert main(argv) == 2
    assert "--resume nowhere: no intact checkpoint there" in capsys.readouterr().err


def test_a_warmup_longer_than_the_run_is_said(shown):
    says = "--lr_warmup_steps 50: the run ends before the warmup reaches --lr"
    assert says in shown("--lr_warmup_steps", "50")
    assert "ends before the warmup" not in shown("--lr_warmup_steps", "1")


def test_before_a_checkpoint_it_shows_the_steps_that_the_run_goes_on_with(
    shown, folder, tmp_path, monkeypatch, capsys
):
    """In bins of the checkpoint's run, though the default is another; a damaged one stays where it is."""
    flags = "--packing --context_length 64 --global_batch_size -1 --world_size 1".split()
    flags += ["--lr_scheduler", "constant", "--checkpoint_every", "1", "--num_epochs", "9"]
    flags += ["--output_dir", str(tmp_path / "out"), "--log_to", "stdout", "--compile", "false"]
    monkeypatch.chdir(folder)
    longer = [*flags, "--max_steps", "4"]
    argv = ["train", "--config", "recipe.yaml", *flags, "--bins_per_step", "2", "--max_steps", "2"]
    assert main(argv) == 0
    step, before = tmp_path / "out" / "checkpoints" / "step-000002", snapshot(tmp_path)
    text = shown(*longer)
    assert f"resumes from {step}: after step 2" in text and "4 steps, of 2 bins of 64" in text
    assert "resumes" not in shown(*longer, "--resume", "none")
    assert "has ended" in shown(*flags, "--bins_per_step", "2", "--max_steps", "2")
    assert snapshot(tmp_path) == before
    assert "has ended" in shown(*longer, "--lora_rank", "4")  # another run
    argv = ["train", "--config", "recipe.yaml", "--dry_run", *longer, "--resume", str(step)]
    assert main([*argv, "--lora_rank", "4"]) == 2
    assert "--lora_rank was 8 and is 4" in capsys.readouterr().err
    next(step.glob("*.safetensors")).unlink()
    before = snapshot(tmp_path)
    assert "resumes from" in shown(*longer) and snapshot(tmp_path) == before
