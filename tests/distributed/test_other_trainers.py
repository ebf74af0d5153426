"""transformers' Trainer and TRL's trainers on two ranks equal themselves with PEFT in one process."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
import torch

from tests.distributed.test_parity import relative
from tests.parts import in_parts, rest, slow
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

STEPS, SEED = 4, 0
WORDS = "one two three four five six seven eight nine ten".split()
TRAINED = [  # kind, strategy, quant, other settings
    ("SFT", "ddp", "none", {}),
    ("DPO", "full_shard", "nf4", {}),
    ("SFT", "full_shard", "none", {}),
    ("DPO", "full_shard", "none", {}),
    ("KTO", "full_shard", "none", {}),
    ("Reward", "full_shard", "none", {}),
    ("DPO", "ddp", "none", {}),
    ("DPO", "ddp", "nf4", {}),
    ("DPO", "full_shard", "nf4", dict(compile=True, mlp_tiles=2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


# ---- what a user writes, for each kind ---------------------------------------------------------


def rows_of(kind: str) -> list[dict]:
    pairs = [
        dict(
            prompt=f"{WORDS[i % 10]} {i}",
            chosen=f" yes {WORDS[(i + 1) % 10]} {i * i}",
            rejected=f" no {WORDS[(i + 3) % 10]}",
        )
        for i in range(16)
    ]
    return of_kind(kind, pairs)


def of_kind(kind: str, pairs: list[dict]) -> list[dict]:
    """The rows that a trainer of a kind takes, of pairs of answers to a prompt."""
    if kind == "SFT":
        return [dict(prompt=p["prompt"], completion=p["chosen"]) for p in pairs]
    if kind == "KTO":
        names = ("rejected", "chosen")
        return [
            dict(prompt=p["prompt"], completion=p[names[i % 2]], label=bool(i % 2))
            for i, p in enumerate(pairs)
        ]
    if kind == "Reward":
        names = ("chosen", "rejected")
        return [{name: p["prompt"] + p[name] for name in names} for p in pairs]
    return [dict(prompt=p["prompt"]) for p in pairs] if kind == "GRPO" else pairs


def settings(kind: str, output: str, **more) -> dict:
    lengths = dict(num_generations=4, max_completion_length=8, beta=0.1)
    return (
        dict(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="linear",
            max_grad_norm=0.5,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=SEED,
        )
        | (lengths if kind == "GRPO" else dict(max_length=64))
        | more
    )


def trainer(module, kind: str, folder: str, model, output: str, given: dict, rows=None, **more):
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM",
    )
    return getattr(module, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(**settings(kind, output, **given)),
        train_dataset=Dataset.from_list(rows or rows_of(kind)),
        processing_class=tokenizer,
        **dict(peft_config=lora) | more,
    )


def curve(trainer) -> list[list[float]]:
    """Loss and norm of each step."""
    return [[h["loss"], h["grad_norm"]] for h in trainer.state.log_history if "loss" in h]


# ---- on ranks -----------------------------------------------------------------------------------


def train_cases(folder: str, output: str, cases: list[tuple]) -> list:
    """By case, kind, strategy, quant and other settings: the curve."""
    from fsdp_qlora.integrations import trl

    found = []
    for kind, strategy, quant, more in cases:
        given = dict(sharding_strategy=strategy, quant=quant) | more
        made = trainer(trl, kind, folder, folder, output, {}, **given)
        made.train()
        found.append(curve(made))
    return found


def reference_cases(folder: str, output: str, cases: list[tuple], rows=rows_of) -> list:
    """The same with plain TRL and PEFT; 4-bit weights are dequantized, so adapters are fp32 there too."""
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from fsdp_qlora import dequantize_linears, quantize_linears
    from fsdp_qlora.lora_init import initial_a

    found = []
    for kind, quant in cases:
        torch.manual_seed(SEED)
        kinds = dict(Reward=AutoModelForSequenceClassification)
        model = kinds.get(kind, AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=torch.float32,
            **(dict(num_labels=1) if kind == "Reward" else {}),
        )
        if quant != "none":
            dequantize_linears(quantize_linears(model, quant), torch.float32)
        given = dict(per_device_train_batch_size=4)
        made = trainer(trl, kind, folder, model, output, given, rows(kind))
        for name, p in made.model.named_parameters():
            if "lora_A" in name:
                p.data = initial_a(name, SEED, p.shape).to(p.dtype)
        made.train()
        found.append(curve(made))
    return found


@pytest.mark.parametrize("cases", in_parts(TRAINED, 0, 1, then=(2, 3, 4, 5, 6, 7, 8)))
def test_trl_on_two_ranks_equals_trl_and_peft_in_one_process(folder, tmp_path, cases):
    """DPO's and KTO's reference policy is the frozen base, in four bits too, and compiled."""
    plain = sorted({(kind, quant) for kind, _, quant, _ in cases})
    (expected,) = run_ranks(reference_cases, 1, folder, str(tmp_path), plain, timeout=600)
    by_kind = dict(zip(plain, expected, strict=True))
    first, second = run_ranks(train_cases, 2, folder, str(tmp_path), cases, timeout=600)
    assert first == second
    for (kind, strategy, quant, more), found in zip(cases, first, strict=True):
        assert len(found) == STEPS
        # KTO's estimate of the divergence has other neighbours.
        tolerance = 1e-4 if kind == "KTO" else 1e-5
        assert relative(found, by_kind[kind, quant]) < tolerance, (kind, strategy, quant, more)


def even_characters(completions, **_) -> list[float]:
    """A reward: the share of characters that are good ones."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


