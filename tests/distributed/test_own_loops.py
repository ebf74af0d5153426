"""Training loops of users' own on the pieces: what could go wrong unseen works, or raises one line.

Public reports of the same kinds: gathered copies in an optimizer, optimizers built before sharding,
adapters that each rank drew for itself, forwards around the root, and equal dropout on all ranks.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.test_parity import checksum, flat, relative
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import (
    LR,
    RANK,
    SEED,
    TARGETS,
    padded_batch,
    reference_model,
    save_tiny,
    tiny_rows,
)

ROWS = tiny_rows(steps=1, rows_per_step=2)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def message_of(function, *args, **more) -> str:
    """The one line that a call raises as a ValueError; nothing if it returns."""
    try:
        function(*args, **more)
    except ValueError as error:
        return str(error)
    return ""


def built(folder: str, strategy: str, train_type: str = "qlora", **more):
    """A model of the library under a strategy."""
    from fsdp_qlora import RunConfig, build_model

    settings = dict(
        model_name=folder,
        precision="fp32",
        lora_rank=RANK,
        lora_alpha=16,
        lora_dropout=0.0,
        seed=SEED,
        sharding_strategy=strategy,
        train_type=train_type,
    )
    return build_model(RunConfig(**settings | more), torch.device("cpu"))


def trained(model) -> dict[str, torch.Tensor]:
    """The trained weights, whole."""
    import fsdp_qlora as fq

    return {
        n: fq.full_tensor(p.detach()).clone() for n, p in fq.trainable_parameters(model).items()
    }


# ---- a forward before training -----------------------------------------------------------------

FORWARDS = {"none": None, "no_grad": torch.no_grad, "with autograd": torch.enable_grad}


def two_steps_after(folder: str, cases) -> list[list[tuple[float, float]]]:
    """Loss and norm of two steps of each case (strategy, train type, forward, settings)."""
    from fsdp_qlora import build_optimizer, train_step

    results = []
    for strategy, train_type, forward, settings in cases:
        model, batch = built(folder, strategy, train_type, **settings), padded_batch(ROWS)
        if FORWARDS[forward]:
            with FORWARDS[forward]():
                model.eval()(input_ids=batch["input_ids"])
        optimizer = build_optimizer(model.train(), "adamw", LR, 0.0)
        steps = [train_step(model, optimizer, [batch] * 2) for _ in range(2)]
        results.append([(step.loss, step.grad_norm) for step in steps])
    return results


@pytest.mark.parametrize(
    "world_size, strategies",
    [
        (2, ("ddp", "full_shard")),
        rest(2, ("shard_grad_op",)),
        rest(4, ("hybrid_shard_grad_op", "hybrid_full_shard")),
    ],
)
def test_a_forward_before_the_first_step_keeps_no_weight_from_training(
    folder, world_size, strategies
):
    kinds = [("qlora", {}), ("full", {}), ("qlora", dict(gather_once=True))]
    cases = [
        (strategy, train_type, forward, more)
        for strategy in strategies
        for train_type, more in kinds
        for forward in FORWARDS
        if not more or strategy == "full_shard" or "hybrid_full" in strategy
    ]
    steps = run_ranks(two_steps_after, world_size, folder, cases)[0]
    plain = {
        (case[0], case[1], *case[3]): found
        for case, found in zip(cases, steps, strict=True)
        if case[2] == "none"
    }
    for case, found in zip(cases, steps, strict=True):
        assert found == plain[case[0], case[1], *case[3]], case
        assert found[0][1] > 0 and found[0] != found[1], case


# ---- optimizers of weights that are gone, and adapters that are loaded meanwhile ---------------


def gone_weights(folder: str, other: str) -> dict[str, str]:
    """What an optimizer says that was built at the wrong time, by the time; and what was trained."""
    import fsdp_qlora as fq

    device, batch, said = torch.device("cpu"), padded_batch(ROWS), {}

    def train(model, optimizer, own_loop=True):
        if not own_loop:
            return fq.train_step(model, optimizer, [batch])
        model(**batch).loss.backward()
        optimizer.step()

    def sgd(model):
        return torch.optim.SGD(fq.trainable_parameters(model).values(), LR)

    for own_loop in (True, False):
        model = reference_model(folder, "lora")
        early = sgd(model)
        fq.apply_sharding(model)
        said["before sharding", own_loop] = message_of(train, model, early, own_loop)
        model = fq.apply_adapters(
            fq.meta_model(fq.read_config(folder), torch.float32), fq.lora_config(rank=RANK)
        )
        fq.apply_sharding(model, "ddp")
        early = sgd(model)
        fq.materialize(model, device, device)
        fq.load_weights(model, fq.Checkpoint(folder), device)
        fq.init_adapters(model, SEED)
        said["before materialize", own_loop] = message_of(train, model, early, own_loop)
        model = built(folder, "shard_grad_op")
        model(**batch)
        said["between forward and backward", own_loop] = message_of(
            train, model, sgd(model), own_loop
        )
        model = built(folder, "full_shard")
        said["another model's", own_loop] = message_of(
            train, model, sgd(built(folder, "full_shard")), False
        )
    model = reference_model(folder, "lora")
    early = sgd(model)  # of one rank, or of ddp, whose weights stay where they are
    fq.apply_sharding(model, "ddp")
    before = checksum(model)
    said["ddp"] = message_of(train, model, early) + " unchanged" * (before == checksum(model))
    model = built(folder, "shard_grad_op")
    model(**batch)
    fq.load_adapter(model, other)  # into the shards, not into the gathered copies
    train(model, torch.optim.SGD(fq.trainable_parameters(model).values(), 0.0))
    wanted = load_file(f"{other}/adapter_model.safetensors")
    now = {n.replace(".default", ""): t for n, t in trained(model).items()}
    said["loaded"] = "" if all(torch.equal(now[n], wanted[n]) for n in wanted) else "lost"
    return said


def test_an_optimizer_of_weights_that_are_gone_says_so_and_what_is_loaded_stays(folder, tmp_path):
    other = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules=TARGETS, init_lora_weights=False),
    )
    other.save_pretrained(tmp_path)
    for said in run_ranks(gone_weights, 2, folder, str(tmp_path)):
        assert said.pop("ddp") == "" and said.pop("loaded") == ""
        assert len(said) == 8
        for when, text in said.items():
            assert "train nothing; build" in text, (when, text)


# ---- ranks that differ, modules that are called for themselves ---------------------------------


def peft_model(folder: str, seed: int, **more):
    """As a script makes it, its adapters drawn from torch's generator."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM", r=RANK, target_modules=TARGETS, init_lora_weights=False, **more
        ),
    )


