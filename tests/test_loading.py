"""Streaming load: broken folders are refused by file name, loaded models equal plain transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.loading import (
    check_complete,
    load_weights,
    materialize,
    meta_model,
    read_config,
)
from fsdp_qlora.loading.weight_files import Checkpoint
from fsdp_qlora.quantization.formats import quantize_rows
from fsdp_qlora.quantization.quantize import QuantLinear, quantize_linears

from .tiny import CONFIGS, save_tiny

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

CPU = torch.device("cpu")
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
MODELS = {
    "llama": {},
    "llama, llama3 rope": dict(rope_parameters=LLAMA3_ROPE),
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "llama, tied": dict(tie_word_embeddings=True),
    "qwen2, tied": dict(tie_word_embeddings=True),
    "llama, ragged": dict(hidden_size=72, intermediate_size=100),
}
# 60 tokens: beyond the 32 positions from which llama3 scaling changes the frequencies.
IDS = torch.randint(0, 97, (2, 60), generator=torch.Generator().manual_seed(0))
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9976576152\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"


def settings(folder, **changes) -> RunConfig:
    return RunConfig(
        **dict(
            model_name=str(folder),
            train_type="full",
            precision="fp32",
            device="cpu",
            use_gradient_checkpointing=False,
        )
        | changes
    )


def built(folder, **changes):
    with process_group(CPU):
        return build_model(settings(folder, **changes), CPU)


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return save_tiny(tmp_path, request.param.split(",")[0], **MODELS[request.param])


@pytest.fixture
def llama(tmp_path):
    save_tiny(tmp_path)
    return tmp_path


@pytest.fixture
def sharded_llama(tmp_path):
    """The same in three files with an index."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "whole"))
    model.save_pretrained(tmp_path / "parts", max_shard_size="150KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    return tmp_path / "parts"


# ---- loaded models -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_logits_equal_plain_transformers(folder, precision, dtype):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = built(folder, precision=precision)
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("folder", ["llama", "llama, llama3 rope", "qwen3"], indirect=True)
@pytest.mark.parametrize("precision, train_type", [("fp32", "full"), ("bf16", "qlora")])
def test_rotary_frequencies_are_real_fp32_and_those_of_transformers(folder, precision, train_type):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = built(folder, precision=precision, train_type=train_type)
    got = {n.removeprefix("base_model.model."): b for n, b in model.named_buffers()}
    assert got["model.rotary_emb.inv_freq"].dtype == torch.float32
    torch.testing.assert_close(got, dict(plain.named_buffers()), rtol=0, atol=0)


def test_llama3_scaling_is_of_consequence_to_these_rows(tmp_path):
    plain = save_tiny(tmp_path / "plain")
    scaled = save_tiny(tmp_path / "scaled", **MODELS["llama, llama3 rope"])
    with torch.no_grad():
        first, second = (
            AutoModelForCausalLM.from_pretrained(f)(IDS).logits for f in (plain, scaled)
        )
    assert (first - second).abs().max() > 1e-3


def test_tied_embedding_and_head_are_one_parameter_that_is_trained(tmp_path):
    model = built(save_tiny(tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert model.lm_head.weight.requires_grad


def test_a_sharded_checkpoint_loads_as_one_file(sharded_llama):
    plain = AutoModelForCausalLM.from_pretrained(sharded_llama)
    torch.testing.assert_close(
        built(sharded_llama).state_dict(), plain.state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_4_bit_load_gives_the_bytes_of_quantizing_the_checkpoint(llama, precision):
    """From the values as stored, whatever the compute precision."""
    model, stored = built(llama, train_type="qlora", precision=precision), Checkpoint(llama)
    found = 0
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        key = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
        packed, absmax = quantize_rows(stored.rows(key, 0, stored.shapes[key][0]))
        assert torch.equal(module.weight.view(torch.uint8), packed.view(torch.uint8))
        assert torch.equal(module.absmax, absmax)
        found += 1
    assert found == 14


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_only_their_rows_and_together_all_of_them(sharded_llama, ranks, monkeypatch):
    """Each "rank" fills its rows of one model; uneven ones too."""

    def shards(rank):
        def rows(p):
            size = -(-p.shape[0] // ranks)
            start, stop = min(rank * size, p.shape[0]), min((rank + 1) * size, p.shape[0])
            return p.data[start:stop], start, stop

        return rows

    model = quantize_linears(meta_model(read_config(str(sharded_llama)), torch.float32))
    materialize(model, CPU, CPU)
    reads = []
    for rank in range(ranks):
        monkeypatch.setattr("fsdp_qlora.loading.stream.local_rows", shards(rank))
        load_weights(model, Checkpoint(sharded_llama), CPU, progress=reads.append)
    plain = AutoModelForCausalLM.from_pretrained(sharded_llama)
    assert sum(reads) == sum(p.nbytes for p in plain.parameters())
    expected = quantize_linears(plain).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_pieces_of_any_size_give_the_same_model(llama, monkeypatch):
    for settings_ in (dict(train_type="full"), dict(absmax_dtype="int8", train_type="qlora")):
        whole = built(llama, **settings_).state_dict()
        for values in (1, 200, 1000):
            monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", values)
            for name, tensor in built(llama, **settings_).state_dict().items():
                assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name
        monkeypatch.undo()


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_any_number_of_readers_gives_the_same_model(llama, workers, monkeypatch):
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", 100)
    plain = AutoModelForCausalLM.from_pretrained(llama)
    torch.testing.assert_close(
        built(llama, loading_workers=workers).state_dict(), plain.state_dict(), rtol=0, atol=0
    )


def test_a_file_that_is_cut_while_it_is_read_ends_in_a_line_that_names_it(llama):
    checkpoint = Checkpoint(llama)
    model = meta_model(read_config(str(llama)), torch.float32)
    materialize(model, CPU, CPU)
    cut_to(0.5)(llama)
    with pytest.raises(ValueError, match="model.safetensors: can't read") as caught:
        load_weights(model, checkpoint, CPU)
    assert "\n" not in str(caught.value)


def test_a_load_says_what_it_read_and_how_fast(llama, capfd):
    built(llama)
    out, err = capfd.readouterr()
    assert len([line for line in out.splitlines() if "loaded" in line and "GB/s" in line]) == 1
    assert "\r" not in err  # no bar where there is no terminal


# ---- broken folders (row 14 of docs/cases.md) ------------------------------------------------


def only_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return ["pytorch_model.bin", "convert", "safe_serialization=True"]


def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return [str(folder), "no *.safetensors file"]


def replaced_by(data: bytes):
    def replace(folder):
        (folder / "model.safetensors").write_bytes(data)
        return [str(folder / "model.safetensors"), "not a safetensors file", "download it again"]

    return replace


def cut_to(share: float):
    def cut(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        return [str(path), "download it again"]

    return cut


def padded_at_the_end(folder):
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0" * 8)
    return [str(folder / "model.safetensors"), "download it again"]


def index_of(text: str):
    def write(folder):
        (folder / "model.safetensors.index.json").write_text(text)
        return [str(folder / "model.safetensors.index.json")]

    return write


def index_names_an_absent_file(folder):
    index = dict(weight_map={"lm_head.weight": "model-00002-of-00002.safetensors"})
    return index_of(json.dumps(index))(folder) + ["model-00002-of-00002.safetensors", "missing"]


def header_of(text: bytes, data: bytes = b""):
    return replaced_by(len(text).to_bytes(8, "little") + text + data)


def unknown_type(folder):
    header_of(b'{"lm_head.weight": {"shape": [2], "dtype": "F4", "data_offsets": [0, 1]}}', b"0")(
        folder
    )
    return [str(folder / "model.safetensors"), "lm_head.weight", "F4", "give the model in bf16"]


def a_tensor_in_two_files(folder):
    save_file({"lm_head.weight": torch.zeros(97, 64)}, folder / "model-00001-of-00001.safetensors")
    return [
        "model-00001-of-00001.safetensors and model.safetensors both hold lm_head.weight",
        "keep one",
    ]


BROKEN = {
    "only .bin": only_bin,
    "no weights": no_weights,
    "empty": replaced_by(b""),
    "LFS pointer": replaced_by(LFS_POINTER),
    "HTML page": replaced_by(HTML),
    "header cut": cut_to(0.001),
    "data cut": cut_to(0.9),
    "too long": padded_at_the_end,
    "header not JSON": header_of(b"{]"),
    "header a list": header_of(b"[]"),
    "header without offsets": header_of(b'{"lm_head.weight": {"shape": [1]}}'),
    "an unknown type": unknown_type,
    "a tensor in two files": a_tensor_in_two_files,
    "header nested": header_of(b"[" * 100_000),
    "index nested": index_of("[" * 100_000),
    "index names an absent file": index_names_an_absent_file,
    "index a pointer": index_of(LFS_POINTER.decode()),
    "index a page": index_of(HTML.decode()),
    "index without a map": index_of("{}"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_refused_in_one_line_that_names_the_file(llama, fault):
    parts = BROKEN[fault](llama)
    with pytest.raises(ValueError) as caught:
        planned_model(settings(llama), CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")


def exchange(a: dict, b: dict):
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


ENTRIES = {  # what becomes of one entry of the header, and of its neighbour's
    "another's bytes": lambda a, b: a.update(data_offsets=b["data_offsets"]),
    "exchanged": exchange,
    "too short": lambda a, b: a.update(
        data_offsets=[a["data_offsets"][0], a["data_offsets"][0] + 4]
    ),
    "shifted": lambda a, b: a.update(data_offsets=[x + 4 for x in a["data_offsets"]]),
    "negative": lambda a, b: a.update(data_offsets=[-8, a["data_offsets"][1]]),
    "reversed": lambda a, b: a.update(data_offsets=a["data_offsets"][::-1]),
    "beyond the file": lambda a, b: a.update(data_offsets=[x + 2**40 for x in a["data_offsets"]]),
    "floats": lambda a, b: a.update(data_offsets=[*map(float, a["data_offsets"])]),
    "a float in the shape": lambda a, b: a.update(shape=[128.0, 64]),
    "a negative shape": lambda a, b: a.update(shape=[-128, -64]),
    "a shape beyond 64 bits": lambda a, b: a.update(shape=[2**64, 64]),
    "a smaller dtype": lambda a, b: a.update(dtype="U8"),
    "a name for a dtype": lambda a, b: a.update(dtype=None),
    "three offsets": lambda a, b: a.update(data_offsets=[*a["data_offsets"], 0]),
    "the same": lambda a, b: None,
}


@pytest.mark.parametrize("fault", ENTRIES)
def test_a_header_is_read_as_safetensors_reads_it_and_refused_where_that_refuses(llama, fault):
    path = llama / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    ENTRIES[fault](*(header[name] for name in NAMES))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    try:
        expected = load_file(path)
    except Exception:
        with pytest.raises(ValueError, match="not a whole one") as caught:
            Checkpoint(llama)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        return
    stored = Checkpoint(llama).stored
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].read(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 100_000,
        "[" * 100_000,
        '{"model_type": "llama", "hidden_size": 64.5}',
        '{"model_type": "llama", "num_hidden_layers": 1e999}',
        '{"model_type": "llama", "vocab_size": NaN}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "llama", "head_dim": -16}',
        '{"model_type": "llama", "hidden_act": [[]]}',
        '{"model_type": "llama", "rope_parameters": 1e999}',
        '{"model_type": ["llama"]}',
        '{"model_type": 1e999}',
    ],
)
def test_numbers_that_are_none_in_a_config_are_one_line(llama, text):
    (llama / "config.json").write_text(text)
    with pytest.raises(ValueError, match="--model_name") as caught:
        planned_model(settings(llama), CPU)
    assert "\n" not in str(caught.value)


def change(folder, **tensors):
    """Rewrite the checkpoint with these tensors in place of its own; None removes one."""
    path = folder / "model.safetensors"
    kept = load_file(path) | {n.replace("__", "."): t for n, t in tensors.items()}
    save_file({n: t for n, t in kept.items() if t is not None}, path)


@pytest.mark.parametrize("train_type", ["full", "qlora"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_refused_by_name(llama, train_type, name):
    change(llama, **{name: None})
    with pytest.raises(ValueError, match=f"has no tensor {name}") as caught:
        planned_model(settings(llama, train_type=train_type), CPU)
    assert str(llama) in str(caught.value)


@pytest.mark.parametrize("train_type", ["full", "qlora"])
@pytest.mark.parametrize(
    "name, shape",
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 65)),
        ("model.embed_tokens.weight", (98, 64)),
        ("model.norm.weight", (1, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(llama, train_type, name, shape):
    change(llama, **{name: torch.zeros(shape)})
    with pytest.raises(ValueError) as caught:
        planned_model(settings(llama, train_type=train_type), CPU)
    message = str(caught.value)
    assert str(llama) in message and name in message and str(shape) in message
    assert str(tuple(expected_shape(name))) in message


def expected_shape(name: str):
    """The shape that the tiny llama's config asks for."""
    model = meta_model(
        CONFIGS["llama"](
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        torch.float32,
    )
    return model.get_parameter(name).shape


def test_quantizing_or_adapting_changes_nothing_that_a_checkpoint_must_have(llama):
    for train_type in ("full", "lora", "qlora"):
        model, checkpoint = planned_model(settings(llama, train_type=train_type), CPU)
        check_complete(model, checkpoint)


@pytest.mark.parametrize(
    "name, parts",
    [
        ("./not/there", ["--model_name ./not/there", "does not exist"]),
        ("{folder}/empty", ["--model_name", "empty", "no config.json"]),
    ],
)
def test_a_folder_without_a_model_is_refused_with_the_remedy(tmp_path, name, parts):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as caught:
        read_config(name.format(folder=tmp_path))
    assert all(part in str(caught.value) for part in (*parts, "give a folder"))


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such_model"}'])
def test_a_config_that_is_no_models_is_refused_in_one_line(llama, text):
    (llama / "config.json").write_text(text)
    with pytest.raises(ValueError, match="--model_name") as caught:
        read_config(str(llama))
    assert "\n" not in str(caught.value)
