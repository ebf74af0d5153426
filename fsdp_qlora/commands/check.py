"""`fsdp-qlora check`: what of a model works here, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..adapters.targets import left_out
from ..catalog.families import TESTED_TYPES
from ..experts import StackedExperts, adaptable_stacks, check_quantizable
from ..loading import meta_model
from ..loading.model_folder import read_config
from ..loading.prequantized import check_kind, kind_of, quantization_of
from ..model.attention import choose_attention
from ..model.blocks import decoder_blocks, has_experts, linear_names
from ..model.packing_probe import keep_rows_apart
from ..quantization.quantize import directly_read, is_plain_linear
from ..type_probe import why_untried


def print_answers(model_name: str, revision: str | None = None, trust_remote_code: bool = False):
    """Print what works with a model, a topic a line. Raises ValueError if it can't be trained."""
    source = dict(revision=revision, trust_remote_code=trust_remote_code)
    for topic, answer in _answers(model_name, source):
        print(f"{topic + ':':<14}{answer}", flush=True)


def _answers(model_name: str, source: dict) -> Iterator[tuple[str, str]]:
    """(topic, answer) of each question. Raises ValueError for a model that can't be trained."""
    settings = read_config(model_name, **source)
    check_kind(quantization_of(settings), model_name)
    used, _ = choose_attention("auto", False, settings, torch.device("cpu"), torch.float32)
    model = meta_model(settings, torch.float32, used, **source)
    model.config._name_or_path = model_name
    untried = why_untried(model)
    tested = settings.model_type in TESTED_TYPES
    tried = f"not tested: {untried}" if untried else "tried on a small model: trains"
    yield "type", f"{settings.model_type}, {'tested' if tested else tried}"
    yield "blocks", str(len(decoder_blocks(model)))
    left = left_out(model)
    adapted = {name: count for name, count in linear_names(model).items() if name not in left}
    yield "all-linear", ", ".join(f"{name} x{count}" for name, count in adapted.items())
    if left:
        yield "not adapted", ", ".join(f"{name} ({why})" for name, why in left.items())
    yield "4 bits", _refusal(check_quantizable, model, "nf4") or "yes"
    yield "in 16 bits", ", ".join(_in_16_bits(model)) or "norms and embeddings alone"
    yield "experts", _of_experts(model)
    yield "packing", _refusal(_pack, model) or "yes, rows are kept apart"
    if kind := kind_of(quantization_of(settings)):
        yield "its files", f"quantized with {kind}"


def _of_experts(model: nn.Module) -> str:
    """Whether there are experts, and what can be done with them."""
    if not has_experts(model):
        return "none"
    if not adaptable_stacks(model):
        return "frozen, as PEFT can't adapt them"
    return "frozen, or adapted by --lora_target_parameters experts"


def _pack(model: nn.Module):
    keep_rows_apart(model)


def _refusal(check, *arguments) -> str:
    """Why a check refuses; empty if it does not."""
    try:
        check(*arguments)
    except ValueError as error:
        return f"no: {error}"
    return ""


def _in_16_bits(model: nn.Module) -> list[str]:
    """Layers with a matrix of their own that is not quantized, by the last parts of their names."""
    read = directly_read(model)
    names = [
        name.rsplit(".", 1)[-1]
        for name, m in model.named_modules()
        if any(p.dim() > 1 for p in m.parameters(recurse=False))
        and (m in read or not is_plain_linear(m))
        and not isinstance(
            m, (nn.Embedding, StackedExperts)
        )  # which have biases beside their stacks
    ]
    head = {"lm_head"} if model.get_output_embeddings() is not None else set()
    return list(dict.fromkeys(name for name in names if name not in head))
