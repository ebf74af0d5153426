"""Adapters on the experts of every mixture: trained on two ranks, saved, reloaded, merged and served.

The references are transformers and PEFT in one process, on weights that 4 bits stand for, and the
rules by which vLLM reads adapters of experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.export import save_trained
from fsdp_qlora.export.merge import merge_adapter
from tests.distributed.test_parity import build_and_train, relative
from tests.families import (
    EVERY_FAMILY,
    READ,
    attention_of,
    round_others,
    rounded,
    save_family,
)
from tests.parts import in_parts
from tests.ranks import run_ranks
from tests.tiny import RANK, padded_batch, tiny_rows

STEPS = tiny_rows(steps=2, rows_per_step=4)
LAST = tiny_rows(steps=1, rows_per_step=4, seed=8)[0]
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
INPUTS = {name: SEEN[name] for name in ("input_ids", "attention_mask")}
SCALING = 8 / RANK
_PREFIX = "base_model.model."


# Llama 4's lie as (E, I, O) in a module that PEFT takes for the other kind.
COUNTS = {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}
MIXTURES = [f for f, fields in EVERY_FAMILY.items() if COUNTS & {*fields} and f != "Llama 4"]


class Recorder(torch.optim.SGD):
    """Keeps gradients, and changes nothing."""

    def step(self, closure=None):
        from fsdp_qlora.dist import full_tensor

        (group,) = self.param_groups
        self.gradients = [full_tensor(p.grad).clone() for p in group["params"]]


def train_on_ranks(folders: dict[str, str], out: str) -> dict[str, dict]:
    """What each family's run gave: losses and, after its steps, the gradients of experts' adapters."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.adapters.peft_names import saved_names
    from fsdp_qlora.training.step import train_step

    results = {}
    for family, folder in folders.items():
        case = dict(
            model_name=folder,
            train_type="qlora",
            lora_target_parameters="experts",
            sharding_strategy="full_shard",
            attn_implementation=attention_of(family) or "auto",
        )
        _, model, trained = build_and_train(case, STEPS)
        save_trained(model, f"{out}/{family}")
        names, weights = zip(*trainable_parameters(model).items(), strict=True)
        recorder = Recorder(weights, lr=0.0)
        rows = LAST[dist.get_rank() :: dist.get_world_size()]
        train_step(model, recorder, [padded_batch([row]) for row in rows])
        saved = saved_names(model)
        found = dict(zip(names, recorder.gradients, strict=True))
        trained["gradients"] = {saved[name]: g for name, g in found.items() if name in saved}
        with torch.no_grad():
            trained["logits"] = model.eval()(**INPUTS, use_cache=False).logits
        results[family] = trained
    return results


@torch.no_grad()
def base_model(folder: str, family: str) -> nn.Module:
    """The model in 32 bits with weights that 4 bits stand for, but those that its code reads itself."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_of(family)
    )
    round_others(model)
    kept = ["lm_head", *READ.get(model.config.model_type, [])]
    for name, module in model.named_modules():
        is_layer = isinstance(module, nn.Linear) and not type(module).__name__.endswith("Router")
        if is_layer and name.rsplit(".", 1)[-1] not in kept:
            module.weight.copy_(rounded(module.weight))
    return model


def logits_of(model: nn.Module) -> torch.Tensor:
    """Of the rows' own tokens (N, V)."""
    with torch.no_grad():
        return model.eval()(**INPUTS, use_cache=False).logits[INPUTS["attention_mask"].bool()]


