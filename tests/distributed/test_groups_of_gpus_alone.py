"""Everything works in a default group that serves GPUs alone, as accelerate and Fabric make it.

`cuda:gloo` is such a group on a machine without GPUs: what is in host memory can't travel in it, as in
NCCL's. What would be on the GPUs is in host memory here too, so the model gets a mesh that serves it,
and so do the tensors of other trainers. Whatever else goes to the default group raises torch's error.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_qlora.dist import full_tensor
from tests.distributed.test_evaluation import HELD_OUT, STEPS, dataset_of
from tests.distributed.test_other_trainers import saved_and_answered, stop_and_resume
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import CLIP, LR, RANK, SEED, padded_batch, reference_model
from tests.tokenizers import save_chat_model

GPUS_ALONE, MINUTES = "cuda:gloo", 2
CPU = torch.device("cpu")
MOVERS = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object broadcast broadcast_object_list "
    "gather gather_object barrier"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


@contextmanager
def default_group(backend: str, **more):
    """A default process group as a script makes it."""

    dist.init_process_group(backend, timeout=timedelta(minutes=MINUTES), **more)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def stand_in_for_gpus():
    """Our meshes, and collectives that other trainers call, on a group that serves this machine."""

    from fsdp_qlora.integrations import streamed

    theirs, make_mesh = dist.new_group(backend="cpu:gloo"), streamed.make_mesh
    movers = {name: getattr(dist, name) for name in MOVERS}

    def in_theirs(mover):
        signature = inspect.signature(mover)

        @wraps(mover)
        def move(*args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"].split(".")[0]
            given = signature.bind(*args, **kwargs)
            if caller in (
                "accelerate",
                "transformers",
                "trl",
                "lightning",
            ) and not given.arguments.get("group"):
                given.arguments["group"] = theirs
            return mover(*given.args, **given.kwargs)

        return move

    streamed.make_mesh = lambda strategy, *_: mesh_of(strategy, theirs)
    for name, mover in movers.items():
        setattr(dist, name, in_theirs(mover))
    try:
        yield
    finally:
        streamed.make_mesh = make_mesh
        for name, mover in movers.items():
            setattr(dist, name, mover)


def mesh_of(strategy: str, group):

    return None if strategy == "ddp" else DeviceMesh.from_group(group, "cpu")


# ---- what host memory holds --------------------------------------------------------------------


def raised(function, *args) -> str:
    try:
        function(*args)
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(error: Exception):
    raise error


def written_by_main(error: Exception):
    from fsdp_qlora.dist import main_only

    with main_only():
        if int(os.environ["RANK"]) == 0:
            raise error


def host_values(backends: list[str]) -> list[dict]:
    """By default group, one after the other: what the helpers give, and the groups there are then."""

    from fsdp_qlora import dist as ours
    from fsdp_qlora.dist import groups

    rank, store = int(os.environ["RANK"]), dist.TCPStore("localhost", 0, is_master=True)
    ports = [str(store.port)]
    with default_group("gloo"):
        dist.broadcast_object_list(ports)
    if rank:
        store = dist.TCPStore("localhost", int(ports[0]))
    results = []
    for number, backend in enumerate(backends):
        inside = dict(store=dist.PrefixStore(str(number), store), rank=rank, world_size=2)
        with default_group(backend, **inside):
            tensor = torch.tensor([rank + 1.0])
            ours.all_reduce(tensor)
            sent = torch.tensor([rank])
            ours.broadcast(sent, owner=1)
            results.append(
                dict(
                    plain=raised(dist.all_reduce, torch.ones(1)),
                    summed=[*ours.sum_over_ranks(1, rank), tensor.item()],
                    largest=ours.max_over_ranks(rank, -rank),
                    gathered=ours.gather_over_ranks("x" * rank),
                    of_main=ours.from_main(lambda: rank + 5),
                    sent=sent.item(),
                    errors=[
                        raised(ours.from_main, lambda: failing(ValueError("no"))),
                        raised(written_by_main, OSError("full")),
                    ],
                    groups=len(dist.distributed_c10d._world.pg_map),
                    minutes=groups.host_group()._get_backend(CPU).options._timeout.total_seconds()
                    / 60,
                    device=groups.main_device_type(),
                )
            )
        results[-1]["left"] = len(groups._host_groups)
    return results


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def ended_at_exit() -> tuple[list[int], list[int]]:
    """Threads before the first value of the host travels, with it, and after what Python does at exit."""
    from fsdp_qlora import dist as ours
    from fsdp_qlora.dist import groups

    counts = []
    with default_group(GPUS_ALONE):
        for step in (lambda: None, lambda: ours.sum_over_ranks(1), groups._end_host_groups):
            step()
            counts.append(threads())
        return counts, ours.sum_over_ranks(1)


def test_what_host_memory_holds_travels_in_any_group_one_after_another():
    backends = ["gloo", GPUS_ALONE, GPUS_ALONE, "cpu:gloo,cuda:gloo", "cpu:gloo", GPUS_ALONE]
    for rank, results in enumerate(run_ranks(host_values, 2, backends, grouped=False)):
        for backend, found in zip(backends, results, strict=True):
            alone = backend == GPUS_ALONE
            assert ("No backend type associated with device type cpu" in found["plain"]) is alone
            assert found["summed"] == [2, 1, 3.0] and found["largest"] == [1, 0]
            assert found["gathered"] == ["", "x"] and found["of_main"] == 5 and found["sent"] == 1
            wrote = "full" if rank == 0 else "OSError: full"
            assert found["errors"][0] == "ValueError: no" and wrote in found["errors"][1]
            assert found["groups"] == 1 + alone and found["left"] == 0
            assert found["minutes"] == MINUTES
            assert found["device"] == ("cuda" if alone else "cpu")


def test_no_thread_is_left_that_could_abort_a_script_at_its_end():
    for (before, during, after), summed in run_ranks(ended_at_exit, 2, grouped=False):
        assert during > before == after and summed == [2]


def ranks_without_environment() -> tuple:
    """Who a rank is whose script gives rank and size to `init_process_group` itself."""

    import fsdp_qlora as fq

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    where = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    with default_group("gloo", init_method=where, rank=rank, world_size=world_size):
        ranks = fq.ranks_from_env()
        wrote = [ranks.is_main, dist.get_rank() == 0]
    return ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, wrote


def test_ranks_that_torchrun_did_not_start_are_those_of_their_group():
    found = run_ranks(ranks_without_environment, 2, grouped=False)
    assert found == [(0, 2, 0, 2, [True, True]), (1, 2, 1, 2, [False, False])]


# ---- a loop of one's own -----------------------------------------------------------------------


def own_loop(backend: str, folder: str, output: str) -> dict:
    """By strategy: what a loop on the pieces computes, and saves."""
    import fsdp_qlora as fq

    found = {}
    with default_group(backend), stand_in_for_gpus():
        for strategy in ("ddp", "full_shard"):
            found[strategy] = trained_on_pieces(strategy, folder, f"{output}/{strategy}")
        torch.manual_seed(fq.ranks_from_env().rank)  # adapters that each rank drew by itself
        model = reference_model(folder, "lora")
        fq.shard_and_load(model, CPU, sharding_strategy="ddp")
        found["adapters"] = [p.detach().clone() for p in fq.trainable_parameters(model).values()]
    return found


def trained_on_pieces(strategy: str, folder: str, output: str, device=CPU, on_host=None) -> dict:

    import fsdp_qlora as fq
    from fsdp_qlora.integrations import streamed

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = fq.meta_model(fq.read_config(folder), torch.float32)
    fq.quantize_linears(model, "nf4")
    model = fq.apply_adapters(model, fq.lora_config(rank=RANK, dropout=0.1))
    mesh = streamed.make_mesh(strategy, device)
    fq.apply_sharding(model, strategy, mesh, on_host=on_host)
    fq.load_quantized(model, folder, device=device, seed=SEED, on_host=on_host)
    optimizer = fq.build_optimizer(model, "adafactor", LR)
    steps = [
        fq.train_step(model, optimizer, [padded_batch([rows[rank]])], max_grad_norm=CLIP)
        for rows in STEPS
    ]
    fq.save_adapter(model, output)
    fq.load_adapter(model, output)
    return dict(
        steps=[(step.loss, step.grad_norm) for step in steps],
        held_out=fq.held_out_loss(model, dataset_of(HELD_OUT), device),
        frozen={
            name: fq.full_tensor(p.detach()).cpu().clone().view(torch.uint8)  # packed bytes
            for name, p in model.named_parameters()
            if "base_layer" in name
        },
        hash=hash_of(fq.Checkpoint(folder)),
    )


def hash_of(checkpoint) -> str:
    checkpoint.content.read_all(checkpoint.content.stored)
    return checkpoint.content.digest()


def test_a_loop_of_ones_own_is_what_it_is_in_a_group_that_serves_hosts_too(folder, tmp_path):
    expected = run_ranks(own_loop, 2, "gloo", folder, str(tmp_path / "both"), grouped=False)
    found = run_ranks(own_loop, 2, GPUS_ALONE, folder, str(tmp_path / "gpus"), grouped=False)
    for own, theirs in zip(found, expected, strict=True):
        for strategy in ("ddp", "full_shard"):
            weights, expected_weights = own[strategy].pop("frozen"), theirs[strategy].pop("frozen")
            assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
            assert weights.keys() == expected_weights.keys() and len(weights) > 1
            assert own[strategy] == theirs[strategy]
            saved = [
                load_file(tmp_path / place / strategy / "adapter_model.safetensors")
                for place in ("both", "gpus")
            ]
            assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
        assert all(map(torch.equal, own["adapters"], found[0]["adapters"]))


def trained_on_the_host(folder: str) -> list[str]:
    """What sharding says of weights that are trained in host memory, by the mesh's group."""

    import fsdp_qlora as fq

    said = []
    with default_group(GPUS_ALONE) as gpus:
        for group in (gpus, dist.new_group(backend="cpu:gloo")):
            model = fq.meta_model(fq.read_config(folder), torch.float32)
            offload = fq.OnHost(frozen=True, trained=True)
            shard = partial(fq.apply_sharding, on_host=offload)
            said.append(raised(shard, model, "full_shard", mesh_of("full_shard", group)))
    return said