def first_weights(folder: str, strategies) -> list[tuple]:
    """For each strategy the trained weights of ranks that were seeded apart, and rank 0's own."""
    import fsdp_qlora as fq

    rank, results = fq.ranks_from_env().rank, []
    for strategy in strategies:
        model = peft_model(folder, seed=rank)
        fq.apply_sharding(model, strategy)
        weights = trained(model)
        model = built(folder, strategy)
        fq.init_adapters(model, seed=rank)
        results.append((weights, checksum(model)))
    return results


@pytest.mark.parametrize(
    "world_size, strategies",
    [(2, ("ddp", "shard_grad_op", "full_shard")), rest(4, ("hybrid_full_shard",))],
)
def test_ranks_seeded_apart_start_from_the_adapters_of_rank_0(folder, world_size, strategies):
    own = {
        n: p.detach() for n, p in peft_model(folder, seed=0).named_parameters() if p.requires_grad
    }
    for results in zip(*run_ranks(first_weights, world_size, folder, strategies), strict=True):
        for weights, _ in results:
            assert all(torch.equal(weights[name], own[name]) for name in own)
        assert len({total for _, total in results}) == 1


def gradients_of_calls(folder: str) -> dict[str, dict]:
    """Under ddp, gradients of a loss through the root and through modules inside."""
    import fsdp_qlora as fq

    batch, found = padded_batch([ROWS[fq.ranks_from_env().rank]]), {}

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
        )

    def by_hand(model):  # around the root, whose hooks don't run
        causal = model.base_model.model
        return loss_of(causal.lm_head(causal.model(input_ids=batch["input_ids"]).last_hidden_state))

    calls = {
        "root": lambda model: loss_of(model(input_ids=batch["input_ids"]).logits),
        "causal": lambda model: loss_of(model.get_base_model()(batch["input_ids"]).logits),
        "by hand": by_hand,
    }
    models = {
        "loaded": lambda: reference_model(folder, "lora"),
        "ours": lambda: built(folder, "ddp", "lora"),
        "reentrant": lambda: built(folder, "ddp", "lora", reentrant_checkpointing=True),
    }
    for kind, make in models.items():
        for name, call in calls.items():
            model = make()
            if kind == "loaded":
                fq.apply_sharding(model, "ddp")
            call(model).backward()
            found[kind, name] = {n: p.grad for n, p in fq.trainable_parameters(model).items()}
    return found


