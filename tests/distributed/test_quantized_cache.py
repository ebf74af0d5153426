"""The quantized cache: bit-equal to none, whoever wrote it and whoever reads it; damage is mended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.loading import load_weights, rank_pieces
from fsdp_qlora.loading.quantized_cache import QuantizedCache
from fsdp_qlora.loading.weight_files import Checkpoint
from tests.parts import slow
from tests.ranks import run_ranks
from tests.tiny import save_tiny

torch.set_num_threads(1)
CPU = torch.device("cpu")


def config(folder, cache=None, **settings) -> RunConfig:
    return RunConfig(
        **dict(
            model_name=str(folder),
            precision="fp32",
            lora_rank=2,
            device="cpu",
            quantized_cache=None if cache is None else str(cache),
        )
        | settings
    )


def state_of(model) -> dict[str, torch.Tensor]:
    """The bytes of every parameter, gathered."""
    from fsdp_qlora.dist import full_tensor

    return {
        n: full_tensor(p.detach()).contiguous().view(torch.uint8).clone()
        for n, p in model.named_parameters()
    }


def built(cases) -> list[dict]:
    """Each case's (settings of a run), built one after another on these ranks."""
    return [state_of(build_model(case, CPU)) for case in cases]


def alone(folder, cache=None, **settings) -> dict:
    with process_group(CPU):
        return state_of(build_model(config(folder, cache, **settings), CPU))


def assert_same(ours: dict, theirs: dict, label=""):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours), label


def cache_files(cache: Path) -> list[str]:
    return sorted(os.listdir(cache))


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model", hidden_size=192, intermediate_size=320, head_dim=16)


class Unread(Checkpoint):
    """A checkpoint whose quantized weights may not be read."""

    def spans(self, piece):
        assert piece.module is None, f"{piece.key} was read from the checkpoint"
        return super().spans(piece)


@pytest.mark.parametrize("absmax_dtype", [slow("fp32"), "int8"])
def test_any_ranks_write_and_any_read_what_a_load_without_it_gives(folder, tmp_path, absmax_dtype):
    expected = alone(folder, absmax_dtype=absmax_dtype)
    writers = {
        2: [dict(), dict(use_cpu_offload=True)],
        3: [dict()],
        4: [dict(sharding_strategy="hybrid_full_shard"), dict(sharding_strategy="ddp")],
    }
    for world, cases in writers.items():
        caches = [tmp_path / f"{world}-{i}" for i in range(len(cases))]
        runs = [
            config(folder, cache, absmax_dtype=absmax_dtype, **case)
            for cache, case in zip(caches, cases, strict=True)
        ]
        for rank in run_ranks(built, world, [*runs, *runs]):  # the second time from the cache
            for state, run in zip(rank, [*runs, *runs], strict=True):
                assert_same(state, expected, run)
        for cache in caches:
            (name,) = cache_files(cache)
            assert name.startswith("model-") and name.endswith(".safetensors")
            assert_same(alone(folder, cache, absmax_dtype=absmax_dtype), expected, cache)
            assert len(load_file(cache / name)) == 3 * 14  # and safetensors' own reader takes it


def test_with_the_cache_no_quantized_weight_is_read_from_the_checkpoint(folder, tmp_path):
    cache, plain = tmp_path / "cache", alone(folder)
    assert_same(alone(folder, cache), plain)
    with process_group(CPU):
        model = build_model(config(folder), CPU)
        for piece in rank_pieces(model):
            piece.local.zero_()
        with QuantizedCache(cache, model, Unread(folder), CPU) as source:
            assert source.complete
            load_weights(model, source, CPU)
        assert_same(state_of(model), plain)


