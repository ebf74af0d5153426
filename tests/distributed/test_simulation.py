"""A simulated run holds and moves what real ranks do, and what the estimate says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from fsdp_qlora.build import build_model
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import groups, process_group, rank_store
from fsdp_qlora.dist.rank_store import ErrorKey
from fsdp_qlora.loading.weight_files import Checkpoint
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.run_plan import plan_run
from fsdp_qlora.simulation import (
    Collectives,
    CountedStore,
    memory_by_part,
    simulate,
    store_messages,
)
from fsdp_qlora.training.step import train_step
from tests.chaos.harness import command, make_inputs
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import save_tiny

TOKENS = 16
BLOCKS = 4  # more than are simulated
# On so many ranks, settings that change what is sharded, gathered or reduced.
CASES = {
    2: [
        dict(),
        dict(sharding_strategy="shard_grad_op", gradient_accumulation_steps=2),
        dict(sharding_strategy="ddp"),
        dict(wrap_policy="attention_mlp", quant="none", train_type="lora"),
        dict(train_type="bnb_llama_pro", llama_pro_blocks=2),
    ],
    4: [
        dict(sharding_strategy="hybrid_full_shard", shard_group_size=2),
        dict(gradient_accumulation_steps=2, gather_once=True, no_sync=True),
        dict(train_type="full"),
    ],
}


def settings(folder: str, **changes) -> RunConfig:
    """A tiny run without files."""
    return RunConfig(
        model_name=folder,
        random_weights=True,
        device="cpu",
        precision="fp32",
        context_length=TOKENS,
        batch_size=2,
        lora_rank=4,
        lora_dropout=0.0,
        **changes,
    )


def read_bytes(configs: list[RunConfig]) -> list[int]:
    """In a rank: bytes of the base that it reads from files, by what the loader's reads return."""
    found = []
    for config in configs:
        count = 0

        def read(checkpoint, span, *args, original=Checkpoint.read):
            nonlocal count
            count += span.nbytes
            return original(checkpoint, span, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "read", read)
            build_model(replace(config, random_weights=False), torch.device("cpu"))
        found.append(count)
    return found


def counted(configs: list[RunConfig]) -> list[tuple[dict, dict]]:
    """In a rank: the memory by part and [calls, bytes] by collective of a real step."""
    found = []
    for config in configs:
        device, held = torch.device("cpu"), {}
        plan = plan_run(config, device)
        model = build_model(config, device, plan=plan)
        optimizer = build_optimizer(model, config.optimizer)
        optimizer.register_step_pre_hook(
            lambda *_, m=model, o=optimizer, h=held: h.update(memory_by_part(m, o))
        )
        ids = torch.arange(2 * TOKENS).view(2, TOKENS)
        batches = [dict(input_ids=ids, labels=ids)] * int(plan.batch.accumulation)
        with Collectives() as moved:
            train_step(model, optimizer, batches, max_grad_norm=1.0, no_sync=config.no_sync)
        found.append((held, moved.counts))
    return found


@pytest.mark.parametrize(
    "ranks, cases", [(2, CASES[2][:1]), rest(2, CASES[2][1:]), rest(4, CASES[4])]
)
def test_a_simulated_rank_holds_and_moves_what_a_real_one_does_and_the_estimate_says(
    ranks, cases, tmp_path
):
    folder = save_tiny(tmp_path, num_hidden_layers=BLOCKS)
    configs = [settings(folder, **case) for case in cases]
    real = run_ranks(counted, ranks, configs)[0]
    for config, (held, moved) in zip(configs, real, strict=True):
        found = simulate(replace(config, world_size=ranks), ranks)
        grown = BLOCKS + 2 if config.adapter == "llama_pro" else BLOCKS
        assert found.blocks == grown and (found.simulated_blocks < BLOCKS) == (grown == BLOCKS)
        assert found.memory == held, config
        assert {k: [m.calls, m.bytes] for k, m in found.collectives.items()} == moved, config
        assert found.memory == pytest.approx(found.estimated_memory, rel=0.02), config
        assert found.collectives.keys() == found.estimated_collectives.keys(), config
        for name, m in found.collectives.items():
            estimated = found.estimated_collectives[name]
            assert estimated.calls == m.calls, (name, config)
            assert estimated.bytes == pytest.approx(m.bytes, rel=0.02), (name, config)


