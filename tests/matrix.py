"""The matrix quantizer x scales x adapter x strategy: its cells, what each is compared with, the table.

    python -m tests.matrix               # every cell, into docs/matrix.json; then scripts/make_matrix.py
    python -m tests.matrix dora pissa    # only these columns again

A cell trains 3 steps on real ranks and is compared with one process of plain transformers and PEFT whose
linear layers hold the numbers that the format stands for; or RunConfig refuses it, in one line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product
from pathlib import Path

import torch
from torch import nn

from tests.families import save_family
from tests.ranks import run_ranks
from tests.tiny import CLIP, LR, RANK, SEED, TARGETS, padded_batch, save_tiny, tiny_rows

RESULTS = Path(__file__).parents[1] / "docs" / "matrix.json"
STEPS = tiny_rows(steps=3, rows_per_step=4)

QUANTIZERS = {
    "none": dict(quant="none"),
    "nf4": dict(quant="nf4"),
    "fp4": dict(quant="fp4"),
    "int8": dict(quant="int8"),
    "hqq4": dict(quant="hqq"),
    "hqq3": dict(quant="hqq", n_bits=3),
    "hqq2": dict(quant="hqq", n_bits=2),
}
SCALES = {"fp32": dict(), "int8": dict(absmax_dtype="int8")}
ADAPTERS = {
    "lora": dict(adapter="lora"),
    "rslora": dict(adapter="lora", use_rslora=True),
    "dora": dict(adapter="dora"),
    "lora+": dict(adapter="lora", loraplus_lr_ratio=4.0),
    "pissa": dict(adapter="lora", init_lora_weights="pissa"),
    "lora and head": dict(adapter="lora", modules_to_save="lm_head"),
    "lora and biases": dict(adapter="lora", bias="all"),
    "lora on experts": dict(adapter="lora", lora_target_parameters="experts"),
    "llama_pro": dict(adapter="llama_pro", llama_pro_blocks=1),
    "full": dict(adapter="none"),
}
MODELS = {"lora and biases": "qwen2", "lora on experts": "mixtral"}  # and llama
STRATEGIES = {
    "ddp": (2, dict(sharding_strategy="ddp")),
    "shard_grad_op": (2, dict(sharding_strategy="shard_grad_op")),
    "full_shard": (2, dict(sharding_strategy="full_shard")),
    "full_shard, CPU offload": (2, dict(sharding_strategy="full_shard", use_cpu_offload=True)),
    "hybrid_shard_grad_op": (4, dict(sharding_strategy="hybrid_shard_grad_op")),
    "hybrid_full_shard": (4, dict(sharding_strategy="hybrid_full_shard")),
}


@dataclass(frozen=True)
class Cell:
    """One combination, by the names of the tables above."""

    quantizer: str
    scales: str
    adapter: str
    strategy: str

    @property
    def ranks(self) -> int:
        return STRATEGIES[self.strategy][0]

    @property
    def model(self) -> tuple[str, str, str]:
        """What its reference depends on."""
        return self.quantizer, self.scales, self.adapter

    @property
    def family(self) -> str:
        """The model that it trains, a folder of `save_models`."""
        return MODELS.get(self.adapter, "llama")

    @property
    def settings(self) -> dict:
        """As RunConfig takes them."""
        return dict(
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            compile=False,
            **QUANTIZERS[self.quantizer],
            **SCALES[self.scales],
            **ADAPTERS[self.adapter],
            **STRATEGIES[self.strategy][1],
        )


def save_models(folder: str | Path) -> str:
    """A model of each family below `folder`; returns it."""
    for family in ("llama", "qwen2"):
        save_tiny(Path(folder, family), family)
    save_family(Path(folder, "mixtral"), "Mixtral")
    return str(folder)


def cells() -> list[Cell]:
    """All of them; without quantization there are no scales."""
    found = [Cell(*names) for names in product(QUANTIZERS, SCALES, ADAPTERS, STRATEGIES)]
    return [c for c in found if c.quantizer != "none" or c.scales == "fp32"]


def refusal(cell: Cell) -> str | None:
    """Why RunConfig does not take a cell, or None."""
    from fsdp_qlora.config import RunConfig

    try:
        RunConfig(**cell.settings)
    except ValueError as error:
        return str(error)


def values_of(cell: Cell, together: int) -> set[tuple]:
    """A cell's values, or its pairs of values, each with the place in the cell."""
    return set(combinations(enumerate(astuple(cell)), together))


