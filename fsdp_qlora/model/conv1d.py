"""Linear layers that keep their weight transposed, as GPT-2's do, made ordinary ones.

GPT-2's `Conv1D` holds W^T (I, O). As `nn.Linear` it is quantized, adapted and sharded by rows of W
like any other; only what reads or writes its checkpoint still has to know. Adapters are the same
tensors either way, and PEFT is told by `fan_in_fan_out`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


def apply_plain_linears(model: nn.Module) -> nn.Module:
    """Replace every Conv1D by a linear layer that computes the same, in place, also on meta.

    The names of their weights are kept in `model.transposed_weights`.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, Conv1D)}
    for name, module in found.items():
        model.set_submodule(name, _plain_linear(module))
    if found:
        model.transposed_weights = {f"{name}.weight" for name in found}
    return model


def _plain_linear(module: Conv1D) -> nn.Linear:
    """The linear layer that a Conv1D is, on its device."""
    inputs, outputs = module.weight.shape
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, device=torch.device("meta"))
    trained = module.weight.requires_grad
    linear.weight = nn.Parameter(module.weight.data.t().contiguous(), trained)
    linear.bias = module.bias
    return linear.train(module.training)


def holds_transposed(model: nn.Module) -> bool:
    """Whether files of this model hold weights as W^T; its own are too, where transformers loaded it."""
    return bool(transposed_weights(model)) or any(isinstance(m, Conv1D) for m in model.modules())


def transposed_weights(model: nn.Module) -> set[str]:
    """Names, without what PEFT puts before them, of weights that files of this model hold as W^T."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "transposed_weights", set())