def generate_and_learn(folder: str, output: str) -> list[float]:
    """Mean rewards of GRPO where every other character is a good one."""
    from fsdp_qlora.integrations import trl

    made = trainer(
        trl,
        "GRPO",
        folder,
        folder,
        output,
        dict(
            max_steps=24,
            per_device_train_batch_size=16,
            learning_rate=0.03,
            lr_scheduler_type="constant",
            beta=0.0,
        ),
        reward_funcs=even_characters,
        quant="nf4",
        sharding_strategy="full_shard",
    )
    made.train()
    return [h["reward"] for h in made.state.log_history if "reward" in h]


@pytest.mark.slow
def test_grpo_learns_while_sharded(tmp_path):
    # logits that are not all alike
    folder = save_chat_model(tmp_path / "decided", initializer_range=0.1)
    first, second = run_ranks(generate_and_learn, 2, folder, str(tmp_path), timeout=600)
    assert first == second
    assert sum(first[-4:]) / 4 > sum(first[:4]) / 4 + 0.1, first


def stop_and_resume(folder: str, output: str, kind: str, given: dict | None = None, **more) -> list:
    """Curves of a run without a stop, and of one that is resumed from its middle."""
    from fsdp_qlora.integrations import trl

    curves = []
    for name, resumed in (("whole", False), ("stopped", False), ("stopped", True)):
        saves = dict(save_strategy="steps", save_steps=STEPS // 2)
        reward = dict(reward_funcs=even_characters) if kind == "GRPO" else {}
        made = trainer(
            trl,
            kind,
            folder,
            folder,
            f"{output}/{name}",
            saves | (given or {}),
            quant="nf4",
            **reward | more,
        )
        if name == "stopped" and not resumed:
            made.args.max_steps, made.args.stop = STEPS, True
            made.add_callback(_stop_after(STEPS // 2))
        made.train(resume_from_checkpoint=resumed)
        curves.append(curve(made))
    return curves


def _stop_after(step: int):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= step

    return Stop()


@pytest.mark.parametrize("kind", ["SFT", rest("DPO"), slow("KTO"), slow("Reward"), slow("GRPO")])
def test_a_resumed_trainer_equals_one_that_was_not_stopped(folder, tmp_path, kind):
    whole, stopped, resumed = run_ranks(stop_and_resume, 2, folder, str(tmp_path), kind)[0]
    assert len(stopped) == STEPS // 2 and stopped == whole[: STEPS // 2]
    assert resumed[-STEPS // 2 :] == whole[STEPS // 2 :]


def test_files_that_are_not_the_models_are_refused_and_stacked_experts_are_read(folder, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    from fsdp_qlora.integrations.streamed import streamed_model

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    lacking = dict(list(tensors.items())[1:])
    save_file(lacking, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no tensor"):
        streamed_model(str(broken))
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    assert streamed_model(str(tmp_path / "mixtral"), "none").weight_files.made  # one of each expert


def saved_and_answered(folder: str, output: str, given: dict | None = None) -> tuple:
    """Logits before saving, and a generated answer, of a sharded model."""
    from fsdp_qlora.integrations import trl

    made = trainer(trl, "SFT", folder, folder, output, given or {}, quant="none")
    made.train()
    made.save_model(f"{output}/adapter")
    ids = torch.arange(3, 11, device=made.args.device)[None]
    with torch.no_grad():
        logits = made.model(input_ids=ids).logits
        answer = made.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    return logits.cpu(), answer.cpu(), made.evaluate(made.train_dataset)["eval_loss"]


def test_what_a_trainer_saves_loads_in_plain_peft_and_generate_works_sharded(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    results = run_ranks(saved_and_answered, 2, folder, str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        answer = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    for logits, found, _ in results:
        assert relative(logits, expected) < 1e-5
        assert torch.equal(found, answer)
    assert results[0][2] == results[1][2]


# ---- the examples, as they stand -----------------------------------------------------------------

ROWS = {
    "hf_trainer": [dict(text=f"{word} {word}") for word in WORDS],
    "trl_sft": rows_of("SFT"),
    "trl_dpo": rows_of("DPO"),
    "trl_grpo": rows_of("GRPO"),
    "trl_reward": rows_of("Reward"),
}


def run_examples(folder: str, output: str) -> dict[str, list[float]]:
    from examples import accelerate_loop, fabric

    for name in ROWS:
        example = importlib.import_module(f"examples.{name}")
        example.main(folder, f"{output}/{name}.jsonl", f"{output}/{name}")
    return dict(accelerate=accelerate_loop.main(folder), fabric=fabric.main(folder))


@pytest.mark.slow
def test_examples_run_on_two_ranks_and_save_what_peft_loads(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    results = run_ranks(run_examples, 2, folder, str(tmp_path), timeout=900)
    for losses in (losses for by_name in results for losses in by_name.values()):
        assert losses[-1] < losses[0]
    for name in ROWS.keys() - {"trl_reward"}:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        PeftModel.from_pretrained(base, str(tmp_path / name))
