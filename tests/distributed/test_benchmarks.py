"""The benchmark scripts run: every row makes a configuration, and a tiny model goes through."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fsdp_qlora.bench.drive import How, Job, run_jobs
from tests.ranks import run_ranks
from tests.tiny import save_tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SMALL = dict(batch_size=1, context_length=16, lora_rank=4, compile=False, device="cpu",
             use_activation_cpu_offload=False, activation_policy="recompute_all")


def measured(folder: str, results: str, ours: list[str], peers: list[tuple[str, str]]):
    """Run rows of ours and of peers on a tiny model."""
    import peers as peer_rows
    import speed_rows
    options = SimpleNamespace(steps=2, warmup=1, results=results, layers=None,
                              profile=str(Path(results).parent))
    for name in ours: speed_rows.run_case(name, folder, options, **SMALL)
    for name, peer in peers: peer_rows.run_peer(name, peer, folder, options, **SMALL)


def test_every_row_of_the_table_is_a_configuration_with_a_target():
    from speed_rows import CASES, chosen
    for name, case in CASES.items():
        config = case.config("model")
        assert config.random_weights and config.lora_dropout == 0 and case.target > 0, name
    assert chosen(["8b_qlora_*"], 2) == ["8b_qlora_full_shard", "8b_qlora_ddp"]
    with pytest.raises(ValueError, match="no row matches 9b"): chosen(["9b"], 1)


@pytest.mark.parametrize("ranks, ours, peers", [
    (1, ["8b_qlora", "8b_full_8bit", "8b_lora_qkv"], [("8b_qlora", "hf"), ("8b_lora", "hf")]),
    (2, ["8b_qlora_full_shard"], [("8b_qlora_full_shard", "accelerate")])])
def test_rows_of_ours_and_of_peers_are_measured_one_after_the_other(tmp_path, ranks, ours, peers):
    results = tmp_path / "rows.jsonl"
    folder = save_tiny(tmp_path / "tiny", max_position_embeddings=128)
    run_ranks(measured, ranks, folder, str(results), ours, peers, grouped=False)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [r["name"] for r in rows] == [f"{n} on {ranks}" for n in [*ours, *(n for n, _ in peers)]]
    assert all(r["status"] == "ok" and r["seconds_per_step"] > 0 for r in rows)
    for row, name in zip(rows, ours, strict=False):
        assert row["peer"] is None
        table = (tmp_path / name / "table_steps_2-3_rank_0.txt").read_text()
        assert table.startswith("one of 2 recorded steps") and "products" in table
    for row, (_, peer) in zip(rows[len(ours):], peers, strict=True):
        assert row["peer"].startswith(f"{peer}: transformers ")
        assert row["loss_first"] == pytest.approx(4.57, abs=0.2)  # log(97)


def test_a_cell_that_runs_out_of_time_leaves_no_rank_behind(tmp_path):
    """A rank left alone would hold the GPU that the next cell is measured on."""
    folder = save_tiny(tmp_path)
    job = Job("endless", ["--model_name", folder, "--random_weights", "--device", "cpu",
                          "--context_length", "16", "--world_size", "2"], gpus=2)
    how = How(steps=10**6, warmup=1, minutes=0.4)
    (row,) = run_jobs([job], how)
    assert (row.status, row.error) == ("error", "stopped: out of time")
    seen = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in seen if f"--steps {how.steps}" in line]