def covering(all_cells: list[Cell], together: int) -> list[Cell]:
    """Few cells in which every value, or pair of values, occurs that occurs in any of `all_cells`."""
    found = {c: values_of(c, together) for c in all_cells}
    missing, chosen = set().union(*found.values()), []
    while missing:
        chosen.append(max(all_cells, key=lambda c: len(found[c] & missing)))
        missing -= found[chosen[-1]]
    return chosen


# ---- the cell on ranks -------------------------------------------------------------------------


def train_cells(folder: str, few: list[Cell]) -> list[dict]:
    """Each cell's losses, norms and trained weights on this world's ranks."""
    return [train_cell(folder, cell) for cell in few]


def train_cell(folder: str, cell: Cell) -> dict:
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    config = RunConfig(model_name=f"{folder}/{cell.family}", **cell.settings)
    model = build_model(config, torch.device("cpu"))
    optimizer = build_optimizer(model, "adamw", LR, 0.1, config.loraplus_lr_ratio)
    rank, world = dist.get_rank(), dist.get_world_size()
    results = [
        train_step(
            model, optimizer, [padded_batch([row]) for row in rows[rank::world]], max_grad_norm=CLIP
        )
        for rows in STEPS
    ]
    weights = {n: full_tensor(p.detach()).clone() for n, p in trainable_parameters(model).items()}
    if "experts" in cell.adapter:
        weights = as_peft_names_them(model, weights)
    return dict(
        losses=[r.loss for r in results],
        norms=[r.grad_norm for r in results],
        weights=weights if rank == 0 else None,
    )


def as_peft_names_them(model: nn.Module, weights: dict) -> dict:
    """Weights by the names of PEFT's own model."""
    from fsdp_qlora.adapters.peft_names import saved_names

    return {
        key.replace(".weight", ".default.weight"): weights[name]
        for name, key in saved_names(model).items()
    }


# ---- its reference -----------------------------------------------------------------------------


def reference(folder: str, cell: Cell) -> dict:
    """The same of one process."""
    model, optimizer = reference_model(folder, cell)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses, norms = [], []
    for rows in STEPS:
        batch = padded_batch(rows)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return dict(losses=losses, norms=norms, weights={n: p.detach() for n, p in trained.items()})


def reference_model(folder: str, cell: Cell) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A cell's model in plain transformers and PEFT, and its AdamW."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from fsdp_qlora.lora_init import initial_a
    from tests.distributed.test_experts import with_adapted_experts
    from tests.distributed.test_llama_pro import expanded_reference

    ours, folder = ADAPTERS[cell.adapter], f"{folder}/{cell.family}"
    if cell.adapter == "llama_pro":
        model = expanded_reference(
            folder,
            **{
                k: v
                for k, v in cell.settings.items()
                if k in ("quant", "n_bits", "absmax_dtype", "adapter")
            },
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if cell.adapter in ("llama_pro", "full"):
        return model, torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], LR, weight_decay=0.1
        )
    starts = ours.get("init_lora_weights", True)
    if starts is True:
        round_weights(model, cell)
    if "experts" in cell.adapter:
        model = with_adapted_experts(model, {})
    else:
        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=RANK,
                lora_alpha=8,
                target_modules=TARGETS,
                init_lora_weights=starts,
                use_dora=ours["adapter"] == "dora",
                use_rslora=ours.get("use_rslora", False),
                bias=ours.get("bias", "none"),
            ),
        )
    if starts is not True:
        round_weights(model, cell)  # what it took out is gone by now
    if "modules_to_save" in ours:
        model.get_base_model().lm_head.weight.requires_grad_()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if starts is True and "experts" not in cell.adapter:
        for name, p in trained.items():
            if ".lora_A." in name:
                p.data.copy_(initial_a(name, SEED, p.shape))
    fast = [p for n, p in trained.items() if "lora_B" in n]
    slow = [p for n, p in trained.items() if "lora_B" not in n]
    ratio = ours.get("loraplus_lr_ratio", 1.0)
    return model.train(), torch.optim.AdamW(
        [dict(params=slow), dict(params=fast, lr=LR * ratio)], LR, weight_decay=0.1
    )