def test_ddp_averages_gradients_whichever_module_is_called(folder):
    model = reference_model(folder, "lora")
    for row in ROWS:
        batch = padded_batch([row])
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        (loss / 2).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for found in run_ranks(gradients_of_calls, 2, folder):
        for name in [name for name in found if name[0] != "loaded"]:  # lora_alpha 16 there, 8 here
            found[name] = {n: g / 2 for n, g in found[name].items()}
        for name, gradients in found.items():
            assert relative(flat(gradients, wanted), flat(wanted, wanted)) < 1e-5, name


def accumulated(folder: str) -> dict[str, tuple[dict, dict]]:
    """Gradients after a backward that is not reduced over ranks, and after a second one that is."""
    import fsdp_qlora as fq
    from fsdp_qlora.dist import full_tensor

    rank, found = fq.ranks_from_env().rank, {}
    for strategy in ("ddp", "shard_grad_op", "full_shard"):
        model, after = built(folder, strategy, "lora"), []
        trained = fq.trainable_parameters(model)
        for row, sync in ((rank, False), (1 - rank, True)):
            batch = padded_batch([ROWS[row]])
            fq.set_gradient_sync(model, sync)
            logits = model(input_ids=batch["input_ids"]).logits
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
            ).backward()
            if sync or strategy == "ddp":
                after.append({n: full_tensor(p.grad).clone() for n, p in trained.items()})
        found[strategy] = after[0], after[-1]
    return found


def test_gradients_are_reduced_once_where_only_the_last_backward_asks_for_it(folder):
    wanted = []
    for row in ROWS:
        model, batch = reference_model(folder, "lora"), padded_batch([row])
        model(**batch).loss.backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        wanted.append(flat(trained, trained))
        names = list(trained)
    for rank, found in enumerate(run_ranks(accumulated, 2, folder)):
        # lora_alpha is 16 here and 8 in the reference
        assert relative(flat(found["ddp"][0], names) / 2, wanted[rank]) < 1e-5
        for strategy, (_, gradients) in found.items():
            assert relative(flat(gradients, names) / 2, wanted[0] + wanted[1]) < 1e-5, strategy


# ---- names and defaults ------------------------------------------------------------------------


def placements(folder: str) -> dict[str, str]:
    """What sharding does by default, and says of wrong names and meshes."""
    import fsdp_qlora as fq

    cpu, found = torch.device("cpu"), {}
    model = reference_model(folder, "lora")
    found["units"] = " ".join(fq.apply_sharding(model))
    found["local rows"] = str(
        sorted(
            {
                fq.local_rows(p)[0].numel() / p.numel()
                for n, p in model.named_parameters()
                if "layers" in n
            }
        )
    )

    def shard(*args, **more):
        fq.apply_sharding(reference_model(folder, "lora"), *args, **more)

    line, square = fq.make_mesh("full_shard", cpu), fq.make_mesh("hybrid_full_shard", cpu)
    refused = {
        "fullshard": ("fullshard",),
        "SHARD_ALL": ("SHARD_ALL",),
        "ddp takes a mesh of 0": ("ddp", line),
        "hybrid_full_shard takes a mesh of 2": ("hybrid_full_shard", line),
        "full_shard takes a mesh of 1": ("full_shard", square),
    }
    for wanted, args in refused.items():
        found[wanted] = message_of(shard, *args)
    found["make_mesh: fsdp"] = message_of(fq.make_mesh, "fsdp", cpu)
    found["BACKWARD_PRE"] = message_of(shard, "full_shard", backward_prefetch="BACKWARD_PRE")
    found["blocks"] = message_of(shard, "full_shard", wrap_policy="blocks")
    model = built(folder, "full_shard")
    with torch.inference_mode():
        found["inference_mode"] = message_of(model, **padded_batch(ROWS))
    return found


