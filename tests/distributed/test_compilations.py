"""Rows of many lengths are compiled for once, packed and padded, and a run says how often that was."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from transformers import AutoConfig

from fsdp_qlora.observe.compilations import say_what_runs_eager
from fsdp_qlora.observe.evaluate import evaluating
from tests.distributed.test_command_line import call
from tests.families import FAMILIES, MOE_FAMILIES, NEWER_FAMILIES, SIZES
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

STEPS, EVALUATION, CONTEXT = 30, 25, 256
MODES = {
    "padded": ["--batch_size", "3"],
    "packed": ["--packing", "true", "--batch_size", "2"],
    "packed, rows given": ["--packing", "true", "--batch_size", "2", "--global_batch_size", "9"],
}


def run(mode: str, folder: str, rows: str, out: str) -> tuple:
    """Exit code, output and number of graphs of a run.

    With the backend that makes no kernels: what is counted is how often torch wants new ones.
    """
    import torch

    compile = torch.compile  # noqa: A001
    torch.compile = lambda function, options=None, **kw: compile(
        function, backend="aot_eager", **kw
    )
    argv = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        rows,
        "--output_dir",
        f"{out}/{mode}",
        "--max_steps",
        str(STEPS),
        "--compile",
        "true",
        "--context_length",
        str(CONTEXT),
        "--lora_rank",
        "2",
        "--precision",
        "fp32",
        "--save_model",
        "false",
        "--device",
        "cpu",
        "--eval_share",
        "0.05",
        "--eval_every",
        str(EVALUATION),
        "--log_to",
        "stdout",
        *MODES[mode],
    ]
    ((code, said, error),) = call([argv])
    return code, said + error, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, str]:
    """A model, and rows of thirty lengths."""
    folder = tmp_path_factory.mktemp("inputs")
    rng, rows = random.Random(0), folder / "rows.jsonl"
    lengths = rng.sample(range(2, 150), 30)
    assert len(set(lengths)) == 30
    rows.write_text(
        "".join(
            json.dumps(dict(prompt="a" * (length // 2), completion="b" * (length - length // 2)))
            + "\n"
            for length in lengths * 20
        )
    )
    model = save_chat_model(folder / "model", max_position_embeddings=CONTEXT)
    return model, str(rows)


@pytest.mark.parametrize("mode", [slow("padded"), slow("packed"), rest("packed, rows given")])
def test_rows_of_thirty_lengths_are_compiled_for_in_the_first_steps_alone(inputs, mode, tmp_path):
    """For the blocks, the norm and the loss; and once more where nothing is trained."""
    ((code, said, graphs),) = run_ranks(
        run, 1, mode, *inputs, str(tmp_path), grouped=False, timeout=900
    )
    assert code == 0, said
    lines = (tmp_path / mode / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    assert len(steps) == STEPS
    widths = {step["padded_tokens"] for step in steps}
    assert len(widths) > 1 or mode == "packed"
    before, after = steps[EVALUATION - 2], steps[EVALUATION]
    assert steps[9]["compilations"] == before["compilations"] <= 3
    assert after["compilations"] == steps[-1]["compilations"] <= 6
    assert steps[-1]["compilations"] == graphs
    assert f"torch compiled {graphs} graphs, the last by step" in said
    assert "can't compile all" not in said


def losses_of(folder: str, device: str, case: dict) -> list[float]:
    """Of two steps, and of rows that are not trained on."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import rank_device
    from fsdp_qlora.training.step import train_step

    settings = dict(model="Qwen3", layers=LAYERS, micro_batches=1, precision="fp32") | case
    name, layers, micro_batches = (settings.pop(k) for k in ("model", "layers", "micro_batches"))
    config = RunConfig(
        model_name=f"{folder}/{name}/{layers}",
        random_weights=True,
        lora_rank=2,
        lora_dropout=0.0,
        device=device,
        **dict(compile=True) | settings,
    )
    model = build_model(config, rank_device(device))
    optimizer = torch.optim.SGD(trainable_parameters(model).values(), 0.1)
    batch = dict(input_ids=torch.arange(32).view(2, 16), labels=torch.arange(32).view(2, 16))
    steps = [
        train_step(model, optimizer, [batch] * micro_batches, no_sync=config.no_sync)
        for _ in range(2)
    ]
    with torch.no_grad(), evaluating(model):
        held_out = model(**batch, num_items_in_batch=32, use_cache=False).loss
    return [*(step.loss for step in steps), held_out.item()]


