"""`simulate`: a run's build, sharding and first step on ranks that do not exist.

Of a model whose blocks are all alike two short ones are simulated, with _FEW blocks and one more: what
that one adds, each further block adds too.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..build import on_host, sharded_model
from ..catalog.arch import ModelShape
from ..catalog.known_models import is_known, known_config
from ..catalog.llama_pro import expanded_shape
from ..catalog.shapes import shape_from_config
from ..config import RunConfig
from ..dist import simulated_world
from ..estimate.collectives import Moved, step_collectives
from ..estimate.weights import all_trained, optimizer_bytes, resident_bytes
from ..loading import materialize, read_config
from ..loading.base_weights import model_settings
from ..loading.llama_pro import zeros_of_new_blocks
from ..optim import build_optimizer
from ..plan import Plan
from ..run_plan import plan_run
from ..sharding import parameter_device
from ..training.step import train_step
from .counting import Collectives, memory_by_part
from .files import Files, estimated_files, machine_files
from .messages import StoreMessages, store_messages

_FEW = 2  # blocks: the first and the last may differ from the others
_PER_LAYER = ("layer_types", "mlp_layer_types")
# What changes neither a shard nor a collective, and needs a GPU or rows of a data set.
_ASIDE = dict(
    device="cpu",
    random_weights=True,
    compile=False,
    cuda_graphs=False,
    compute_dtype="auto",
    attn_implementation="sdpa",
    packing=False,
)


@dataclass(frozen=True)
class Simulated:
    """Bytes of rank 0 by part, which has most, and what it takes part in per step; each as estimated too."""

    model_name: str
    world_size: int
    gpus_per_node: int
    strategy: str
    shard_ranks: int
    tokens: int  # of a micro-batch on one rank
    accumulation: int
    blocks: int
    simulated_blocks: int
    memory: dict[str, int]
    estimated_memory: dict[str, float]
    collectives: dict[str, Moved]
    estimated_collectives: dict[str, Moved]
    files: Files
    estimated_files: Files
    messages: StoreMessages  # to the run's store


def simulate(config: RunConfig, world_size: int, nodes: int = 1) -> Simulated:
    """One optimizer step of a run on so many ranks, counted on rank 0 without any of them.

    Raises ValueError for a model, strategy or number of ranks that a run would refuse.
    """
    if nodes < 1 or world_size % nodes:
        raise ValueError(
            f"--nodes {nodes}: {world_size} ranks can't be divided among them; give a --nodes that "
            "divides --world_size"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_world(world_size, world_size // nodes),
        redirect_stdout(StringIO()),
    ):
        full = _config_json(config)
        value_bytes = _value_bytes(full)
        asked = replace(config, model_name=_folder_of(full, Path(folder, "whole")))
        plan = plan_run(asked, torch.device("cpu"))
        shape = expanded_shape(shape_from_config(full, config.model_name), config)
        if _all_alike(shape, plan):
            few, more = (
                _counted(
                    config,
                    plan,
                    _folder_of(_cut(full, blocks), Path(folder, str(blocks))),
                    value_bytes,
                )
                for blocks in (_FEW, _FEW + 1)
            )
            found = _extended(few, more, shape.layers - _FEW)
        else:
            found = _counted(config, plan, asked.model_name, value_bytes)
    memory, moved, files = found
    batch = plan.batch
    return Simulated(
        config.model_name,
        world_size,
        world_size // nodes,
        plan.sharding.strategy,
        plan.sharding.shard_ranks,
        int(batch.tokens),
        int(batch.accumulation),
        shape.layers,
        _FEW + 1 if _all_alike(shape, plan) else shape.layers,
        memory,
        _estimated_memory(shape, plan),
        moved,
        step_collectives(shape, plan),
        files,
        estimated_files(shape, plan, value_bytes),
        store_messages(world_size),
    )


def _config_json(config: RunConfig) -> dict:
    """config.json of --model_name: a folder's, the catalogue's, or the hub's."""
    if not Path(config.model_name).exists() and is_known(config.model_name):
        return known_config(config.model_name)
    return read_config(config.model_name, **config.source).to_dict()