def test_sharding_without_a_mesh_does_what_its_default_says_and_wrong_names_are_refused(folder):
    for found in run_ranks(placements, 4, folder):
        assert "layers.0" in found.pop("units")
        assert found.pop("local rows") == "[0.25]"
        assert "choose ddp, shard_grad_op" in found.pop("make_mesh: fsdp")
        for wanted, text in found.items():
            assert wanted in text and any(
                remedy in text for remedy in ("choose", "make_mesh(", "no_grad")
            ), (wanted, text)


# ---- dropout -----------------------------------------------------------------------------------


def masks(folder: str) -> dict:
    """Outputs of one batch in training on ranks that are seeded alike, and what is said of the masks."""
    import fsdp_qlora as fq

    rank, batch = fq.ranks_from_env().rank, padded_batch(ROWS[:1])
    found = {}

    def loss(model, seed=0):
        torch.manual_seed(seed)
        return model.train()(**batch).loss.item()

    for strategy in ("ddp", "full_shard"):
        model = built(folder, strategy, lora_dropout=0.5)
        with torch.no_grad():
            for p in fq.trainable_parameters(model).values():
                fq.local_rows(p)[0].normal_()
        found[f"ours, {strategy}"] = loss(model), loss(model)
    model = peft_model(folder, seed=1, lora_dropout=0.5)
    fq.apply_sharding(model)
    found["said"] = message_of(loss, model)
    found["again"] = message_of(loss, model)
    found["apart"] = loss(model, seed=rank)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attention_dropout=0.5, attn_implementation="eager"
    )
    fq.apply_sharding(model, "ddp")
    found["attention"] = message_of(loss, model)
    model = peft_model(folder, seed=1, lora_dropout=0.5)
    fq.apply_sharding(model, "ddp")
    model.eval()(**batch)  # no mask is drawn
    return found


def test_ranks_that_are_seeded_alike_drop_other_places_or_say_so(folder):
    first, second = run_ranks(masks, 2, folder)
    for strategy in ("ddp", "full_shard"):
        here, there = first[f"ours, {strategy}"], second[f"ours, {strategy}"]
        assert here[0] == here[1] and there[0] == there[1]  # a seed still fixes a rank's masks
        assert here[0] != there[0]
    for rank in (first, second):
        for name in ("said", "again", "attention"):
            assert "torch.manual_seed(seed + rank)" in rank[name]
        assert "lora_dropout" in rank["said"] and "self_attn" in rank["attention"]
    assert first["apart"] != second["apart"]


# ---- more than one adapter ---------------------------------------------------------------------


def save_second_adapters(folder: str, out: str) -> list[str]:
    """Save the second adapter of models under every strategy; what is said where that can't be."""
    import fsdp_qlora as fq

    said = []
    for strategy in ("ddp", "full_shard"):
        model = peft_model(folder, seed=0)
        model.add_adapter(
            "second",
            LoraConfig(
                task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False
            ),
        )
        model.set_adapter("second")
        fq.apply_sharding(model, strategy)
        fq.save_adapter(model, f"{out}/{strategy}")
        for p in model.parameters():
            p.requires_grad_(False)
        said.append(message_of(fq.save_adapter, model, f"{out}/none"))
        for n, p in model.named_parameters():
            p.requires_grad_("lora_" in n)
        said.append(message_of(fq.save_adapter, model, f"{out}/both"))
    return said


def test_a_second_adapter_is_saved_under_the_names_that_peft_reads(folder, tmp_path):
    for said in run_ranks(save_second_adapters, 2, folder, str(tmp_path)):
        assert ["nothing to save" in text or "set_adapter" in text for text in said] == [True] * 4
    live = peft_model(folder, seed=0)
    live.add_adapter(
        "second",
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    live.set_adapter("second")
    live.save_pretrained(tmp_path / "peft", selected_adapters=["second"])
    wanted = load_file(tmp_path / "peft/second/adapter_model.safetensors")
    ids = torch.tensor([[5, 17, 40, 8]])
    for strategy in ("ddp", "full_shard"):
        found = load_file(tmp_path / strategy / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder), tmp_path / strategy
        )
        assert loaded.peft_config["default"].r == 2
        assert any(p.abs().sum() > 0 for n, p in loaded.named_parameters() if "lora_B" in n)
        assert loaded(ids).logits.shape == (1, 4, 97)
    assert not (tmp_path / "none").exists() and not (tmp_path / "both").exists()