def graphs_of(folder: str, device: str, cases: list[dict]) -> list[list[int]]:
    """For each case, the integers that each graph of training takes for sizes that may change."""
    return [
        [sizes for recorded, sizes in graphs if recorded]
        for graphs, _ in traced(folder, device, cases)
    ]


def traced(folder: str, device: str, cases: list[dict]) -> list[tuple[list, list[float]]]:
    """For each case its graphs, as (whether autograd records, integers for sizes), and its losses."""
    compile, found = torch.compile, []  # noqa: A001
    graphs: list[tuple[bool, int]] = []

    def backend(graph, inputs):
        sizes = sum(isinstance(value, (int, torch.SymInt)) for value in inputs)
        graphs.append((torch.is_grad_enabled(), sizes))
        return graph.forward

    torch.compile = lambda function, options=None, **kw: compile(function, backend=backend, **kw)
    for case in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graphs.clear()
        losses = losses_of(folder, device, case)
        assert not torch._dynamo.utils.counters["unimplemented"], case
        found.append(([*graphs], losses))
    torch.compile = compile
    return found


def compiled_and_eager(folder: str, cases: list[dict]) -> list[tuple[int, int, list, list]]:
    """For each case its graphs of training and of evaluation, and its losses with and without them."""
    found = []
    for case, (graphs, losses) in zip(cases, traced(folder, "cpu", cases), strict=True):
        recorded = sum(recorded for recorded, _ in graphs)
        eager = losses_of(folder, "cpu", case | dict(compile=False))
        found.append((recorded, len(graphs) - recorded, losses, eager))
    return found


