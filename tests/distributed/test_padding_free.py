"""Rows of very different lengths in other trainers: what padded rows give, without their padding."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.distributed.test_other_trainers import (
    SEED,
    STEPS,
    curve,
    even_characters,
    of_kind,
    reference_cases,
    settings,
    trainer,
)
from tests.distributed.test_parity import relative
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

CASES = [  # kind, quant, settings of ours
    ("DPO", "nf4", dict(activation_policy="recompute_all")),
    ("SFT", "nf4", {}),
    ("KTO", "none", dict(activation_policy="recompute_all")),
    ("Reward", "none", {}),
    ("DPO", "nf4", dict(compile=True, activation_policy="keep_linears", mlp_tiles=2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def ragged(kind: str) -> list[dict]:
    """Sixteen rows of 4 to 60 tokens, each a byte of text."""
    pairs = [
        dict(
            prompt=f"{i} " + "ask " * (11 * i % 7),
            chosen=" " + "yes " * (1 + 5 * i % 8),
            rejected=" " + "no " * (1 + 7 * i % 9),
        )
        for i in range(16)
    ]
    return of_kind(kind, pairs)


@contextmanager
def counted(model, found: list[tuple[int, int, int]]):
    """Add, of each forward: its real tokens, its tokens with padding, and those that were computed."""
    from fsdp_qlora.model.blocks import base_model

    base, masks = base_model(model), []

    def begin(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        if kwargs.get("past_key_values") is None and mask is not None:
            masks.append(mask)

    def computed(module, args):
        if masks:
            mask = masks.pop()
            found.append((int(mask.sum()), mask.numel(), args[0][..., 0].numel()))

    handles = [
        base.register_forward_pre_hook(begin, with_kwargs=True),
        base.get_decoder().norm.register_forward_pre_hook(computed),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_cases(folder: str, output: str, cases: list[tuple], batch_size: int) -> list[tuple]:
    """By case: the curve, the tokens of each forward, and a loss of evaluation."""
    from fsdp_qlora.integrations import trl

    found = []
    for kind, quant, more in cases:
        more, tokens = dict(more), []
        given = dict(per_device_train_batch_size=batch_size) | more.pop("config", {})
        made = trainer(trl, kind, folder, folder, output, given, ragged(kind), quant=quant, **more)
        with counted(made.model, tokens):
            made.train()
        found.append((curve(made), tokens))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, rest(1)])
def test_trl_equals_trl_and_peft_on_padded_rows_and_computes_no_padding(
    folder, tmp_path, world_size
):
    plain = sorted({(kind, quant) for kind, quant, _ in CASES})
    arguments = folder, str(tmp_path), plain, ragged
    (expected,) = run_ranks(reference_cases, 1, *arguments, timeout=600)
    by_kind = dict(zip(plain, expected, strict=True))
    padded = ("KTO", "none", dict(padding_free=False))
    by_trl = ("SFT", "nf4", dict(config=dict(padding_free=True, max_length=None)))
    cases, batch_size = [*CASES, padded, by_trl], 4 // world_size
    results = run_ranks(
        train_cases, world_size, folder, str(tmp_path), cases, batch_size, timeout=900
    )
    *_, (kto, _), (found, tokens) = results[0]
    assert relative(found, by_kind["SFT", "nf4"]) < 1e-5 and not tokens
    if world_size > 1:  # its estimate of the divergence has other neighbours there
        by_kind["KTO", "none"] = kto
    for i, (kind, quant, more) in enumerate(CASES):
        for found, tokens in (ranks[i] for ranks in results):
            assert len(found) == STEPS
            assert relative(found, by_kind[kind, quant]) < 1e-5, (kind, quant, more)
            for real, padded, computed in tokens:
                assert computed == min(-(-real // 64) * 64, padded), (kind, tokens)
            passes = dict(DPO=2, KTO=4).get(kind, 1)  # with the reference's
            assert len(tokens) == passes * STEPS
            assert sum(t[2] for t in tokens) < sum(t[1] for t in tokens)
        if world_size > 1:
            assert results[0][i][1] != results[1][i][1]  # ranks of unequal work


def grpo(folder: str, output: str) -> list[tuple]:
    """Logs and tokens of GRPO, whose prompts are padded on the left: with padding and without."""
    from fsdp_qlora.integrations import trl

    found = []
    for padding_free in (False, True):
        made = trainer(
            trl,
            "GRPO",
            folder,
            folder,
            output,
            dict(max_steps=2, per_device_train_batch_size=8),
            ragged("GRPO"),
            reward_funcs=even_characters,
            padding_free=padding_free,
        )
        tokens = []
        with counted(made.model, tokens):
            made.train()
        logs = [h for h in made.state.log_history if "loss" in h]
        names = ("loss", "grad_norm", "kl", "reward", "completions/mean_length")
        found.append(([[log[name] for name in names] for log in logs], tokens))
    return found


@pytest.mark.filterwarnings("ignore")
def test_grpo_with_prompts_padded_on_the_left_is_the_same(folder, tmp_path):
    for (padded, every), (free, real) in run_ranks(grpo, 2, folder, str(tmp_path), timeout=600):
        torch.testing.assert_close(torch.tensor(free), torch.tensor(padded), rtol=1e-4, atol=1e-5)
        assert [t[:2] for t in real] == [t[:2] for t in every]
        assert all(computed == padded for _, padded, computed in every)
        assert all(computed == min(-(-n // 64) * 64, padded) for n, padded, computed in real)
        assert sum(t[2] for t in real) < sum(t[1] for t in real)


# ---- transformers' Trainer, and a loop of one's own ----------------------------------------------


def hf_trainer(
    folder: str, output: str, ours: dict | None, collator: str, batch_size: int
) -> tuple:
    """Curve, evaluation's loss and tokens of transformers' Trainer, with settings of ours or plain."""
    import transformers
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

    from fsdp_qlora import dequantize_linears, quantize_linears
    from fsdp_qlora.integrations.transformers import ShardedTrainer
    from fsdp_qlora.lora_init import initial_a

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|im_start|>"
    texts = [p["prompt"] + p["chosen"] for p in ragged("DPO")]
    rows = Dataset.from_list([dict(tokenizer(t), labels=tokenizer(t).input_ids) for t in texts])
    if collator == "DataCollatorForLanguageModeling":
        rows = rows.remove_columns("labels")
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    else:
        collate = transformers.DataCollatorForSeq2Seq(tokenizer)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    given = settings("SFT", output, per_device_train_batch_size=batch_size)
    given = dict(
        args=TrainingArguments(**{k: v for k, v in given.items() if k != "max_length"}),
        data_collator=collate,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    if ours is not None:
        made = ShardedTrainer(folder, **given, peft_config=lora, quant="nf4", **ours)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        dequantize_linears(quantize_linears(model, "nf4"), torch.float32)
        model = get_peft_model(model, lora)
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.data = initial_a(name, SEED, p.shape)
        made = transformers.Trainer(model, **given)
    tokens = []
    with counted(made.model, tokens):
        made.train()
    return curve(made), made.evaluate(rows)["eval_loss"], tokens


def with_each_collator(folder: str, output: str, ways: list, batch_size: int) -> list[list]:
    names = ("DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq")
    return [[hf_trainer(folder, output, way, name, batch_size) for way in ways] for name in names]


def test_transformers_trainer_equals_itself_on_padded_rows(folder, tmp_path):
    """Its loss of evaluation is a mean over ranks' batches, so that of padded rows on two ranks."""
    arguments = folder, str(tmp_path)
    (expected,) = run_ranks(with_each_collator, 1, *arguments, [None], 4)
    for found in run_ranks(with_each_collator, 2, *arguments, [dict(padding_free=False), {}], 2):
        for (padded, free), (plain,) in zip(found, expected, strict=True):
            assert relative(free[0], plain[0]) < 1e-5
            assert abs(free[1] - padded[1]) < 1e-5 * padded[1]
            assert all(done == min(-(-n // 64) * 64, most) for n, most, done in free[2])
            assert all(done == most for _, most, done in padded[2])


def own_loop(folder: str) -> list[tuple]:
    """Logits at real tokens and gradients of `shard_and_load`'s model: padded, without, and Fabric's."""
    from lightning.fabric import Fabric
    from peft import LoraConfig, get_peft_model

    from fsdp_qlora import full_tensor, ranks_from_env, shard_and_load, streamed_model
    from fsdp_qlora.integrations.fabric import ShardedStrategy

    lengths = [[50, 4, 21], [17, 33, 60]][ranks_from_env().rank]
    ids = torch.randint(3, 300, (3, 60), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(60) < torch.tensor(lengths)[:, None]).long()

    def adapted():
        lora = LoraConfig(r=4, target_modules="all-linear")
        return get_peft_model(streamed_model(folder, "nf4"), lora)

    def with_fabric():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy("full_shard"))
        fabric.launch()
        return fabric.setup_module(adapted()).module

    def loaded(**how):
        return shard_and_load(adapted(), torch.device("cpu"), **how)

    found = []
    for make in (lambda: loaded(padding_free=False), loaded, with_fabric):
        model, tokens = make(), []
        with counted(model, tokens):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits[mask.bool()].square().mean().backward()
        grads = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        found.append((logits[mask.bool()].detach(), grads, [t[2] for t in tokens]))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_ones_own_and_fabric_compute_no_padding(folder):
    results = run_ranks(own_loop, 2, folder)
    for (padded, *others), width in zip(results, (128, 128), strict=True):
        assert padded[2] == [180]
        for found in others:
            assert found[2] == [width]
            assert relative(found[0], padded[0]) < 1e-5
            for mine, expected in zip(found[1], padded[1], strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-7)
