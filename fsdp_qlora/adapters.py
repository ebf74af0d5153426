"""LoRA on frozen linear layers: PEFT's bookkeeping, one op of our own for the arithmetic.

PEFT decides what an adapter is called, how it is configured and how it is saved, so that everything
written here loads in plain PEFT. Each layer keeps only its input, the rank-R product and the packed
weight; W is dequantized again in backward. LoRA is arXiv:2106.09685.

Shapes: N tokens of all rows, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R), y (N, O)
"""
from __future__ import annotations

import hashlib
import math

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from torch import Tensor, nn

from . import fp8
from .arch import DEFAULT_TARGETS
from .blocks import base_model, is_linear, linear_names, output_head
from .dist import local_rows
from .fourbit import dense_weight
from .quantize import QuantLinear, compute_input


# Two opaque ops, so that torch.compile's partitioner can't keep a dequantized W, and so that a block
# that is recomputed runs its last large product once: autograd saves a Python op's tensors when it
# has run, so the op that saves is the cheap one. What links them is a token of y's shape that takes
# no memory: its gradient is dY.
@torch.library.custom_op("fsdp_qlora::adapted_inputs", mutates_args=())
def adapted_inputs(x: Tensor, weight: Tensor, absmax: Tensor | None, a: Tensor, b: Tensor,
                   keep: Tensor | None, scaling: float, keep_scale: float, in_features: int,
                   quant_type: str, product_dtype: str) -> tuple[Tensor, Tensor]:
    """x' A^T (N, R), and a token (N, O) that carries the gradient of y to all that is saved here."""
    xa = dropped(x, keep, keep_scale) @ a.to(x.dtype).t()
    return xa, x.new_zeros(1).expand(x.shape[0], b.shape[0])


@torch.library.custom_op("fsdp_qlora::adapted_linear", mutates_args=())
def adapted_linear(token: Tensor, x: Tensor, xa: Tensor, weight: Tensor, absmax: Tensor | None,
                   bias: Tensor | None, b: Tensor, scaling: float, in_features: int,
                   quant_type: str, product_dtype: str) -> Tensor:
    """y = x W^T + bias + scaling (x' A^T) B^T, given xa = x' A^T (N, R).

    The rank-R product comes first: the large one adds to it in its epilogue, which hides the reading
    of y.
    """
    b = (b * scaling).to(x.dtype)
    if product_dtype == "fp8":
        y = fp8.forward_product(x, weight, absmax, quant_type, xa, b)
    else:
        y = xa @ b.t()
        y.addmm_(x, dense_weight(weight, absmax, in_features, quant_type, x.dtype).t())
    return y if bias is None else y.add_(bias)


@torch.library.custom_op("fsdp_qlora::adapted_linear_backward", mutates_args=())
def adapted_linear_backward(dy: Tensor, x: Tensor, xa: Tensor, weight: Tensor,
                            absmax: Tensor | None, a: Tensor, b: Tensor, keep: Tensor | None,
                            scaling: float, keep_scale: float, in_features: int, quant_type: str,
                            product_dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """dX (N, I), dA (R, I) and dB (O, R); the gradients of A and B are summed in their own dtype."""
    dtype, form = dy.dtype, (in_features, quant_type)
    dxa = dy @ (b * scaling).to(dtype)
    db = product(dy.t(), xa, b.dtype) * scaling
    da = product(dxa.t(), dropped(x, keep, keep_scale), a.dtype)
    a = a.to(dtype)
    if product_dtype == "fp8" and keep is None:
        return fp8.backward_product(dy, weight, absmax, *form, dxa, a.t()), da, db
    dx = dropped(dxa @ a, keep, keep_scale)
    if product_dtype == "fp8": dx += fp8.backward_product(dy, weight, absmax, *form)
    else: dx.addmm_(dy, dense_weight(weight, absmax, *form, dtype))
    return dx, da, db


def dropped(x: Tensor, keep: Tensor | None, keep_scale: float) -> Tensor:
    """x with the elements outside `keep` set to zero and the rest scaled up."""
    return x if keep is None else x * keep * keep_scale


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrix product in the operands' dtype whose sums stay in `dtype` where the device can."""
    if left.dtype == dtype: return left @ right
    if left.is_cuda: return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


@adapted_inputs.register_fake
def _(x, weight, absmax, a, b, keep, scaling, keep_scale, in_features, quant_type, product_dtype):
    n = x.shape[0]
    return x.new_empty(n, a.shape[0]), x.new_empty(1).expand(n, b.shape[0])


@adapted_linear.register_fake
def _(token, x, xa, weight, absmax, bias, b, scaling, in_features, quant_type, product_dtype):
    return x.new_empty(token.shape)


@adapted_linear_backward.register_fake
def _(dy, x, xa, weight, absmax, a, b, keep, scaling, keep_scale, in_features, quant_type,
      product_dtype):
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


def _save_inputs(ctx, inputs, output):
    x, weight, absmax, a, b, keep, *ctx.constants = inputs
    ctx.save_for_backward(x, output[0], weight, absmax, a, b, keep)


def _inputs_backward(ctx, _, dy):
    dx, da, db = adapted_linear_backward(dy.contiguous(), *ctx.saved_tensors, *ctx.constants)
    return dx, None, None, da, db, *[None] * 6


def _token_backward(ctx, dy):
    return dy, *[None] * 10


adapted_inputs.register_autograd(_inputs_backward, setup_context=_save_inputs)
adapted_linear.register_autograd(_token_backward)


class LoraLinear(nn.Module, LoraLayer):
    """PEFT's LoRA layer over a QuantLinear or a frozen nn.Linear, with the fused forward.

    `product_dtype` is "" for products in the input's dtype, or "fp8" for the frozen weight's.
    """

    product_dtype = ""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int = 0,
                 lora_alpha: int = 1, **kwargs):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if self.disable_adapters: return self.base_layer(x)
        x = compute_input(x)
        (name,) = self.active_adapters
        base = self.base_layer
        drop = self.lora_dropout[name]
        p = drop.p if self.training and isinstance(drop, nn.Dropout) else 0.0
        rows = x.reshape(-1, x.shape[-1])
        keep = torch.empty_like(rows, dtype=torch.bool).bernoulli_(1 - p) if p else None
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        absmax, quant_type = getattr(base, "absmax", None), getattr(base, "quant_type", "")
        scale, form = self.scaling[name], (base.in_features, quant_type, self.product_dtype)
        xa, token = adapted_inputs(rows, base.weight, absmax, a, b, keep, scale, 1 / (1 - p), *form)
        y = adapted_linear(token, rows.detach(), xa.detach(), base.weight, absmax, base.bias,
                           b.detach(), scale, *form)
        # Not a view to autograd: FSDP warns of units that return one.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def lora_config(*, rank: int = 64, alpha: int = 16, dropout: float = 0.0,
                target_modules: str | list[str] | None = "all-linear") -> LoraConfig:
    """A PEFT LoRA configuration for causal language models."""
    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=dropout,
                      target_modules=target_modules)


