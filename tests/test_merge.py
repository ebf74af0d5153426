"""Merging against PEFT's own merge_and_unload in fp32, and against the live model of base + adapter."""

from __future__ import annotations

import gc
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from fsdp_qlora.choices import FORMATS
from fsdp_qlora.cli import main
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.export import ShardWriter
from fsdp_qlora.export.merge import merge_adapter

from .tiny import TARGETS, save_tiny
from .tokenizers import CHATML, save_tokenizer

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def save_gpt2(folder) -> str:
    """A tiny GPT-2, whose linear layers are Conv1D: (I, O), some of them square."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def save_adapter(base: str, folder, **settings) -> str:
    """A PEFT adapter with random values everywhere, over the base in fp32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    defaults = dict(task_type="CAUSAL_LM", r=4, lora_alpha=10, target_modules=TARGETS)
    model = get_peft_model(model, LoraConfig(**defaults | settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(folder)
    return str(folder)


def peft_merged(base: str, adapter: str, rounded_to: str = "none") -> torch.nn.Module:
    """Base and adapter merged by PEFT, in fp32."""
    if rounded_to != "none":
        return load_for_inference(
            base, adapter, rounded_to, "cpu", torch.float32
        ).merge_and_unload()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


def live_logits(base: str, adapter: str) -> torch.Tensor:
    """Logits of the model as it is used before merging: base and adapter side by side."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return PeftModel.from_pretrained(model, adapter).eval()(IDS).logits


def logits(folder) -> torch.Tensor:
    """Logits of a merged folder in plain transformers; nothing in it may be missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        return model.eval()(IDS).logits


CASES = {
    "all linears": ("llama", {}, {}),
    "rank-stabilized, ranks and alphas of their own": (
        "llama",
        {},
        dict(
            use_rslora=True,
            rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 8},
            alpha_pattern={"v_proj": 3, r"layers.0.mlp.\w+_proj": 32},
        ),
    ),
    "dora": ("mistral", {}, dict(use_dora=True)),
    "dora, rank-stabilized": ("qwen2", {}, dict(use_dora=True, use_rslora=True)),
    "head trained whole": ("llama", {}, dict(modules_to_save=["lm_head"])),
    "norms trained whole": ("qwen3", {}, dict(modules_to_save=["q_norm", "input_layernorm"])),
    "all biases": ("qwen2", {}, dict(bias="all")),
    "biases of adapted layers": ("qwen2", {}, dict(bias="lora_only", target_modules=["q_proj"])),
    "biases of B": ("qwen2", {}, dict(lora_bias=True, target_modules=["q_proj", "v_proj"])),
    "fused projections": (
        "phi3",
        dict(pad_token_id=0, eos_token_id=1),
        dict(target_modules=["qkv_proj", "o_proj", "gate_up_proj"]),
    ),
    "head adapted": ("llama", {}, dict(target_modules=["q_proj", "lm_head"])),
    "embedding adapted": ("llama", {}, dict(target_modules=["q_proj", "embed_tokens"])),
    "tied": ("llama", dict(tie_word_embeddings=True), {}),
    "tied, head adapted": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(target_modules=["q_proj", "lm_head"]),
    ),
    "tied, embedding adapted": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(target_modules=["q_proj", "embed_tokens"]),
    ),
    "tied, head trained whole": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(modules_to_save=["lm_head"]),
    ),
    "tied, embedding trained whole": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(modules_to_save=["embed_tokens"]),
    ),
    "tied, kept so": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "tied, both ends adapted as one": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    ),
    "transposed weights": ("gpt2", {}, dict(target_modules=["c_attn", "c_proj", "c_fc"])),
    "transposed weights, dora": (
        "gpt2",
        {},
        dict(target_modules=["c_attn", "c_proj"], use_dora=True),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family, sizes, settings", CASES.values(), ids=CASES)
def test_a_merged_model_has_the_logits_of_base_and_adapter(tmp_path, family, sizes, settings):
    base = (
        save_gpt2(tmp_path / "base")
        if family == "gpt2"
        else save_tiny(tmp_path / "base", family, **sizes)
    )
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    live = live_logits(base, adapter)
    exact, rounded = (
        logits(merge_adapter(base, adapter, tmp_path / dtype, dtype=dtype))
        for dtype in ("fp32", "bf16")
    )
    torch.testing.assert_close(exact, live, rtol=1e-4, atol=1e-4)
    assert (rounded - live).norm() < 0.02 * live.norm()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        assert (plain(IDS).logits - live).norm() > 0.01 * live.norm()


@pytest.mark.parametrize("settings", [{}, dict(use_dora=True)], ids=["lora", "dora"])
def test_tensors_are_those_of_peft_in_fp32_rounded_once(tmp_path, settings, monkeypatch):
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    monkeypatch.setattr(
        "fsdp_qlora.export.merge.CHUNK_BYTES", 64 * 4 * 7
    )  # chunks end in mid-tensor
    merged = load_file(merge_adapter(base, adapter, tmp_path / "merged") / "model.safetensors")
    expected = peft_merged(base, adapter).state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        ulps = (
            tensor.view(torch.int16).int() - expected[name].bfloat16().view(torch.int16).int()
        ).abs()
        assert ulps.max() <= 1 and ulps.count_nonzero() < 0.001 * ulps.numel(), name


def test_values_are_computed_in_fp32_whatever_the_base_and_adapter_are_stored_in(tmp_path):
    """A change below half a unit of the base's last bf16 place is not lost before the sum is done."""
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    save_file(
        {k: v.bfloat16() for k, v in weights.items()},
        tmp_path / "base" / "model.safetensors",
        {"format": "pt"},
    )
    folder = merge_adapter(base, adapter, tmp_path / "merged", dtype="fp32")
    merged = load_file(folder / "model.safetensors")
    expected = peft_merged(base, adapter).state_dict()
    for name in merged:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-6, atol=1e-7)


