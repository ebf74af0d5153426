"""Models with a language model inside, beside towers: what a run builds of them, saves, and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.export import save_trained
from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.export.merge_base import open_base
from fsdp_qlora.integrations.streamed import streamed_model
from fsdp_qlora.loading import meta_model, read_config

from .wrappers import TEXT, TOWER, WRAPPED, save_wrapped, whole_model

CPU = torch.device("cpu")
IDS = torch.randint(20, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def settings(folder, **changes) -> RunConfig:
    return RunConfig(
        **dict(model_name=str(folder), precision="fp32", device="cpu", lora_rank=2, compile=False)
        | changes
    )


def built(folder, **changes):
    with process_group(CPU):
        return build_model(settings(folder, **dict(lora_alpha=16) | changes), CPU)


def save(model, folder, quant: str):
    with process_group(CPU):
        save_trained(model, folder, settings=dict(quant=quant))


def moved(model):
    """The model with adapters that change something."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.add_(0.1)
            elif p.requires_grad and ".lora_" not in name:
                p.mul_(1.5)
    return model.eval()


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# Types whose language model can't be had by itself -> the reason.
REFUSED = {
    "cohere2_vision": (
        dict(
            text_config=TEXT | dict(model_type="cohere2", logit_scale=0.1, sliding_window=8),
            vision_config=TOWER | dict(model_type="siglip_vision_model"),
        ),
        "computes other outputs",
    ),
    "blip-2": (
        dict(
            text_config=dict(model_type="opt", hidden_size=64, num_hidden_layers=2, ffn_dim=64)
            | dict(num_attention_heads=4, word_embed_proj_dim=64, vocab_size=97),
            vision_config=TOWER,
        ),
        "can't be tested by itself",
    ),
    "paddleocr_vl": (dict(), "no class for its paddleocr_vl_text alone"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrapper_whose_language_model_differs_by_itself_is_refused_with_the_reason(
    tmp_path, kind
):
    from transformers import AutoConfig

    config, reason = REFUSED[kind]
    AutoConfig.for_model(kind, **config).save_pretrained(tmp_path)  # no weights: said before
    for read in (lambda: planned_model(settings(tmp_path), CPU), lambda: open_base(str(tmp_path))):
        with pytest.raises(ValueError, match=f"--model_name {tmp_path}: {kind} has .*") as caught:
            read()
        assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_other_trainers_and_other_heads_are_refused_a_wrapper(tmp_path):
    folder = save_wrapped(tmp_path, "gemma3")
    with pytest.raises(ValueError, match="gemma3 has a language model inside.*other names"):
        streamed_model(folder)
    with pytest.raises(ValueError, match="gemma3 has .*no AutoModelForSequenceClassification"):
        meta_model(
            read_config(folder), torch.float32, auto_class=AutoModelForSequenceClassification
        )


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_vl"])
def test_packed_rows_of_the_language_model_are_kept_apart(tmp_path, kind, capsys):
    planned_model(settings(save_wrapped(tmp_path, kind), packing=True), CPU)
    assert "not tried" not in capsys.readouterr().out


def test_a_head_of_its_own_in_the_files_is_not_tied_whatever_config_json_says(tmp_path):
    folder = save_wrapped(tmp_path, "mistral3")
    config = Path(folder) / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    whole = whole_model(folder, "mistral3").eval()
    assert whole.lm_head.weight is not whole.get_input_embeddings().weight
    model = moved(built(folder, train_type="lora"))
    save(model, tmp_path / "adapter", "none")
    with_adapter = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    same(logits_of(model), logits_of(with_adapter))
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    same(logits_of(model), logits_of(whole_model(str(merged), "mistral3").eval()))


@pytest.mark.parametrize(
    "kind, names",
    [("mistral3", "lm_head,norm"), ("qwen2_5_vl", "embed_tokens"), ("gemma3", "norm")],
)
def test_modules_trained_whole_are_those_of_the_language_model_in_plain_peft(tmp_path, kind, names):
    folder = save_wrapped(tmp_path, kind)
    model = moved(built(folder, train_type="lora", modules_to_save=names))
    save(model, tmp_path / "adapter", "none")
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert all(WRAPPED[kind].decoder in key or "lm_head" in key for key in keys)
    plain = PeftModel.from_pretrained(whole_model(folder, kind), tmp_path / "adapter").eval()
    same(logits_of(model), logits_of(plain))
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    same(logits_of(model), logits_of(whole_model(str(merged), kind).eval()))


@pytest.mark.parametrize("targets", [r"model\.layers\.1\.self_attn\.[qv]_proj", "q_proj,v_proj"])
def test_targets_and_ranks_of_any_form_are_saved_as_layers_of_the_language_model(tmp_path, targets):
    from fsdp_qlora.adapters import apply_adapters, lora_config
    from fsdp_qlora.loading import load_weights, materialize
    from fsdp_qlora.loading.key_mapping import match_names
    from fsdp_qlora.loading.weight_files import Checkpoint
    from fsdp_qlora.lora_init import init_adapters

    folder = save_wrapped(tmp_path, "mistral3")
    targets = targets if "\\" in targets else targets.split(",")
    model = meta_model(read_config(folder), torch.float32)
    files = match_names(model, Checkpoint(folder))
    ranks = {r"model\.layers\.1\..*q_proj": 4, "model.layers.1.self_attn.v_proj": 3}
    model = apply_adapters(model, lora_config(rank=2, target_modules=targets, rank_pattern=ranks))
    materialize(model, CPU, CPU)
    load_weights(model, files, CPU)
    init_adapters(model, 0, CPU)
    moved(model)
    with process_group(CPU):
        save_trained(model, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(whole_model(folder, "mistral3"), tmp_path / "adapter").eval()
    adapted = {n.partition(".lora_")[0] for n, _ in plain.named_parameters() if ".lora_" in n}
    assert len(adapted) == (2 if isinstance(targets, str) else 4)
    same(logits_of(model), logits_of(plain))


def test_generate_loads_the_whole_model_with_its_language_model_as_trained(tmp_path):
    folder = save_wrapped(tmp_path, "qwen3_vl")
    model = moved(built(folder, train_type="qlora"))
    save(model, tmp_path / "adapter", "nf4")
    loaded = load_for_inference(folder, tmp_path / "adapter", dtype=torch.float32)
    same(logits_of(model), logits_of(loaded))
    tower = whole_model(folder, "qwen3_vl").model.visual.state_dict()
    for name, tensor in loaded.get_base_model().model.visual.state_dict().items():
        assert torch.equal(tensor, tower[name]), name


def test_added_tokens_grow_the_vocabulary_of_the_text_in_a_merged_config(tmp_path):
    folder = save_wrapped(tmp_path, "gemma3")
    model = moved(built(folder, train_type="lora", added_tokens="<a>,<b>"))
    save(model, tmp_path / "adapter", "none")
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    config = read_config(str(merged))
    assert config.text_config.vocab_size == TEXT["vocab_size"] + 2
    same(logits_of(model), logits_of(whole_model(str(merged), "gemma3").eval()))


def test_a_shape_is_that_of_the_text_with_the_tie_of_the_whole():
    config = dict(model_type="qwen3_vl", tie_word_embeddings=True, vision_config=dict(depth=40))
    text = TEXT | dict(model_type="qwen3")
    shape = shape_from_config(config | dict(text_config=text))
    assert (shape.layers, shape.hidden, shape.vocab) == (2, 64, TEXT["vocab_size"])
    assert (
        shape.tied
        and not shape_from_config(
            config | dict(text_config=text | dict(tie_word_embeddings=False))
        ).tied
    )


def test_files_with_the_names_of_older_transformers_are_read_and_merged(tmp_path):
    """Published Gemma 3 has language_model.model.layers, other files model.language_model.layers."""
    folder = save_wrapped(tmp_path / "older", "gemma3")
    assert any(
        k.startswith("language_model.model.") for k in load_file(f"{folder}/model.safetensors")
    )
    newer = save_wrapped(tmp_path / "newer", "gemma3")
    state = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    state.pop("lm_head.weight")
    save_file({k: v.clone() for k, v in state.items()}, f"{newer}/model.safetensors")
    same(logits_of(built(folder).eval()), logits_of(built(newer).eval()))
    model = moved(built(newer, train_type="lora"))
    save(model, tmp_path / "adapter", "none")
    merged = merge_adapter(newer, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    same(logits_of(model), logits_of(whole_model(str(merged), "gemma3").eval()))