LAYERS = 4
RECOMPUTED = dict(sharding_strategy="ddp", activation_policy="recompute_all")
SHARDED = RECOMPUTED | dict(sharding_strategy="full_shard")
OFFLOADED = SHARDED | dict(use_cpu_offload=True, use_trained_cpu_offload=False)
LONGER = dict(layers=2 * LAYERS, micro_batches=2)
ONE_RANK = [OFFLOADED | LONGER | dict(use_activation_cpu_offload=True)]
MORE = [OFFLOADED | dict(use_trained_cpu_offload=True, use_vocabulary_cpu_offload=True)]
TWO_RANKS = [
    SHARDED | LONGER,
    RECOMPUTED | dict(sharding_strategy="shard_grad_op"),
    OFFLOADED | LONGER,
]
# Kinds of blocks, of which one that is frozen is seen without a gradient of its input too; and the norm.
KINDS = [
    (OFFLOADED | LONGER | dict(train_type="bnb_dora"), 2),
    (OFFLOADED | LONGER | dict(model="Qwen3-MoE", lora_target_parameters="experts"), 2),
    (OFFLOADED | LONGER | dict(activation_policy="keep_all:4,keep_linears:2,recompute_all:2"), 4),
    (OFFLOADED | LONGER | dict(train_type="bnb_llama_pro", layers=12), 5),
    (OFFLOADED | LONGER | dict(model="gpt-oss"), 3),
    (OFFLOADED | LONGER | dict(model="Gemma 3"), 3),
    (OFFLOADED | LONGER | dict(model="GLM-4.5"), 3),
    (OFFLOADED | LONGER | dict(layers_to_transform="0,4-7"), 3),
    (RECOMPUTED | LONGER | dict(train_type="full", trained_modules="layers.6,layers.7,lm_head"), 4),
]
# What blocks compute in another way than their classes do, and graphs of training and of evaluation.
BF16 = RECOMPUTED | dict(precision="bf16", layers=8)
NEW_BLOCKS = BF16 | dict(train_type="bnb_llama_pro", llama_pro_blocks=8)
OTHERWISE = [
    (NEW_BLOCKS, 5, 3),
    (BF16 | dict(modules_to_save="input_layernorm"), 2, 2),
    (BF16 | dict(model="StableLM", bias="all"), 2, 2),
    (RECOMPUTED | dict(model="Qwen3-MoE", layers=8, router_aux_loss_coef=0.1), 2, 2),
    (RECOMPUTED | dict(layers=8, mlp_tiles=2), 3, 4),
]
# Three policies and two kinds of blocks, and whether an input asks for a gradient.
MANY = NEW_BLOCKS | dict(activation_policy="keep_linears:5,keep_attention:5,recompute_all:6")


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> str:
    """Folders with the config.json of models of several numbers of layers."""
    folder = tmp_path_factory.mktemp("configs")
    for name in ("Qwen3", "Qwen3-MoE", "gpt-oss", "Gemma 3", "GLM-4.5", "StableLM"):
        family = (FAMILIES | MOE_FAMILIES | NEWER_FAMILIES)[name]
        for layers in (LAYERS, 8, 12):
            settings = SIZES | family | dict(num_hidden_layers=layers)
            if "layer_types" in settings:
                settings["layer_types"] = family["layer_types"] * (layers // 2)
            kind = settings.pop("model_type")
            AutoConfig.for_model(kind, **settings).save_pretrained(folder / name / str(layers))
    return str(folder)


@pytest.mark.parametrize("ranks, cases", [(1, ONE_RANK), rest(1, MORE), rest(2, TWO_RANKS)])
def test_sharded_and_offloaded_blocks_share_the_graphs_of_resident_ones(configs, ranks, cases):
    """The blocks' and the norm's, for any layers.

    As many sizes may change in them: the model's own integers, such as those of heads, are constants.
    """
    cases = [RECOMPUTED, *cases]
    for resident, *others in run_ranks(graphs_of, ranks, configs, "cpu", cases):
        assert len(resident) == 2
        assert others == [resident] * len(others)


@pytest.mark.slow
def test_each_kind_of_blocks_is_compiled_for_once(configs):
    (found,) = run_ranks(graphs_of, 1, configs, "cpu", [case for case, _ in KINDS])
    assert [len(graphs) for graphs in found] == [kinds for _, kinds in KINDS]


@pytest.mark.parametrize("cases", [OTHERWISE[:1], rest(OTHERWISE[1:])])
def test_blocks_whose_layers_compute_otherwise_share_their_graphs_and_train_as_uncompiled(
    configs, cases
):
    """Each would have graphs of its own, of which torch makes eight, if its layers had forwards of theirs."""
    (found,) = run_ranks(compiled_and_eager, 1, configs, [case for case, *_ in cases])
    for (case, *counts), (*made, compiled, eager) in zip(cases, found, strict=True):
        assert made == counts, case
        assert compiled == pytest.approx(eager, rel=1e-6), case


@pytest.mark.slow
def test_as_many_kinds_of_blocks_as_a_model_has_are_compiled(configs):
    """More graphs than torch makes of a function, unless it is told of the kinds."""
    ((recorded, others, compiled, eager),) = run_ranks(compiled_and_eager, 1, configs, [MANY])[0]
    assert recorded + others > 2 + 8
    assert compiled == pytest.approx(eager, rel=1e-6)


def test_code_that_torch_does_not_compile_is_said_once(capsys):
    """`math.lcm` of a length that is not known, which no fault tells of."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.compile(lambda x: x * len(x), backend="eager", dynamic=True)(torch.ones(4))
    say_what_runs_eager()
    assert "compile" not in capsys.readouterr().out
    torch.compile(lambda x: x * math.lcm(len(x), 3), backend="eager", dynamic=True)(torch.ones(4))
    for _ in range(2):
        say_what_runs_eager()
    assert capsys.readouterr().out.count("warning: torch.compile can't compile all") == 1
    counters.clear()


def test_a_function_that_torch_makes_no_more_graphs_of_is_said_once(capsys):
    torch._dynamo.utils.counters.clear()
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length, said in ((3, 0), (4, 0), (5, 1), (6, 0)):
            doubled(torch.ones(length))
            say_what_runs_eager()
            assert capsys.readouterr().out.count("warning: torch.compile made 2 graphs") == said
    torch._dynamo.utils.counters.clear()
