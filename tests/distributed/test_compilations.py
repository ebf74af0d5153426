"""Rows of many lengths are compiled for once, packed and padded, and a run says how often that was."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from fsdp_qlora.observe.compilations import say_graph_breaks
from tests.distributed.test_command_line import call
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
    """For the first block, the others and the norm; and once more where nothing is trained."""
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
    assert steps[9]["compilations"] == before["compilations"] <= 6
    assert after["compilations"] == steps[-1]["compilations"] <= 10
    assert steps[-1]["compilations"] == graphs
    assert f"torch compiled {graphs} graphs, the last by step" in said
    assert "can't compile all" not in said


def test_code_that_torch_does_not_compile_is_said_once(capsys):
    """`math.lcm` of a length that is not known, which no fault tells of."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.compile(lambda x: x * len(x), backend="eager", dynamic=True)(torch.ones(4))
    say_graph_breaks()
    assert "compile" not in capsys.readouterr().out
    torch.compile(lambda x: x * math.lcm(len(x), 3), backend="eager", dynamic=True)(torch.ones(4))
    for _ in range(2):
        say_graph_breaks()
    assert capsys.readouterr().out.count("warning: torch.compile can't compile all") == 1
    counters.clear()
