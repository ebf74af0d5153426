"""Every format of frozen weights trains sharded as one plain process with the weights it stands for.

The reference has ordinary linear layers that hold the dequantized values, and PEFT's LoRA.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.test_parity import relative, train_cases
from tests.ranks import run_ranks
from tests.tiny import TARGETS, reference_model, reference_run, save_tiny, tiny_rows

STEPS = tiny_rows(steps=3, rows_per_step=4)
FORMATS = [
    dict(quant="nf4", absmax_dtype="int8"),
    dict(quant="fp4"),
    dict(quant="fp4", absmax_dtype="int8"),
    dict(quant="int8"),
    dict(quant="int8", absmax_dtype="int8"),
    dict(quant="hqq"),
    dict(quant="hqq", n_bits=3),
    dict(quant="hqq", n_bits=2, absmax_dtype="int8"),
]
PLACES = [
    dict(sharding_strategy="full_shard"),
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="full_shard", use_cpu_offload=True),
]


def rounded_reference(folder: str, **form):
    """Losses, norms and weights of plain LoRA over the values that the format stands for."""
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.quantization.quantize import QuantLinear

    config = RunConfig(**form)
    model = reference_model(folder, "lora")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and any(f"{t}.base_layer" in name for t in TARGETS):
                made = QuantLinear.from_linear(module, config.quant_type, config.absmax_dtype)
                module.weight.copy_(made.dequantize(torch.float32))
    return reference_run(model, STEPS)


@pytest.mark.slow
def test_every_format_equals_one_process_with_its_values(tmp_path):
    # 3, 5 and 1 blocks a row: scales whose bytes are padded to whole words.
    folder = save_tiny(tmp_path, hidden_size=192, intermediate_size=320, head_dim=16)
    cases = [form | place for form in FORMATS for place in PLACES]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    references = [rounded_reference(folder, **form) for form in FORMATS for _ in PLACES]
    for case, result, reference in zip(cases, results, references, strict=True):
        losses, norms, weights = reference
        assert relative(result["losses"], losses) < 1e-5, case
        assert relative(result["norms"], norms) < 1e-5, case
        # AdamW moves a weight whose gradient is as good as zero by its rounding: one in thousands.
        apart = sum(
            ((result["weights"][n] - w).abs() > 1e-5).sum().item() for n, w in weights.items()
        )
        assert apart < 1e-3 * sum(w.numel() for w in weights.values()), (case, apart)


def gathered_bytes(folder: str, cases: list[dict]) -> list[dict]:
    """Every parameter's bytes, gathered, for each case."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor

    return [
        {
            n: full_tensor(p.detach()).contiguous().view(torch.uint8).clone()
            for n, p in build_model(
                RunConfig(model_name=folder, precision="fp32", lora_rank=3, **case),
                torch.device("cpu"),
            ).named_parameters()
        }
        for case in cases
    ]


def test_ranks_take_their_rows_of_a_4_bit_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = save_tiny(tmp_path / "plain", hidden_size=192, intermediate_size=320, head_dim=16)
    AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
    ).save_pretrained(tmp_path / "packed")
    cases = [dict(), dict(sharding_strategy="ddp"), dict(quant="none")]
    (whole,) = run_ranks(gathered_bytes, 1, str(tmp_path / "packed"), cases)
    for rank in run_ranks(gathered_bytes, 3, str(tmp_path / "packed"), cases):  # uneven rows
        for ours, expected in zip(rank, whole, strict=True):
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[n], expected[n]) for n in ours)