@torch.no_grad()
def round_weights(model: nn.Module, cell: Cell):
    """Give every linear layer but the head, and every expert, the numbers that its format stands for."""
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.quantization.quantize import QuantLinear

    config = RunConfig(**cell.settings)
    if config.quant == "none":
        return

    def round_in_place(weight: torch.Tensor):
        layer = nn.Linear(*reversed(weight.shape), bias=False)
        layer.weight.copy_(weight)
        made = QuantLinear.from_linear(layer, config.quant_type, config.absmax_dtype)
        weight.copy_(made.dequantize(torch.float32))

    for name, p in model.named_parameters():
        if "_proj" not in name or "lora_" in name or p.dim() == 1:
            continue
        for weight in p if p.dim() == 3 else [p]:
            round_in_place(weight)


# ---- compared ----------------------------------------------------------------------------------


def deviation(cell: Cell, ours: dict, theirs: dict) -> float:
    """The largest relative difference of losses and norms; infinite if weights moved elsewhere."""
    apart = max(relative(ours[key], theirs[key]) for key in ("losses", "norms"))
    same = set(ours["weights"]) == set(theirs["weights"])
    # The signs of PiSSA's singular vectors are free, so its weights are compared by what they do.
    if not same or cell.adapter != "pissa" and not same_weights(ours["weights"], theirs["weights"]):
        return float("inf")
    return apart


def relative(ours: list[float], theirs: list[float]) -> float:
    a, b = torch.tensor(ours), torch.tensor(theirs)
    return ((a - b).norm() / b.norm()).item()


def same_weights(ours: dict, theirs: dict) -> bool:
    """AdamW moves a weight whose gradient is as good as zero by its rounding: one in thousands."""
    apart = sum(((ours[n] - w).abs() > 1e-5).sum().item() for n, w in theirs.items())
    return apart < 1e-3 * sum(w.numel() for w in theirs.values())


def outcomes(folder: str, few: list[Cell]) -> Iterator[tuple[Cell, float]]:
    """Each accepted cell with its deviation; one spawn for each number of ranks."""
    references: dict = {}
    for ranks in sorted({c.ranks for c in few}):
        group = [c for c in few if c.ranks == ranks]
        results = run_ranks(train_cells, ranks, folder, group, timeout=3600)[0]
        for cell, ours in zip(group, results, strict=True):
            if cell.model not in references:
                references[cell.model] = reference(folder, cell)
            yield cell, deviation(cell, ours, references[cell.model])


def main(columns: list[str]):
    """Run every cell, or those of some adapters, and write what came of each."""
    torch.set_num_threads(1)
    chosen = [c for c in cells() if not columns or c.adapter in columns]
    before = (
        {tuple(line["cell"]): line for line in json.loads(RESULTS.read_text())} if columns else {}
    )
    refused = {c: text for c in chosen if (text := refusal(c))}
    found = {astuple(c): dict(cell=astuple(c), refused=text) for c, text in refused.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_models(folder)
        for cell, apart in outcomes(folder, [c for c in chosen if c not in refused]):
            found[astuple(cell)] = dict(cell=astuple(cell), deviation=float(f"{apart:.1e}"))
            if apart > TOLERANCE:
                print("differs:", cell, apart, file=sys.stderr)
    lines = [(before | found)[astuple(c)] for c in cells()]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    print(f"{len(found)} cells, {len(refused)} refused: {RESULTS}")


TOLERANCE = 1e-6  # scales in 8 bits instead of fp32 make 2e-6 in so small a model

if __name__ == "__main__":
    main(sys.argv[1:])