def peft_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the last step's loss by the names of PEFT's files."""
    model.train()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    batch = padded_batch(LAST)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    (loss / (batch["labels"][:, 1:] != -100).sum()).backward()
    return {
        name.replace(".default.", "."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def each_expert(name: str, tensor: torch.Tensor, experts: int) -> torch.Tensor:
    """A (E R, I) or B (O, R E), as vLLM cuts them (vllm/lora/model_manager.py): (E, R, I) or (E, O, R)."""
    if ".lora_A." in name:
        return tensor.reshape(experts, -1, tensor.shape[-1])
    return tensor.reshape(tensor.shape[0], -1, experts).permute(2, 0, 1)


@torch.no_grad()
def served_weights(folder: str, family: str, adapter: dict[str, torch.Tensor]) -> dict:
    """What the experts' weights become where vLLM adds B A to each, by the names of parameters.

    By its rule, what is under `experts.base_layer` is gate_up_proj's (up_proj's without a gate), and
    what is under `experts` is down_proj's.
    """
    model, found = base_model(folder, family), {}
    for name, module in model.named_modules():
        stacks = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
        stacks = [n for n in stacks if n.endswith("_proj")]
        if not stacks or not name.endswith("experts"):
            continue
        for stack, place in zip(stacks, (f"{name}.base_layer", name), strict=True):
            a, b = (
                each_expert(key := f"{_PREFIX}{place}.lora_{side}.weight", adapter[key], count)
                for side in "AB"
                for count in [module.num_experts]
            )
            weight, change = getattr(module, stack), SCALING * b @ a
            if getattr(module, "is_transposed", False):
                change = change.transpose(1, 2)
            found[f"{name}.{stack}"] = weight + change
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("families", in_parts(MIXTURES, MIXTURES.index("gpt-oss"), then=(0,)))
def test_adapters_of_each_expert_train_reload_merge_and_are_what_servers_cut_out(
    families, tmp_path
):
    folders = {family: save_family(tmp_path / family, family) for family in families}
    results, others = run_ranks(train_on_ranks, 2, folders, str(tmp_path / "out"))
    for family, folder in folders.items():
        mine, path = results[family], tmp_path / "out" / family
        assert mine["checksums"] == others[family]["checksums"], family
        adapter = load_file(path / "adapter_model.safetensors")
        of_experts = {n for n in adapter if ".experts." in n}
        loaded = PeftModel.from_pretrained(base_model(folder, family), path)
        expected = mine["logits"][INPUTS["attention_mask"].bool()]
        assert relative(logits_of(loaded), expected) < 1e-4, family
        check_gradients(family, mine["gradients"], peft_gradients(loaded), of_experts)
        check_merges(family, folder, path, expected)
        merged = AutoModelForCausalLM.from_pretrained(path / "merged", dtype=torch.float32)
        parameters = dict(merged.named_parameters())
        served = served_weights(folder, family, adapter)
        assert len(served) * 2 == len(of_experts)
        for name, weight in served.items():
            assert relative(parameters[name].detach(), weight) < 1e-5, (family, name)


def check_gradients(family: str, ours: dict, theirs: dict, of_experts: set[str]):
    """Each expert's adapter has the gradient that it has in one process, and most are not zero."""
    moved = 0
    for name in of_experts:
        found, wanted = (each_expert(name, g[name], 4) for g in (ours, theirs))
        for expert, (mine, other) in enumerate(zip(found, wanted, strict=True)):
            assert (mine - other).norm() <= 1e-3 * wanted.norm(), (family, name, expert)
            moved += bool(mine.any())
    assert moved > len(of_experts) * 4 / 2, family


def check_merges(family: str, folder: str, adapter: Path, expected: torch.Tensor):
    """In 32 bits the merged model has the run's logits; in 4 bits it loads, and differs by rounding."""
    merge_adapter(folder, adapter, adapter / "merged", base_quant="nf4", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(
        adapter / "merged", dtype=torch.float32, attn_implementation=attention_of(family)
    )
    assert relative(logits_of(merged), expected) < 1e-4, family
    merge_adapter(folder, adapter, adapter / "again", base_quant="nf4", merge_format="bnb4")
    again = AutoModelForCausalLM.from_pretrained(adapter / "again", dtype=torch.bfloat16)
    assert relative(logits_of(again).float(), expected) < 0.5, family