def flip(path: Path, at: float):
    """Change one byte at a share of the file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 64
    path.write_bytes(data)


DAMAGE = {
    "a byte early": lambda p: flip(p, 0.3),
    "a byte late": lambda p: flip(p, 0.99),
    "a hole": lambda p: p.write_bytes(
        (d := p.read_bytes())[: len(d) // 2] + b"\0" * 4096 + d[len(d) // 2 + 4096 :]
    ),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "empty": lambda p: p.write_bytes(b""),
    "another file's": lambda p: save_file({"a": torch.zeros(3)}, p),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_in_one_line_and_mended(folder, tmp_path, capfd, kind):
    cache, expected = tmp_path / "cache", alone(folder)
    alone(folder, cache)
    (name,) = cache_files(cache)
    good = (cache / name).read_bytes()
    DAMAGE[kind](cache / name)
    capfd.readouterr()
    assert_same(alone(folder, cache), expected)
    told = [line for line in capfd.readouterr().out.splitlines() if "--quantized_cache" in line]
    assert "damaged" in told[0] or "made anew" in told[0]
    assert cache_files(cache) == [name] and (cache / name).read_bytes() == good


def test_another_checkpoint_or_form_has_a_file_of_its_own(folder, tmp_path):
    cache = tmp_path / "cache"
    alone(folder, cache)
    alone(folder, cache, quant="fp4")
    alone(folder, cache, absmax_dtype="int8")
    assert len(cache_files(cache)) == 3
    path = Path(folder) / "model.safetensors"  # one tensor trained a little: same names and sizes
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.001
    save_file(weights, path, {"format": "pt"})
    assert_same(alone(folder, cache), alone(folder))
    assert len(cache_files(cache)) == 4
    (tmp_path / "elsewhere").mkdir()
    moved = Path(folder).rename(tmp_path / "elsewhere" / "model")
    alone(moved, cache)
    assert len(cache_files(cache)) == 4


def told_by(capfd) -> list[str]:
    """What was said of the cache."""
    return [line for line in capfd.readouterr().out.splitlines() if "--quantized_cache" in line]


def test_one_other_value_of_the_base_is_seen_and_an_untouched_copy_is_not_read_again(
    folder, tmp_path, capfd
):
    cache, path = tmp_path / "cache", Path(folder) / "model.safetensors"
    alone(folder, cache)
    (name,) = cache_files(cache)
    written = (cache / name).read_bytes()
    capfd.readouterr()
    path.write_bytes(path.read_bytes())  # the same bytes in a file of another time
    assert_same(alone(folder, cache), alone(folder))
    (told,) = told_by(capfd)
    assert "reading all of them" in told and (cache / name).read_bytes() != written
    assert_same(alone(folder, cache), alone(folder))
    assert not told_by(capfd)
    stat, weights = path.stat(), load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"].view(-1)[5000] += 1  # where no sample is taken
    save_file(weights, path, {"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for world in (1, 2):
        for (state,) in run_ranks(built, world, [config(folder, cache)]):
            assert_same(state, alone(folder))
    assert cache_files(cache) == [name]


def weights_hashes(cases: list[RunConfig]) -> list[str]:
    """The hash of the base that each case loads."""
    return [build_model(case, CPU).weights_hash for case in cases]


def test_a_base_has_the_same_hash_with_the_cache_and_without(folder, tmp_path):
    cases = [config(folder), *[config(folder, tmp_path / "cache")] * 2]
    found = run_ranks(weights_hashes, 2, cases) + run_ranks(weights_hashes, 1, cases)
    assert len({digest for rank in found for digest in rank}) == 1


def test_rows_and_words_of_the_cache_that_lie_elsewhere_are_damage(folder, tmp_path):
    cache, expected = tmp_path / "cache", alone(folder)
    alone(folder, cache)
    (name,) = cache_files(cache)
    tensors = load_file(cache / name)
    key = "model.layers.1.mlp.up_proj.weight"
    good = (cache / name).read_bytes()
    words = tensors[key].contiguous().view(torch.int32)
    start = good.index(words[3].numpy().tobytes())
    size = words[3].numel() * 4
    for change in ("words", "rows"):
        data = bytearray(good)
        if change == "words":
            data[start : start + 8] = good[start + 4 : start + 8] + good[start : start + 4]
        else:
            for entry in (key, f"{key}.absmax", f"{key}.row_sums"):
                rows = [
                    row.reshape(-1).view(torch.uint8).numpy().tobytes()
                    for row in tensors[entry][3:5]
                ]
                place = good.index(b"".join(rows))
                data[place : place + 2 * len(rows[0])] = rows[1] + rows[0]
        assert bytes(data) != good and size > 8
        (cache / name).write_bytes(bytes(data))
        assert_same(alone(folder, cache), expected, change)
        assert (cache / name).read_bytes() == good


def fails_to_write(folder: str, cache: str) -> dict:
    """Rank 1's disk is full while the cache is made."""
    import torch.distributed as dist

    from fsdp_qlora.loading import quantized_cache

    def full(file, tensor):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        quantized_cache._write_all = full
    return state_of(build_model(config(folder, cache), CPU))


def test_a_full_disk_costs_the_cache_and_not_the_run(folder, tmp_path):
    expected = alone(folder)
    for state in run_ranks(fails_to_write, 2, folder, str(tmp_path / "cache")):
        assert_same(state, expected)
    assert cache_files(tmp_path / "cache") == []


def test_a_failed_load_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("the checkpoint can't be read")

    monkeypatch.setattr(Checkpoint, "values", fail)
    with pytest.raises(ValueError, match="can't be read"):
        alone(folder, tmp_path / "cache")
    assert cache_files(tmp_path / "cache") == []


def test_what_a_killed_run_left_is_removed_and_what_a_live_one_writes_is_not(folder, tmp_path):
    cache = tmp_path / "cache"
    alone(folder, cache)
    (name,) = cache_files(cache)
    host, stem = os.uname().nodename, name.removesuffix(".safetensors")
    (cache / name).unlink()
    left = cache / f"{stem}.{host}-{2**22 + 1}.partial"  # above the largest process id
    live = cache / f"{stem}.{host}-{os.getppid()}.partial"
    for path in (left, live):
        path.write_bytes(b"")
    alone(folder, cache)
    assert cache_files(cache) == sorted([name, live.name])


def test_a_folder_that_is_a_file_is_refused_by_name(folder, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="--quantized_cache .*taken.*; give another folder"):
        alone(folder, tmp_path / "taken")