def _value_bytes(settings: dict) -> int:
    """Bytes of a weight in the files of a model, by its config.json; bf16 where that does not say."""
    name = settings.get("dtype") or settings.get("torch_dtype") or "bfloat16"
    return getattr(torch, str(name).removeprefix("torch.")).itemsize


def _folder_of(settings: dict, folder: Path) -> str:
    """A new folder with a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def _cut(settings: dict, blocks: int) -> dict:
    """config.json of a model's first blocks."""
    cut = {key: settings[key][:blocks] for key in _PER_LAYER if settings.get(key)}
    return settings | cut | dict(num_hidden_layers=blocks)


def _all_alike(shape: ModelShape, plan: Plan) -> bool:
    """Whether each block adds the same, so that a few tell the rest."""
    return (
        shape.layers > _FEW + 1
        and len(shape.block_kinds()) == 1
        and not shape.new_blocks
        and plan.adapter.blocks_adapted is None
        and not plan.adapter.only_modules
        and plan.sharding.wrap_policy != "min_params"
        and len(plan.memory.runs(shape)) == 1
    )


_Counts = tuple[dict[str, int], dict[str, Moved], Files]


def _extended(few: _Counts, more: _Counts, blocks: int) -> _Counts:
    """What a model with so many blocks more than `few` has; `more` has one."""

    def extend(a, b):
        return a + blocks * (b - a)

    memory = {part: extend(few[0][part], more[0][part]) for part in few[0]}
    moved = {
        name: Moved(*map(extend, asdict(few[1][name]).values(), asdict(more[1][name]).values()))
        for name in few[1]
    }
    files = Files(*map(extend, asdict(few[2]).values(), asdict(more[2]).values()))
    return memory, moved, files


def _counted(config: RunConfig, plan: Plan, folder: str, value_bytes: int) -> _Counts:
    """What rank 0 holds and moves in one step of the model in `folder`, cut into batches as in `plan`."""
    device = torch.device("cpu")
    policy = config.activation_policy.partition(":")[0]
    config = replace(config, **_ASIDE, model_name=folder, activation_policy=policy)
    own = plan_run(config, device)
    model, _ = sharded_model(config, device, own)
    held: dict[str, int] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, device, parameter_device(model, device, on_host(own)))
        optimizer = build_optimizer(
            model, config.optimizer, own.optimizer.lr, config.wd, config.loraplus_lr_ratio
        )
        optimizer.register_step_pre_hook(lambda *_: held.update(memory_by_part(model, optimizer)))
        width = int(plan.batch.context_length)
        ids = torch.zeros(int(plan.batch.micro_batch_size), width, dtype=torch.long)
        with _FakeCollectives() as moved:
            train_step(
                model,
                optimizer,
                [dict(input_ids=ids, labels=ids)] * int(plan.batch.accumulation),
                max_grad_norm=config.grad_norm if config.apply_gradient_clipping else None,
                no_sync=config.no_sync,
                ranks_per_row=config.sequence_parallel,
            )
    _, grown = model_settings(config)
    zeros = zeros_of_new_blocks(model, grown) if grown and not config.llama_pro_path else ()
    files = machine_files(model, optimizer, own, value_bytes, zeros)
    return held, {name: Moved(*counts) for name, counts in moved.counts.items()}, files


class _FakeCollectives(Collectives):
    """Also gives 1 for every number that only real tensors have: a loss is finite, tokens are trained."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        is_number = operator is torch.ops.aten._local_scalar_dense.default
        if is_number and getattr(args[0], "constant", None) is None:
            return 1
        return super().__torch_dispatch__(operator, types, args, kwargs)


def _estimated_memory(shape: ModelShape, plan: Plan) -> dict[str, float]:
    """The closed form of `Simulated.memory`, on the GPU and in host memory together."""
    resident = [resident_bytes(shape, plan, host) for host in (False, True)]
    weights = {part: resident[0][part] + resident[1][part] for part in resident[0]}
    trained = all_trained(shape, plan, plan.sharding.shard_ranks)
    return dict(
        frozen=sum(weights.values()) - weights["absmax"] - trained,
        scales=weights["absmax"],
        adapters=trained,
        gradients=trained,
        optimizer=optimizer_bytes(shape, plan),
    )