@pytest.mark.parametrize("ranks", [2, rest(4)])
def test_a_machine_reads_as_many_bytes_as_simulated(ranks, tmp_path):
    folder = save_tiny(tmp_path, num_hidden_layers=BLOCKS)
    configs = [settings(folder, **case) for case in CASES[ranks]]
    by_rank = run_ranks(read_bytes, ranks, configs)
    for config, *read in zip(configs, *by_rank, strict=True):
        found = simulate(replace(config, world_size=ranks), ranks)
        assert sum(read) == pytest.approx(found.files.read_bytes, rel=0.02), config
        assert found.files.read_bytes == pytest.approx(found.estimated_files.read_bytes, rel=0.02)


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, dict(sharding_strategy="full_shard")),
        rest(2, dict(sharding_strategy="full_shard", train_type="full", quant="none")),
        rest(4, dict(sharding_strategy="hybrid_full_shard", shard_group_size=2)),
    ],
)
def test_a_checkpoint_has_the_files_and_bytes_that_were_simulated(ranks, flags, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    typed = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run = command(inputs, tmp_path / "out", "--max_steps", "1", "--checkpoint_every", "1", *typed)
    ended = run.start(world_size=ranks)
    assert ended.codes == [0] * ranks, ended.text
    files = [p for p in (run.out / "checkpoints/step-000001").rglob("*") if p.is_file()]
    size = 0
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                names = [n for n in opened.keys() if n not in ("random|cpu", "random|cuda")]
                size += sum(opened.get_tensor(n).nbytes for n in names)
    config = RunConfig(
        model_name=str(inputs),
        random_weights=True,
        device="cpu",
        precision="fp32",
        lora_rank=2,
        **flags,
    )
    found = simulate(config, ranks)
    assert found.files.checkpoint_files == found.estimated_files.checkpoint_files == len(files)
    assert found.files.checkpoint_bytes == pytest.approx(size, rel=0.02)
    assert found.files.checkpoint_bytes == pytest.approx(
        found.estimated_files.checkpoint_bytes, rel=0.02
    )


def sent_to_the_store(config: RunConfig) -> tuple[int, int, int, int]:
    """In a rank: looks at the rendezvous beside the last, messages there, for the group, in a step."""
    device, made, looks = torch.device("cpu"), [], []
    with pytest.MonkeyPatch.context() as patch:
        connect, meet, look = groups.common_store, rank_store.rendezvous, ErrorKey.look

        def counted_store(*args):
            made.append(CountedStore(connect(*args)))
            return made[0]

        def met(*args):
            found = meet(*args)
            made.append(made[0].messages)
            return found

        patch.setattr(groups, "common_store", counted_store)
        patch.setattr(rank_store, "rendezvous", met)
        patch.setattr(ErrorKey, "look", lambda errors: looks.append(0) or look(errors))
        with process_group(device, timeout_minutes=2):
            store, there, group = *made, made[0].messages
            model = build_model(config, device)
            optimizer = build_optimizer(model, config.optimizer)
            ids = torch.arange(2 * TOKENS).view(2, TOKENS)
            before = store.messages
            train_step(model, optimizer, [dict(input_ids=ids, labels=ids)])
            return len(looks), there, group - there, store.messages - before


@pytest.mark.parametrize("ranks", [2, rest(4)])
def test_ranks_send_as_many_messages_to_the_store_as_simulated(ranks, tmp_path):
    """At the rendezvous up to five more at each look for ranks that are not there yet."""
    config = settings(save_tiny(tmp_path), sharding_strategy="full_shard")
    most = store_messages(ranks)
    for looks, there, group, step in run_ranks(sent_to_the_store, ranks, config, grouped=False):
        assert most.rendezvous - 1 <= there <= most.rendezvous + 5 * looks
        assert (group, step) == (most.group, most.step)
    assert store_messages(1024).rendezvous == most.rendezvous  # and the group's grow as 2 n


def test_what_a_rank_moves_in_a_step_does_not_grow_with_the_ranks(tmp_path):
    """But for rows that fill up the last shard: 104 and 128 for a vocabulary of 97."""
    config = replace(settings(save_tiny(tmp_path)), lora_rank=32)
    few, many = (simulate(config, ranks, nodes=ranks // 8).collectives for ranks in (8, 32))
    assert few.keys() == many.keys()
    for name in few:
        assert many[name].calls == few[name].calls, name
        assert many[name].bytes <= 1.25 * few[name].bytes, name


def test_the_command_shows_the_simulation_beside_the_estimate(capsys):
    assert main(["simulate", "--model_name", "llama-3.1-8b", "--world_size", "16"]) == 0
    text = capsys.readouterr().out
    assert "3 of 32 equal blocks simulated" in text
    for row in ("frozen", "scales", "adapters", "gradients", "optimizer", "all_gather"):
        assert re.search(rf"^{row} .*\d", text, re.MULTILINE), row


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--world_size", "16", "--nodes", "3"], "--nodes 3"),
        (["--nodes", "2"], "--world_size is needed"),
    ],
)
def test_ranks_that_can_not_be_divided_are_refused_with_the_flag(flags, said, capsys):
    assert main(["simulate", "--model_name", "llama-3.1-8b", *flags]) == 2
    assert said in capsys.readouterr().err
