"""Llama-Pro: copies of blocks that begin as doing nothing are trained, the base stays as it is.

The reference is plain transformers in one process: the base's own blocks copied in Python, the output
projections of the copies zeroed, everything else frozen, and what is quantized here replaced by the
numbers it stands for.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.distributed.test_parity import relative, train_case
from tests.ranks import run_ranks
from tests.tiny import reference_run, save_tiny, tiny_rows

STEPS = tiny_rows(steps=3, rows_per_step=4)
SHAPE = dict(num_hidden_layers=4)
NEW = (2, 5)  # of 6: after blocks 1 and 3 of the base


def expanded_reference(folder: str, **form):
    """The expanded model of transformers; `form` is a RunConfig's, for the rounding of frozen layers."""
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.quantization.quantize import QuantLinear

    config, model = (
        RunConfig(**form),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    blocks = []
    for i, block in enumerate(model.model.layers):
        blocks.append(block)
        if i % 2:
            blocks.append(copied := copy.deepcopy(block))
            nn.init.zeros_(copied.self_attn.o_proj.weight)
            nn.init.zeros_(copied.mlp.down_proj.weight)
    model.model.layers = nn.ModuleList(blocks)
    model.config.num_hidden_layers = len(blocks)
    model.requires_grad_(False)
    for i, block in enumerate(blocks):
        block.self_attn.layer_idx = i
        block.requires_grad_(i in NEW)
        for layer in block.modules():
            if isinstance(layer, nn.Linear) and i not in NEW and config.quant != "none":
                made = QuantLinear.from_linear(layer, config.quant_type, config.absmax_dtype)
                layer.weight.data = made.dequantize(torch.float32)
    return model.train()


def cases(folder: str) -> list[dict]:
    kinds = [
        dict(train_type="bnb_llama_pro"),
        dict(train_type="hqq_llama_pro"),
        dict(quant="none", adapter="llama_pro"),
    ]
    places = [
        dict(sharding_strategy="full_shard"),
        dict(sharding_strategy="ddp"),
        dict(sharding_strategy="shard_grad_op", use_gradient_checkpointing=False),
        dict(sharding_strategy="full_shard", use_cpu_offload=True, compile=False),
        dict(
            sharding_strategy="full_shard",
            backward_prefetch="backward_post",
            reentrant_checkpointing=True,
        ),
    ]
    found = [kinds[0] | place for place in places] + [kind | places[0] for kind in kinds[1:]]
    return [dict(llama_pro_blocks=2) | case for case in found] + [
        kinds[0] | dict(llama_pro_path=f"{folder}_blk_exp-4-6")
    ]


def first_logits(folder: str, **settings) -> torch.Tensor:
    """The logits of a built model before it is trained."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    model = build_model(
        RunConfig(model_name=folder, compile=False, **settings), torch.device("cpu")
    )
    return model(input_ids=torch.arange(12)[None]).logits.detach()


def trained_in(folder: str, all_cases: list[dict], save_to: str) -> tuple:
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.export import save_trained

    results = [train_case(folder, STEPS, case) for case in all_cases]
    grown = RunConfig(
        model_name=folder,
        precision="fp32",
        train_type="bnb_llama_pro",
        llama_pro_blocks=2,
        compile=False,
    )
    logits = [
        [
            first_logits(base, precision=precision, train_type=kind)
            for kind in ("bnb_llama_pro", "qlora")
        ]
        for base, precision in ((folder, "fp32"), (folder, "bf16"), (f"{folder}-nf4", "bf16"))
    ]
    model = build_model(grown, torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.01)  # as if trained
    live = model(input_ids=torch.arange(12)[None]).logits.detach()
    save_trained(model, save_to)
    return results, logits, live


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base; beside it, its expanded weights as the original script names them, and its NF4 form."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / "base", **SHAPE)
    prepared = Path(f"{folder}_blk_exp-4-6")
    prepared.mkdir()
    tensors = expanded_reference(folder, quant="none", adapter="lora").state_dict()
    save_file({k: v.contiguous() for k, v in tensors.items()}, prepared / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ).save_pretrained(f"{folder}-nf4")
    return folder


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    saved = tmp_path_factory.mktemp("out") / "model"
    return [*run_ranks(trained_in, 2, folder, cases(folder), str(saved)), saved]


def test_new_blocks_train_as_in_one_process_and_nothing_else_does(folder, ranks):
    references = {}
    for case, ours in zip(cases(folder), ranks[0][0], strict=True):
        form = {k: v for k, v in case.items() if k in ("train_type", "quant", "adapter")}
        key = tuple(form.values())
        if key not in references:
            references[key] = reference_run(expanded_reference(folder, **form), STEPS)
        losses, norms, weights = references[key]
        assert set(ours["weights"]) == set(weights) and len(weights) == 2 * 9, case
        assert relative(ours["losses"], losses) < 1e-5, case
        assert relative(ours["norms"], norms) < 1e-5, case
        apart = sum(
            ((ours["weights"][n] - w).abs() > 1e-5).sum().item() for n, w in weights.items()
        )
        assert apart < 1e-3 * sum(w.numel() for w in weights.values()), (case, apart)


def test_before_training_it_computes_what_the_base_computes(ranks):
    for grown, base in ranks[0][1]:
        assert torch.equal(grown, base)


def test_fp32_blocks_between_bf16_ones_train_as_in_one_process(folder):
    """The reference multiplies in fp32; bf16 rounds each activation by up to 2^-9."""
    (ours,), _ = run_ranks(bf16_case, 2, folder)
    losses, _, weights = reference_run(expanded_reference(folder, quant="nf4"), STEPS)
    assert relative(ours["losses"], losses) < 2**-8
    assert set(ours["weights"]) == set(weights)
    assert all(w.dtype == torch.float32 for w in ours["weights"].values())


def bf16_case(folder: str) -> list[dict]:
    return [
        train_case(
            folder,
            STEPS,
            dict(
                train_type="bnb_llama_pro",
                llama_pro_blocks=2,
                precision="bf16",
                wrap_policy="attention_mlp",
            ),
        )
    ]


def test_what_is_saved_loads_in_transformers_and_computes_what_was_trained(ranks):
    live, saved = ranks[0][2], ranks[2]
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.config.num_hidden_layers == 6 and model.dtype == torch.float32
    logits = model(input_ids=torch.arange(12)[None]).logits
    assert relative(logits, live) < 1e-5
