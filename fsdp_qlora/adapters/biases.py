"""Trained biases beside adapters: PEFT's `bias`, which marks them and says which are saved.

They are stored in the adapters' dtype, for FSDP reduces the gradients of a unit together, and added in
the dtype of what they are added to. Linear layers of this project do that themselves.
"""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..own_forward import compute_by
from ..quantization.quantize import FrozenLinear, QuantLinear


def check_biases(model: nn.Module, kind: str):
    """Refuse to train biases of a model that has none, or of a kind that is not known here."""
    if kind == "none":
        return
    trained = {name: m for name, m in model.named_modules() if _has_trained_bias(m)}
    if not trained:
        raise ValueError(f"--bias {kind}: the model has no such biases; leave it out")
    for name, module in trained.items():
        if not isinstance(module, (nn.Linear, nn.LayerNorm, QuantLinear)):
            raise ValueError(
                f"--bias {kind}: {name} ({type(module).__name__}) has a bias "
                "that can't be trained; use --bias lora_only or none"
            )


def _has_trained_bias(module: nn.Module) -> bool:
    """Whether a module's own bias takes gradients; an adapted layer's is its base's."""
    bias = module._parameters.get("bias")
    return bias is not None and bias.requires_grad and not isinstance(module, BaseTunerLayer)


def add_biases_as_computed(model: nn.Module):
    """Let layers whose bias is stored in another dtype than their weight compute as before, in place."""
    for module in model.modules():
        if not _has_trained_bias(module) or isinstance(module, (QuantLinear, FrozenLinear)):
            continue
        if module.weight.dtype == module.bias.dtype:
            continue
        if isinstance(module, nn.Linear):
            module.__class__ = FrozenLinear
        else:
            compute_by(module, _layer_norm)


def _layer_norm(layer: nn.LayerNorm, own, x: Tensor) -> Tensor:
    """The norm of x in its weight's dtype."""
    bias = layer.bias.to(layer.weight.dtype)
    return nn.functional.layer_norm(x, layer.normalized_shape, layer.weight, bias, layer.eps)
