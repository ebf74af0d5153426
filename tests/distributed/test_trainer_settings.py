"""What other trainers are asked for holds on a sharded model, or is refused in one line on every rank."""

from __future__ import annotations

import os
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_other_trainers import (
    STEPS,
    curve,
    even_characters,
    rows_of,
    trainer,
)
from tests.distributed.test_own_loops import message_of
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

SMALL_RATE = dict(learning_rate=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


# ---- arguments that a sharded model can't follow ------------------------------------------------

GRPO = dict(per_device_train_batch_size=8)
REFUSED = [  # kind, arguments, settings of ours, what the line says
    ("SFT", dict(fsdp="full_shard"), {}, "give sharding_strategy"),
    ("SFT", dict(torch_compile=True), {}, "give compile=True"),
    ("SFT", dict(use_liger_kernel=True), {}, "leave it out"),
    ("SFT", dict(activation_offloading=True), {}, "give use_activation_cpu_offload=True"),
    (
        "SFT",
        dict(gradient_checkpointing_kwargs=dict(every_n_layers=2)),
        {},
        "give activation_policy",
    ),
    ("SFT", dict(bf16_full_eval=True), {}, "give bf16=True"),
    (
        "SFT",
        dict(model_init_kwargs=dict(dtype="float32")),
        {},
        "streamed_model(NAME, quant, dtype)",
    ),
    ("SFT", dict(optim="lion_8bit"), {}, "adamw_torch_fused, adamw_8bit"),
    ("SFT", dict(optim="adafactor"), {}, 'or sharding_strategy="ddp"'),
    ("SFT", {}, dict(peft_config=None), "give peft_config=LoraConfig("),
    ("SFT", {}, dict(sharding_strategy="fsdp"), "choose ddp, shard_grad_op"),
    ("SFT", {}, dict(quantization_config=object()), "give quant"),
    ("DPO", dict(precompute_ref_log_probs=True), {}, "leave it out"),
    ("KTO", dict(precompute_ref_log_probs=True), {}, "leave it out"),
    ("DPO", dict(sync_ref_model=True), dict(peft_config=None, quant="none"), "leave it out"),
    ("GRPO", GRPO | dict(use_vllm=True), {}, "leave it out"),
    ("GRPO", GRPO | dict(use_transformers_continuous_batching=True), {}, "leave it out"),
]
TAKEN = [
    ("SFT", dict(gradient_checkpointing_kwargs=dict(use_reentrant=True)), {}),
    ("SFT", dict(optim="lion_8bit"), dict(sharding_strategy="ddp")),
    ("SFT", dict(optim="adagrad"), {}),
]


@contextmanager
def environment(**variables: str):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def said(folder: str, output: str) -> tuple[list[str], list[str], str, str]:
    """What each case of REFUSED and TAKEN raises, then accelerate's configuration and a copied adapter."""
    from peft import LoraConfig, get_peft_model

    from fsdp_qlora.integrations import trl
    from fsdp_qlora.integrations.streamed import streamed_model

    def make(kind, given, ours, model=folder):
        rewards = dict(reward_funcs=even_characters) if kind == "GRPO" else {}
        trainer(trl, kind, folder, model, output, given, **rewards, **ours)

    refused = [message_of(make, *case) for *case, _ in REFUSED]
    taken = [message_of(make, *case) for case in TAKEN]
    with environment(ACCELERATE_DYNAMO_BACKEND="INDUCTOR"):
        compiled = message_of(make, "SFT", {}, {})
    adapted = get_peft_model(streamed_model(folder), LoraConfig(target_modules="all-linear"))
    return refused, taken, compiled, message_of(make, "DPO", {}, dict(peft_config=None), adapted)


@pytest.mark.filterwarnings("ignore")
def test_what_a_sharded_model_cant_follow_is_one_line_with_the_remedy_on_every_rank(
    folder, tmp_path
):
    results = run_ranks(said, 2, folder, str(tmp_path))
    assert results[0] == results[1]
    refused, taken, compiled, copied = results[0]
    for (_, given, ours, remedy), text in zip(REFUSED, refused, strict=True):
        name = next(n for n in (*given, *ours) if n not in GRPO)
        name = dict(peft_config="quant", sharding_strategy="--sharding_strategy").get(name, name)
        assert text.startswith(name) and remedy in text and "\n" not in text, (given, ours, text)
    assert taken == [""] * len(TAKEN)
    assert "compile with INDUCTOR" in compiled and "give compile=True" in compiled
    assert copied.startswith("model: ") and "peft_config" in copied


def test_a_trainer_says_how_to_start_its_script(folder, tmp_path):
    from fsdp_qlora.integrations import trl

    assert "torchrun" in message_of(trainer, trl, "SFT", folder, folder, str(tmp_path), {})


def printed_of_a_step(folder: str, output: str) -> str:
    """What a compiled trainer prints where torch has noted that it compiles a function no more."""
    from fsdp_qlora.integrations import trl

    trained = trainer(trl, "SFT", folder, folder, output, dict(max_steps=1), compile=True)
    torch._dynamo.utils.counters["unimplemented"]["recompile limit exceeded: f"] += 1
    with redirect_stdout(StringIO()) as printed:
        trained.train()
    return printed.getvalue()


def test_a_trainer_says_what_its_compiled_model_runs_eager(folder, tmp_path):
    (text,) = run_ranks(printed_of_a_step, 1, folder, str(tmp_path))
    assert text.count("warning: torch.compile made") == 1 and "makes no more" in text


# ---- checkpoints ----------------------------------------------------------------------------------


def whole_models(folder: str, output: str) -> dict:
    """Full fine-tuning: a run, its resumption, the best model at the end; and weights saved alone."""
    from datasets import Dataset

    from fsdp_qlora.integrations import trl

    full = dict(peft_config=None, quant="none")
    saves = dict(save_strategy="steps", save_steps=2)
    found = {}
    for name, resumed in (("whole", None), ("resumed", f"{output}/run/checkpoint-2")):
        made = trainer(trl, "SFT", folder, folder, f"{output}/run", saves | SMALL_RATE, **full)
        made.train(resume_from_checkpoint=resumed)
        found[name] = curve(made)
    best = dict(
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.3,  # so that the last is not the best
        save_total_limit=2,
    )
    held_out = Dataset.from_list(rows_of("SFT")[:4])
    made = trainer(
        trl, "SFT", folder, folder, f"{output}/best", saves | best, eval_dataset=held_out, **full
    )
    made.train()
    found["best"] = made.state.best_metric, made.evaluate()["eval_loss"]
    alone = saves | dict(save_only_model=True)
    trainer(trl, "SFT", folder, folder, f"{output}/alone", alone).train()
    made = trainer(trl, "SFT", folder, folder, f"{output}/alone", alone)
    found["alone"] = message_of(made.train, resume_from_checkpoint=True)
    return found


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_whole_models_resume_and_weights_alone_say_that_they_cant(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    for found in run_ranks(whole_models, 2, folder, str(tmp_path)):
        assert len(found["whole"]) == STEPS and found["resumed"] == found["whole"]
        best, now = found["best"]
        assert now == pytest.approx(best, rel=1e-6)
        assert "save_only_model=True" in found["alone"] and "without resume" in found["alone"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert torch.isfinite(saved(torch.arange(3, 9)[None]).logits).all()


def resumed_from_damage(folder: str, output: str) -> dict[str, str]:
    """What a resumed run says of a checkpoint without a file, and of one with half of it."""
    from pathlib import Path

    import torch.distributed as dist

    from fsdp_qlora.integrations import trl

    saves = dict(save_strategy="steps", save_steps=2) | SMALL_RATE
    trainer(trl, "SFT", folder, folder, output, saves).train()
    dist.barrier()
    checkpoint, said = Path(output, "checkpoint-4"), {}
    for name in ("adapter_model.safetensors", "optimizer/rank-00001.safetensors"):
        for kept in (0, 100):
            path = checkpoint / name
            whole = path.read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(whole[:kept]) if kept else path.unlink()
            dist.barrier()
            made = trainer(trl, "SFT", folder, folder, output, saves | dict(max_steps=5))
            said[f"{name} {kept}"] = message_of(made.train, resume_from_checkpoint=True)
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(whole)
            dist.barrier()
    made = trainer(trl, "SFT", folder, folder, output, saves | dict(max_steps=5))
    said["whole"] = message_of(made.train, resume_from_checkpoint=True)
    return said


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_a_file_is_refused_by_its_name_on_every_rank(folder, tmp_path):
    first, second = run_ranks(resumed_from_damage, 2, folder, str(tmp_path))
    assert first == second and first.pop("whole") == ""
    for text in first.values():
        assert text.startswith(f"resume_from_checkpoint='{tmp_path}/checkpoint-4': ")
        assert "give a folder that is whole" in text and "\n" not in text
    lost, cut, no_rank, cut_rank = first.values()
    assert "*.safetensors is missing" in lost and "lacks the file of a rank" in no_rank
    assert "adapter_model.safetensors is not a whole file" in cut
    assert "rank-00001.safetensors is not a whole file" in cut_rank


# ---- adapters that have values already ------------------------------------------------------------


def loaded_adapters(folder: str, adapter: str) -> dict[str, dict]:
    """Each adapter of a streamed model after it is sharded: loaded to be trained, loaded frozen, new."""
    from peft import LoraConfig, PeftModel

    from fsdp_qlora import full_tensor
    from fsdp_qlora.integrations.streamed import shard_and_load, streamed_model

    found = {}
    for strategy in ("full_shard", "ddp"):
        model = PeftModel.from_pretrained(streamed_model(folder), adapter, is_trainable=True)
        model.load_adapter(adapter, "frozen")
        model.add_adapter("new", LoraConfig(r=4, target_modules=["q_proj"]))
        shard_and_load(model, torch.device("cpu"), sharding_strategy=strategy)
        found[strategy] = {
            n: full_tensor(p.detach()).clone() for n, p in model.named_parameters() if "lora_" in n
        }
    return found


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_are_loaded_over_a_streamed_model_keep_their_values(folder, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    for name, p in plain.named_parameters():
        if "lora_" in name:
            p.data.normal_()
    plain.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "adapter_model.safetensors")
    for found in run_ranks(loaded_adapters, 2, folder, str(tmp_path)):
        for values in found.values():
            for name, value in wanted.items():
                for adapter in ("default", "frozen"):
                    own = name.replace(".weight", f".{adapter}.weight")
                    assert torch.equal(values[own], value), own
            new = {n: v for n, v in values.items() if ".new." in n}
            assert len(new) == 4
            for name, value in new.items():
                assert (value == 0).all() if "lora_B" in name else value.std() > 0.01, name


# ---- steps ------------------------------------------------------------------------------------------


def steps(folder: str, output: str) -> dict:
    """Curves with fp16's loss scale and without, the groups of an 8-bit optimizer, and what is offloaded."""
    from peft import LoraConfig

    from fsdp_qlora.integrations import transformers, trl

    found = {}
    shard_and_load = transformers.shard_and_load

    def seen(model, *args, on_host, **more):
        found["on host"] = on_host
        return shard_and_load(model, *args, on_host=on_host, **more)

    transformers.shard_and_load = seen
    for kind in ("SFT", "Reward"):
        trainer(trl, kind, folder, folder, output, {}, use_cpu_offload=True)
        found[kind] = (found["on host"].frozen, found["on host"].vocabulary)
    transformers.shard_and_load = shard_and_load
    for max_norm in (0.5, 0.0):
        for scale in (None, 2.0**14):
            given = dict(optim="sgd", learning_rate=0.5, max_grad_norm=max_norm)
            made = trainer(trl, "SFT", folder, folder, output, given, quant="none")
            if scale:  # as accelerate has it on a GPU; scaling by a power of 2 changes no digit
                made.accelerator.native_amp = True
                made.accelerator.state._mixed_precision = "fp16"
                made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            made.train()
            made.accelerator.state._mixed_precision = "no"
            found[max_norm, scale] = curve(made)
    given = dict(optim="adamw_8bit", weight_decay=0.1, adam_beta1=0.8, adam_epsilon=1e-7)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_bias=True)
    made = trainer(trl, "SFT", folder, folder, output, given, peft_config=lora)
    made.create_optimizer()
    names = {id(p): n for n, p in made.model.named_parameters()}
    found["8bit"] = (
        type(made.optimizer).__name__,
        [
            (sorted(names[id(p)] for p in g["params"]), g["weight_decay"], g["betas"], g["eps"])
            for g in made.optimizer.param_groups
        ],
    )
    return found


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_that_the_arguments_ask_for(folder, tmp_path):
    for found in run_ranks(steps, 2, folder, str(tmp_path)):
        for max_norm in (0.5, 0.0):
            assert found[max_norm, 2.0**14] == found[max_norm, None] != []
        # TRL's fused losses take the hidden states to where the head's weight lies.
        assert found["SFT"] == (True, False) and found["Reward"] == (True, True)
        kind, groups = found["8bit"]
        assert kind == "CompactAdamW"
        (decayed, decay, *rest), (others, none, *_) = groups
        assert (decay, none) == (0.1, 0.0) and rest == [(0.8, 0.999), 1e-7]
        assert decayed and all("bias" not in n for n in decayed)
        assert others and all("bias" in n for n in others)