def test_weights_are_trained_in_host_memory_only_where_their_gradients_can_travel(folder):
    for refused, taken in run_ranks(trained_on_the_host, 2, folder, grouped=False):
        assert "cuda:gloo, is for GPUs alone" in refused
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in refused and taken == ""


def run_without_a_store(folder: str) -> str:
    """What a whole run says in a group that the script has made."""
    import fsdp_qlora as fq

    config = fq.RunConfig(model_name=folder, output_dir=folder)
    with default_group("gloo"):
        return raised(fq.train, config, dataset_of(HELD_OUT), CPU, None)


def test_a_whole_run_in_a_group_of_ones_own_says_which_group_it_needs(folder):
    for said in run_ranks(run_without_a_store, 2, folder, grouped=False):
        assert said.startswith(
            "ValueError: a run needs the group of `with fsdp_qlora.process_group"
        )


class Devices(TorchDispatchMode):
    """The type of device of each collective's tensors."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if "c10d" in operator.namespace and "wait" not in operator.__name__:
            self.seen += [
                leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
            ]
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend, travels_as", [("cuda:fake", "cuda"), ("fake", "cpu")])
def test_an_offloaded_weight_is_gathered_on_a_device_that_its_group_serves(
    monkeypatch, backend, travels_as
):
    """With torch's fake tensors, which need no GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        whole = TensorMeta(torch.Size([6, 4]), (4, 1), torch.float32)
        with FakeTensorMode(), Devices() as devices:
            rows = DTensor(
                torch.empty(3, 4), DTensorSpec(mesh, (Shard(0),), whole), requires_grad=False
            )
            gathered = full_tensor(rows)
        assert devices.seen == [travels_as]
        assert gathered.shape == (6, 4) and gathered.device == CPU
    finally:
        dist.destroy_process_group()