# ---- the base that an adapter was trained on (CASES 10) -------------------------------------------


@pytest.fixture(scope="module")
def qlora(tmp_path_factory):
    """(base, adapter) of a model with a tokenizer, after a short QLoRA run of train.py."""
    folder = tmp_path_factory.mktemp("qlora")
    base = save_tiny(folder / "base", vocab_size=259, initializer_range=0.1)
    save_tokenizer(base)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "say hi", "output": "hi you"}) + "\n")
    assert (
        main(
            [
                "train",
                "--model_name",
                base,
                "--dataset",
                str(rows),
                "--output_dir",
                str(folder / "output"),
                "--device",
                "cpu",
                "--precision",
                "fp32",
                "--lora_rank",
                "4",
                "--lr",
                "0.05",
                "--num_epochs",
                "8",
                "--compile",
                "false",
                "--log_to",
                "stdout",
                "--world_size",
                "1",
            ]
        )
        == 0
    )
    return base, str(folder / "output" / "adapter")


def test_a_qlora_adapter_is_merged_into_the_base_that_it_was_trained_on(qlora, tmp_path, capsys):
    base, adapter = qlora
    exact = logits(merge_adapter(base, adapter, tmp_path / "exact", dtype="fp32"))
    merged = logits(merge_adapter(base, adapter, tmp_path / "merged"))
    assert "rounded to nf4 and back" in capsys.readouterr().out
    with torch.no_grad():
        live = load_for_inference(base, adapter, "nf4", "cpu", torch.float32)(IDS).logits
        off = live_logits(base, adapter)
    torch.testing.assert_close(exact, live, rtol=1e-4, atol=1e-4)
    assert (merged - live).norm() < 0.03 * live.norm()
    assert (off - live).norm() > 5 * (merged - live).norm()  # the other base is far away


def test_scales_in_8_bits_are_repeated_too(qlora, tmp_path):
    from fsdp_qlora.quantization.quantize import QuantLinear

    base, adapter = qlora
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    run = json.loads((adapter / "fsdp_qlora.json").read_text()) | dict(absmax_dtype="int8")
    (adapter / "fsdp_qlora.json").write_text(json.dumps(run))
    folder = merge_adapter(base, adapter, tmp_path / "merged", dtype="fp32")
    merged = load_file(folder / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    up = QuantLinear.from_linear(model.model.layers[1].mlp.up_proj, "nf4", "int8")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"
    expected = up.dequantize(torch.float32) + 8 * lora[name.format("B")] @ lora[name.format("A")]
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], expected)