def apply_adapters(model: nn.Module, config: LoraConfig, dtype: torch.dtype = torch.float32
                   ) -> PeftModel:
    """Freeze the model and inject LoRA layers; adapters are stored in `dtype`.

    Works on the meta device (values come later, `init_adapters`) and on a loaded model. Raises
    ValueError, listing the candidates, if a target module does not exist.
    """
    config.target_modules = resolve_targets(model, config.target_modules)
    config._register_custom_module({QuantLinear: LoraLinear, nn.Linear: LoraLinear})
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False,
                                low_cpu_mem_usage=next(model.parameters()).is_meta)
    for p in trainable_parameters(peft_model).values(): p.data = p.data.to(dtype)
    return peft_model


def resolve_targets(model: nn.Module, targets) -> set[str] | list[str] | None:
    """Module names to adapt; "all-linear" is every linear layer but the head.

    Raises ValueError with the names that exist, if one is not found.
    """
    found = linear_names(model)
    if targets == "all-linear": return set(found)
    if targets is None: targets = default_targets(base_model(model).config.model_type, found)
    if targets is None or isinstance(targets, str): return targets
    head = output_head(model)
    linears = [name for name, m in model.named_modules() if is_linear(m)]
    known = set(found) | {name for name, m in model.named_modules() if m is head}
    missing = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in linears)]
    if missing:
        raise ValueError(f"--lora_target_modules {','.join(missing)}: no such linear layer; this "
                         f"model has {', '.join(sorted(known))}")
    return targets


def default_targets(family: str, found) -> list[str] | None:
    """Names for a family that PEFT has no choice for; None leaves the choice to PEFT.

    Raises ValueError, listing the candidates, if there is none here either.
    """
    if family in PEFT_TARGETS: return None
    if family in DEFAULT_TARGETS: return list(DEFAULT_TARGETS[family])
    raise ValueError(f"--lora_target_modules default: PEFT has no choice for {family}; give "
                     f"all-linear or some of {', '.join(found)}")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_counts(model: nn.Module) -> dict[str, int]:
    """How many layers of each name are adapted, as printed at the start."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            key = name.rsplit(".", 1)[-1]
            counts[key] = counts.get(key, 0) + 1
    return counts


def init_adapters(model: nn.Module, seed: int) -> None:
    """Give every adapter its values after loading: A uniform as PEFT, B zero.

    The values come from a seed per parameter name, so every sharding and world size starts equal.
    """
    for name, parameter in trainable_parameters(model).items():
        local, start, stop = local_rows(parameter)
        with torch.no_grad():
            if ".lora_B." in name: local.zero_()
            elif ".lora_A." in name:
                local.copy_(initial_a(name, seed, parameter.shape)[start:stop])


def initial_a(name: str, seed: int, shape) -> Tensor:
    """PEFT's initial A: kaiming uniform with a = sqrt(5), which is U(-1/sqrt(I), 1/sqrt(I))."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def apply_fp8(model: nn.Module, device: torch.device) -> int:
    """Let frozen weights be multiplied in fp8, in place; returns the number of such layers.

    Trained weights, the head and layers of a shape that does not suit stay in 16 bits. Raises
    ValueError, naming the flag, where the device has no fp8 arithmetic.
    """
    problem = fp8.fp8_problem(device)
    if problem: raise ValueError(f"--compute_dtype fp8: {problem}; use --compute_dtype bf16")
    layers = [m for m in model.modules() if isinstance(m, (LoraLinear, QuantLinear))
              and fp8.fits_fp8(m.in_features, m.out_features)]
    for layer in layers: layer.product_dtype = "fp8"
    return len(layers)