# ---- other trainers ----------------------------------------------------------------------------


def in_group(backend: str, function, *args):
    """What a function gives in a default group of a backend."""
    with default_group(backend), stand_in_for_gpus():
        return function(*args)


@pytest.mark.parametrize("kind", ["DPO", rest("SFT"), rest("GRPO")])
def test_a_trainer_learns_saves_and_resumes_in_it(folder, tmp_path, kind):
    curves = [
        run_ranks(
            in_group, 2, backend, stop_and_resume, folder, str(tmp_path / name), kind, grouped=False
        )
        for name, backend in (("both", "gloo"), ("gpus", GPUS_ALONE))
    ]
    assert curves[0] == curves[1]
    whole, _, resumed = curves[1][0]
    assert whole and resumed[-1] == whole[-1]


@pytest.mark.slow
def test_a_trainers_model_answers_and_is_evaluated_in_it(folder, tmp_path):
    both, alone = (
        run_ranks(
            in_group, 2, backend, saved_and_answered, folder, str(tmp_path / name), grouped=False
        )
        for name, backend in (("both", "gloo"), ("gpus", GPUS_ALONE))
    )
    for expected, found in zip(both, alone, strict=True):
        assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
        assert expected[2] == found[2]


def loops(folder: str) -> list[list[float]]:
    """Losses of the loops in examples/, under accelerate and Fabric."""
    from examples import accelerate_loop, fabric

    return [accelerate_loop.main(folder), fabric.main(folder)]


@pytest.mark.slow
def test_accelerate_and_fabric_train_in_it(folder):
    both, alone = (
        run_ranks(in_group, 2, backend, loops, folder, grouped=False)
        for backend in ("gloo", GPUS_ALONE)
    )
    assert both == alone and all(losses[-1] < losses[0] for losses in alone[0])