@pytest.mark.parametrize("quant", FORMATS)
def test_any_format_of_training_can_be_named_for_an_adapter_that_does_not_say_it(
    qlora, tmp_path, quant
):
    from fsdp_qlora.quantization.quantize import QuantLinear

    base, adapter = qlora
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    (adapter / "fsdp_qlora.json").unlink()
    assert (
        main(
            [
                "merge",
                "--model_name",
                base,
                "--adapter_folder",
                str(adapter),
                "--output_dir",
                str(tmp_path / "merged"),
                "--merge_base",
                "dequantized",
                "--base_quant",
                quant,
                "--dtype",
                "fp32",
            ]
        )
        == 0
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for _, linear in list(block.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    rounded = QuantLinear.from_linear(linear, quant).dequantize(torch.float32)
                    linear.weight.data.copy_(rounded)
    with torch.no_grad():
        live = PeftModel.from_pretrained(model, adapter)(IDS).logits
    torch.testing.assert_close(logits(tmp_path / "merged"), live, rtol=1e-4, atol=1e-4)


def test_the_original_base_is_taken_when_asked_for_and_said(qlora, tmp_path, capsys):
    base, adapter = qlora
    folder = merge_adapter(base, adapter, tmp_path / "merged", merge_base="original")
    text = capsys.readouterr().out
    assert "the original weights" in text and "trained on nf4" in text
    live = live_logits(base, adapter)
    assert (logits(folder) - live).norm() < 0.02 * live.norm()


def test_the_result_is_not_quantized_again_unless_that_is_asked_for(qlora, tmp_path, capsys):
    base, adapter = qlora
    folder = merge_adapter(base, adapter, tmp_path / "merged")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    name = "model.layers.0.mlp.down_proj.weight"
    assert len(weights[name][0, :64].unique()) > 16  # of one block in NF4 there are 16 at most
    capsys.readouterr()
    merge_adapter(base, adapter, tmp_path / "four bits", merge_format="bnb4")
    assert "rounded to nf4, unlike base and adapter" in capsys.readouterr().out


# ---- files ----------------------------------------------------------------------------------------


def test_tokenizer_template_and_generation_settings_come_along(qlora, tmp_path):
    base, adapter = qlora
    copy = shutil.copytree(base, tmp_path / "base")
    (copy / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    (copy / "pytorch_model.bin").write_bytes(b"not to be carried")
    (copy / "notes.py").write_text("raise SystemExit")
    folder = merge_adapter(str(copy), adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.temperature == 0.25 and model.dtype == torch.bfloat16
    assert not [f.name for f in folder.iterdir() if f.suffix in (".bin", ".py", ".pt")]
    assert not list(tmp_path.glob("*.partial"))


def test_large_models_are_written_in_several_files_with_an_index(tmp_path, monkeypatch):
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    whole = load_file(merge_adapter(base, adapter, tmp_path / "one") / "model.safetensors")
    monkeypatch.setattr("fsdp_qlora.export.save.SHARD_BYTES", 50_000)
    folder = merge_adapter(base, adapter, tmp_path / "many")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and max(f.stat().st_size for f in files) < 60_000
    torch.testing.assert_close({k: v for f in files for k, v in load_file(f).items()}, whole)
    live = live_logits(base, adapter)
    assert (logits(folder) - live).norm() < 0.02 * live.norm()


def anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def test_memory_is_one_file_and_one_tensor_and_not_the_model(tmp_path, monkeypatch):
    base = save_tiny(
        tmp_path / "base", hidden_size=512, intermediate_size=2048, num_hidden_layers=12
    )
    adapter = save_adapter(base, tmp_path / "adapter")
    size = (tmp_path / "base" / "model.safetensors").stat().st_size / 2**20
    gc.collect()
    seen, before = [], anonymous_mib()

    class Watched(ShardWriter):
        def add(self, name, tensor):
            super().add(name, tensor)
            seen.append(anonymous_mib() - before)

    monkeypatch.setattr("fsdp_qlora.export.merge.ShardWriter", Watched)
    monkeypatch.setattr("fsdp_qlora.export.merge.CHUNK_BYTES", 2**20)
    monkeypatch.setattr("fsdp_qlora.export.save.SHARD_BYTES", 8 * 2**20)
    merge_adapter(base, adapter, tmp_path / "merged", dtype="fp32")
    assert size > 180 and max(seen) < 0.4 * size, (size, max(seen))


def test_a_failed_merge_leaves_nothing_behind(tmp_path, monkeypatch):
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("fsdp_qlora.export.merge.write_other_files", full)
    with pytest.raises(OSError, match="No space"):
        merge_adapter(base, adapter, tmp_path / "merged")
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter"}


# ---- mistakes -------------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs `merge` with a mistake: its one line; nothing may be written."""
    base = save_tiny(tmp_path / "base", "qwen2")
    adapter = save_adapter(base, tmp_path / "adapter")

    def run(*argv, config: dict | None = None, base=base):
        path = tmp_path / "adapter" / "adapter_config.json"
        if config:
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        capsys.readouterr()
        given = dict(zip(argv[::2], argv[1::2], strict=True))
        flags = {
            "--model_name": base,
            "--adapter_folder": adapter,
            "--output_dir": str(tmp_path / "merged"),
        } | given
        assert main(["merge", *(part for flag in flags.items() for part in flag)]) == 2
        (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]
        assert not (tmp_path / "merged").exists() and not (tmp_path / "merged.partial").exists()
        return line

    run.folder = tmp_path
    return run


@pytest.mark.parametrize(
    "config, part",
    [
        (dict(use_qalora=True), "sets use_qalora"),
        (dict(layer_replication=[[0, 2]]), "layer_replication"),
        (dict(trainable_token_indices=[3]), "trainable_token_indices"),
        (dict(peft_type="LOHA"), "LOHA"),
        (dict(some_new_method={"x": 1}), "some_new_method"),
        (dict(init_lora_weights="pissa"), "pissa"),
        (dict(r=8), "rank 4"),
        (dict(use_dora=True), "lacks magnitude"),
    ],
)
def test_what_can_not_be_merged_is_refused_by_name(refused, config, part):
    line = refused(config=config)
    assert "--adapter_folder" in line and part in line


def test_an_adapter_of_another_model_is_refused_by_name(refused, tmp_path):
    other = save_tiny(tmp_path / "other", "qwen2", hidden_size=32)
    line = refused(base=other)
    assert "down_proj is for a weight of shape (64, 128), but the base's is (32, 128)" in line
    phi = save_tiny(tmp_path / "phi", "phi3", pad_token_id=0, eos_token_id=1)
    line = refused(base=phi)
    assert f"which {phi} does not have (it has model.layers.0.mlp.gate_up_proj.weight)" in line


def test_a_tensor_without_a_place_is_refused_and_never_left_out(refused):
    path = refused.folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file(weights | {"base_model.model.model.layers.0.mlp.experts.lora_C": torch.ones(2)}, path)
    assert "experts.lora_C" in refused()
    save_file(weights | {"base_model.model.model.layers.7.norm.weight": torch.ones(2)}, path)
    assert "model.layers.7.norm.weight" in refused()


def test_an_existing_folder_a_missing_one_and_a_base_that_can_not_be_had_are_refused(refused):
    assert "already exists" in refused("--output_dir", str(refused.folder / "base"))
    assert "it is a whole model" in refused("--adapter_folder", str(refused.folder / "base"))
    assert "--base_quant nf4" in refused("--merge_base", "dequantized")
    assert "does not exist" in refused(base=str(refused.folder / "absent"))


@pytest.mark.parametrize(
    "method",
    [dict(quant_method="fbgemm_fp8"), dict(quant_method="gptq", bits=3)],
)
def test_a_base_in_another_quantized_form_is_refused(refused, method):
    path = refused.folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=method)))
    assert f"quantized with {method['quant_method']}" in refused()


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(refused, monkeypatch):
    usage = shutil.disk_usage(refused.folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    line = refused()
    assert f"--output_dir {refused.folder / 'merged'}" in line and "1 kB free" in line


def test_the_base_is_the_adapters_own_if_none_is_given(tmp_path):
    base = save_tiny(tmp_path / "a base with spaces, größer")
    adapter = save_adapter(base, tmp_path / "ein Adapter ä")
    out = tmp_path / "out put é"
    assert main(["merge", adapter, "--adapter_folder", adapter, "--output_dir", str(out)]) == 0
    live = live_logits(base, adapter)
    assert (logits(out) - live).norm() < 0.02 * live.norm()
