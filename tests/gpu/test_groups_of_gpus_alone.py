"""Training in default groups of NCCL alone, as accelerate and scripts make them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_groups_of_gpus_alone import default_group, trained_on_pieces
from tests.distributed.test_other_trainers import STEPS, saved_and_answered, stop_and_resume
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = [  # kind, strategy, other settings
    ("DPO", "full_shard", {}),
    ("DPO", "ddp", {}),
    ("SFT", "full_shard", dict(use_cpu_offload=True)),
    ("SFT", "ddp", {}),
    ("GRPO", "full_shard", {}),
]
SAME = dict(rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def curves_of(folder: str, output: str, cases: list[tuple], device: str) -> list:
    """By case: the backends of the group that accelerate made, and the curves."""
    found = []
    for number, (kind, strategy, more) in enumerate(cases):
        given = dict(use_cpu=device == "cpu")
        more = dict(sharding_strategy=strategy) | more
        curves = stop_and_resume(folder, f"{output}/{number}", kind, given, **more)
        found.append((dist.get_backend_config(), curves))
    dist.destroy_process_group()
    return found


def test_trainers_learn_save_and_resume_in_accelerates_group_as_on_cpus(folder, tmp_path):
    cpus, gpus = (
        run_ranks(
            curves_of,
            2,
            *(folder, str(tmp_path / device), CASES, device),
            grouped=False,
            device="cuda",  # their numbers on this machine, by which accelerate takes GPUs in any case
            timeout=900,
        )
        for device in ("cpu", "cuda")
    )
    assert gpus[0] == gpus[1]
    for case, (_, on_cpus), (backends, on_gpus) in zip(CASES, cpus[0], gpus[0], strict=True):
        whole, stopped, resumed = map(torch.tensor, on_gpus)
        assert backends == "cuda:nccl" and whole.isfinite().all()
        assert [len(whole), len(stopped), len(resumed)] == [STEPS, STEPS // 2, len(on_cpus[2])]
        if case[0] == "GRPO":
            continue  # a sum in another order may draw another word
        torch.testing.assert_close(stopped, whole[: STEPS // 2], **SAME)
        torch.testing.assert_close(resumed[-STEPS // 2 :], whole[STEPS // 2 :], **SAME)
        torch.testing.assert_close(whole, torch.tensor(on_cpus[0]), **SAME)


def evaluated_and_answered(folder: str, output: str) -> tuple:
    with default_group("nccl"):
        return saved_and_answered(folder, output, dict(use_cpu=False))


def test_a_trainers_model_is_evaluated_and_answers(folder, tmp_path):
    first, second = run_ranks(
        evaluated_and_answered, 2, folder, str(tmp_path), grouped=False, device="cuda"
    )
    assert torch.equal(first[1], second[1]) and first[2] == second[2]


def own_loops(backend: str | None, folder: str, output: str) -> dict:
    """By strategy, what a loop of one's own computes on GPUs; and what it says of weights on hosts."""
    import fsdp_qlora as fq

    found, device = {}, fq.rank_device("cuda")
    torch.cuda.set_device(device)
    with default_group(backend):
        for name, strategy, on_host in (
            ("ddp", "ddp", None),
            ("full_shard", "full_shard", None),
            ("offloaded", "full_shard", fq.OnHost(True, False, True)),
        ):
            place = f"{output}/{name}"
            found[name] = trained_on_pieces(strategy, folder, place, device, on_host)
        found["refused"] = ""
        with suppress(ValueError):
            trained_on_pieces("full_shard", folder, output, device, fq.OnHost(True, True))
            found["refused"] = "taken"
    return found


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", None])
def test_a_loop_of_ones_own_is_what_it_is_in_a_group_that_serves_hosts_too(
    folder, tmp_path, backend
):
    expected, found = (
        run_ranks(
            own_loops, 2, name, folder, str(tmp_path / str(name)), grouped=False, device="cuda"
        )[0]
        for name in ("cpu:gloo,cuda:nccl", backend)
    )
    assert (expected.pop("refused"), found.pop("refused")) == ("taken", "")
    for name, own in found.items():
        frozen = expected[name].pop("frozen")
        assert all(map(torch.equal, own.pop("frozen").values(), frozen.values())), name
        assert own.pop("hash") == expected[name].pop("hash")
        torch.testing.assert_close(own, expected[name], **SAME)
