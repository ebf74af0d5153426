"""Language models inside of others on two ranks equal plain transformers and PEFT on the whole model.

Of each: logits after the streamed load, losses, gradient norms and adapters of three steps; then the
saved adapter in plain PEFT on the plain model, a merge and a full save. All types share a spawn.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from safetensors.torch import load_file

from fsdp_qlora.export.merge import merge_adapter
from tests.distributed.test_parity import assert_equal_run, relative, train_model
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, reference_run, tiny_rows
from tests.wrappers import WRAPPED, save_wrapped, whole_model

STEPS = tiny_rows(steps=3, rows_per_step=4)
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
INPUTS = dict(input_ids=SEEN["input_ids"], attention_mask=SEEN["attention_mask"])
FULL = ("gemma3", "llama4", "qwen3_vl")  # are saved whole too
QUICK = ("gemma3",)
MORE = tuple(kind for kind in WRAPPED if kind not in QUICK)
EACH = pytest.mark.parametrize("kind", [*QUICK, *map(rest, MORE)])


def train_wrapped(folders: dict[str, str], out: str) -> dict:
    """(type, train_type) -> logits at load and what training gave; weights are saved below `out`."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.export import save_trained

    results = {}
    for kind, train_type in [
        *((k, "qlora") for k in folders),
        *((k, "full") for k in FULL if k in folders),
    ]:
        config = RunConfig(
            model_name=folders[kind],
            train_type=train_type,
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            sharding_strategy="full_shard",
        )
        model = build_model(config, torch.device("cpu"))
        with torch.no_grad():
            logits = model(**INPUTS).logits
        results[kind, train_type] = dict(logits=logits) | train_model(model, STEPS)
        with torch.no_grad():
            results[kind, train_type]["trained"] = model(**INPUTS).logits
        save_trained(model, f"{out}/{kind}-{train_type}", settings=dict(quant=config.quant))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_wrapped(tmp_path_factory.mktemp(kind), kind) for kind in WRAPPED}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """Of a type: what rank 0 gave, and where weights were saved. The quick types share a spawn."""

    @cache
    def trained_together(kinds: tuple[str, ...]):
        out = tmp_path_factory.mktemp("saved")
        return run_ranks(train_wrapped, 2, {k: folders[k] for k in kinds}, str(out))[0], out

    return lambda kind: trained_together(QUICK if kind in QUICK else MORE)


@torch.no_grad()
def rounded(folder: str, kind: str):
    """The plain model, with linear weights of its language model as bitsandbytes' NF4 has them."""
    model = whole_model(folder, kind).eval()
    for name, module in model.get_submodule(WRAPPED[kind].decoder).named_modules():
        if isinstance(module, torch.nn.Linear) and "router" not in name:
            w = module.weight
            w.copy_(dequantize_4bit(*quantize_4bit(w.data, quant_type="nf4")))
    return model


def with_adapters(model, kind: str):
    """The plain model under PEFT, whose adapters begin as those of the run."""
    from peft import LoraConfig, get_peft_model

    from fsdp_qlora.lora_init import initial_a

    names = [
        name
        for name, m in model.named_modules()
        if name.startswith(WRAPPED[kind].decoder) and isinstance(m, torch.nn.Linear)
    ]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=8, target_modules=names)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.copy_(initial_a(in_language_model(name, kind), SEED, p.shape))
    return model


def in_language_model(name: str, kind: str) -> str:
    prefix = "base_model.model."
    return prefix + WRAPPED[kind].inner(name.removeprefix(prefix))


@EACH
def test_training_equals_peft_on_the_whole_model_in_one_process(folders, trained, kind):
    ours = trained(kind)[0][kind, "qlora"]
    model = rounded(folders[kind], kind)
    with torch.no_grad():
        assert relative(ours["logits"], model(**INPUTS).logits) < 1e-5
    losses, norms, weights = reference_run(with_adapters(model, kind), STEPS)
    weights = {in_language_model(name, kind): w for name, w in weights.items()}
    assert_equal_run(ours, (losses, norms, weights), 2e-5, kind)


@EACH
def test_the_saved_adapter_loads_in_plain_peft_on_the_whole_model(folders, trained, kind, recwarn):
    results, out = trained(kind)
    adapter = out / f"{kind}-qlora"
    assert all(
        key.startswith(f"base_model.model.{WRAPPED[kind].decoder}.")
        for key in load_file(adapter / "adapter_model.safetensors")
    )
    model = PeftModel.from_pretrained(rounded(folders[kind], kind), adapter).eval()
    assert not [w for w in recwarn if "missing" in str(w.message)]
    adapted = {n.partition(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n}
    assert len(adapted) == 14 and all(WRAPPED[kind].decoder in name for name in adapted)
    with torch.no_grad():
        logits = model(**INPUTS).logits
    assert relative(results[kind, "qlora"]["trained"], logits) < 1e-5


def assert_whole(folder: Path, base: str, kind: str, logits: torch.Tensor):
    """A folder loads as the plain model with all its tensors, towers as in the base, and these logits."""
    model, info = whole_model(str(folder), kind, output_loading_info=True)
    assert not any(info.values()), info
    inside = (f"{WRAPPED[kind].decoder}.", WRAPPED[kind].head)
    theirs = whole_model(base, kind).state_dict()
    towers = {n: t for n, t in theirs.items() if not n.startswith(inside)}
    assert towers
    for name, tensor in towers.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with torch.no_grad():
        assert relative(logits, model.eval()(**INPUTS).logits) < 1e-5
    assert (folder / "preprocessor_config.json").is_file()


@EACH
def test_a_merge_is_the_whole_model_with_its_towers_unchanged(folders, trained, kind, tmp_path):
    results, out = trained(kind)
    merged = merge_adapter(folders[kind], out / f"{kind}-qlora", tmp_path / "merged", dtype="fp32")
    base = load_file(Path(folders[kind]) / "model.safetensors")
    assert load_file(merged / "model.safetensors").keys() == base.keys()
    assert_whole(merged, folders[kind], kind, results[kind, "qlora"]["trained"])


@pytest.mark.parametrize("kind", [k if k in QUICK else rest(k) for k in FULL])
def test_a_full_save_is_the_whole_model_with_its_towers_unchanged(folders, trained, kind):
    results, out = trained(kind)
    assert_whole(out / f"{kind}-full", folders[kind], kind, results[kind, "full"]["trained"])
