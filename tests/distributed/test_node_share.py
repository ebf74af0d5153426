"""One rank of a node tokenizes for all, without a cache folder; errors and deaths reach the others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch.distributed as dist

from fsdp_qlora.data import node_share
from tests.distributed.test_bad_inputs_on_every_rank import save_model, save_rows
from tests.patience import patience
from tests.ranks import run_ranks

BAD = '{"text": 7}\n'


def read_data_of_each(configs: list[dict]) -> list[tuple]:
    """For each run: how often this rank asked the tokenizer, and the data's digests or the error."""
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import dataset as dataset_module
    from fsdp_qlora.dist import ranks_from_env
    from fsdp_qlora.preflight.run_data import read_data, run_tokenizer

    node_share._WRITER_COMES_S = patience(60)
    encode, calls, found = dataset_module.encode_rows, [], []

    def counted(*args):
        calls.append(1)
        return encode(*args)

    dataset_module.encode_rows = counted
    for given in configs:
        calls.clear()
        only = given.pop("of_rank_1", {})
        config = RunConfig(**given, **(only if ranks_from_env().rank else {}))
        if only:
            node_share._WRITER_COMES_S = 0.5
        try:
            data = read_data(config, run_tokenizer(config))
            said = [data.rows.digest(), data.held_out and data.held_out.digest()]
            said.append(data.rows.report.to_dict())
        except ValueError as error:
            said = str(error)
        found.append((len(calls), said))
    dist.barrier()  # in a run, the rank that tokenizes trains on while others read
    return found


def runs(folder: Path) -> list[dict]:
    model = save_model(folder / "model")
    rows = save_rows(folder / "rows.jsonl")
    held_out = save_rows(folder / "held_out.jsonl", [dict(prompt="3 plus 4?", completion="7")])
    (folder / "bad.jsonl").write_text(BAD)
    given = dict(model_name=model, dataset=rows, context_length=32)
    return [
        given | dict(eval_dataset=held_out),
        given | dict(eval_share=0.3),
        given | dict(dataset=str(folder / "bad.jsonl")),
        given | dict(of_rank_1=dict(train_on="all")),
    ]


def test_one_rank_of_a_node_tokenizes_for_all(tmp_path):
    first, second = run_ranks(read_data_of_each, 2, runs(tmp_path))
    ((alone,),) = [run_ranks(read_data_of_each, 1, runs(tmp_path)[:1])]
    assert first[0] == alone[0] and first[0][0] == 2  # both data sets, as one process has them
    for run in (0, 1):
        assert second[run] == (0, first[run][1])
    assert second[2] == (0, first[2][1]) and "bad.jsonl" in first[2][1]
    assert second[3][0] > 0 and second[3][1] != first[3][1]  # rows of its own, refused later


def unique(name: str) -> str:
    return f"test-{name}-{os.getpid()}-{time.monotonic_ns()}"


def test_a_reader_waits_for_the_writer_and_does_without_one_that_ended(monkeypatch):
    monkeypatch.setattr(node_share, "_WRITER_COMES_S", patience(20))
    name, got, parent = unique("killed"), [], os.getpid()
    ready, tell = os.pipe()
    child = os.fork()
    if not child:  # a writer that never finishes
        node_share.writer_of(name)
        os.write(tell, b"1")
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    os.read(ready, 1)
    reader = threading.Thread(target=lambda: got.append(node_share.read(name, Path.read_bytes)))
    reader.start()
    time.sleep(0.3)
    assert reader.is_alive() and not got
    os.kill(child, 9)
    os.waitpid(child, 0)
    reader.join(patience(20))
    assert got == [None]
    assert name not in Path("/proc/net/unix").read_text()


def test_readers_map_what_was_written_once():
    name = unique("mapped")
    path = node_share.writer_of(name).write(lambda: b"tokens")
    assert Path(path).read_bytes() == b"tokens"
    assert os.readlink(path).startswith("/memfd:tokens")  # no file, which could outlast the run
    assert node_share.writer_of(name).write(lambda: b"others") == path
    for _ in range(2):
        assert node_share.read(name, lambda path: Path(path).read_bytes()) == b"tokens"


def test_without_a_writer_a_rank_tokenizes_for_itself(monkeypatch):
    monkeypatch.setattr(node_share, "_WRITER_COMES_S", 0.2)
    assert node_share.read(unique("nobody"), Path) is None
