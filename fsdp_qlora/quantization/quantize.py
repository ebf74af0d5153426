"""Quantized linear layers whose packed bytes are ordinary parameters, so that anything can shard them.

bitsandbytes keeps a weight's scales in a side object that sharding does not see. Here both halves
are frozen `Parameter`s with one row per output feature (`formats.py`), so FSDP shards them on dim 0
like any weight.

Shapes: O out rows, I inputs, B any leading dims.
"""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from ..choices import FORMATS, AbsmaxDtype, FormatName
from . import fp8
from .absmax import ABSMAX_DTYPES, BLOCKSIZE
from .formats import (
    FrozenWeight,
    dequantize_rows,
    empty_rows,
    quantize_rows,
)


# A frozen weight needs only dX in backward, so W is never saved: it is dequantized again. The op is
# opaque so that the partitioner of torch.compile can't decide to keep W for the backward.
@torch.library.custom_op("fsdp_qlora::frozen_linear", mutates_args=())
def frozen_linear(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """x (B, I) times a frozen weight, plus bias: (B, O) in x's dtype."""
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        y = fp8.forward_product(x.reshape(-1, in_features), w)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)
    return nn.functional.linear(x, w.dense(x.dtype), None if bias is None else bias.to(x.dtype))


@torch.library.custom_op("fsdp_qlora::frozen_linear_backward", mutates_args=())
def frozen_linear_backward(
    dy: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """dX (B, I) = dY (B, O) W."""
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        dx = fp8.backward_product([dy.reshape(-1, dy.shape[-1])], [w])
        return dx.view(*dy.shape[:-1], in_features)
    return dy @ w.dense(dy.dtype)


@frozen_linear.register_fake
def _(x, weight, absmax, bias, in_features, quant_type, product_dtype):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@frozen_linear_backward.register_fake
def _(dy, weight, absmax, in_features, quant_type, product_dtype):
    return dy.new_empty(*dy.shape[:-1], in_features)


def _save_frozen(ctx, inputs, output):
    _, weight, absmax, _, *ctx.form = inputs
    ctx.save_for_backward(weight, absmax)


def _frozen_backward(ctx, dy):
    weight, absmax = ctx.saved_tensors
    return frozen_linear_backward(dy.contiguous(), weight, absmax, *ctx.form), *[None] * 6


frozen_linear.register_autograd(_frozen_backward, setup_context=_save_frozen)


def compute_input(x: Tensor) -> Tensor:
    """x in the dtype that autocast asks for, if it is on: it does not look into opaque ops."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class QuantLinear(nn.Module):
    """A frozen linear layer in few bits: y = x W^T + bias, with W dequantized for the product.

    `product_dtype` is "" for products in the input's dtype, or "fp8".
    """

    product_dtype = ""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        quant_type: FormatName = "nf4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        absmax_dtype: AbsmaxDtype = "fp32",
    ):
        super().__init__()
        if quant_type not in FORMATS:
            raise ValueError(f"quant_type {quant_type!r}: choose {', '.join(FORMATS)}")
        if absmax_dtype not in ABSMAX_DTYPES:
            raise ValueError(f"absmax_dtype {absmax_dtype!r}: choose {' or '.join(ABSMAX_DTYPES)}")
        self.in_features, self.out_features, self.quant_type = in_features, out_features, quant_type
        self.absmax_dtype = absmax_dtype
        self.weight, self.absmax = map(
            frozen, empty_rows(out_features, in_features, quant_type, absmax_dtype, device)
        )
        self.bias = frozen(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, quant_type: str = "nf4", absmax_dtype: str = "fp32"
    ) -> QuantLinear:
        """A quantized copy of a linear layer, on its device; on meta only the shapes are made."""
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            quant_type,
            linear.weight.device,
            linear.weight.dtype,
            absmax_dtype,
        )
        if not linear.weight.is_meta:
            made.weight.data, made.absmax.data = quantize_rows(
                linear.weight.data, quant_type, absmax_dtype
            )
            if made.bias is not None:
                made.bias.data = linear.bias.data
        return made

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """The dense linear layer that this one stands for, frozen, on its device."""
        made = nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, device=torch.device("meta")
        )
        made.weight = frozen(self.dequantize(dtype))
        made.bias = None if self.bias is None else frozen(self.bias.data.to(dtype))
        return made.train(self.training)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as an (O, I) tensor."""
        return dequantize_rows(self.weight, self.absmax, self.in_features, self.quant_type, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _frozen_product(self, x)

    def _apply(self, fn, recurse=True):
        """Follow a move to another device, but keep bytes and scales through a change of dtype.

        `model.half()` or `.to(dtype)` would convert the packed bytes as if they were numbers.
        """

        def keeping_dtype(tensor):
            if tensor is self.bias:
                return fn(tensor)
            probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        return super()._apply(keeping_dtype, recurse)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, quant_type={self.quant_type}, "
            f"absmax_dtype={self.absmax_dtype}"
        )


class FrozenLinear(nn.Linear):
    """A frozen linear layer in 16 bits whose products may be in fp8: see QuantLinear.product_dtype."""

    product_dtype = ""

    def forward(self, x: Tensor) -> Tensor:
        return _frozen_product(self, x)


def _frozen_product(layer: QuantLinear | FrozenLinear, x: Tensor) -> Tensor:
    """What a frozen layer makes of x; its bias may be trained (adapters/biases.py)."""
    w, bias = FrozenWeight.of(layer), layer.bias
    trained = bias is not None and bias.requires_grad
    y = frozen_linear(
        compute_input(x),
        w.weight,
        w.absmax,
        None if trained else bias,
        *w.form,
        layer.product_dtype,
    )
    return y + bias.to(y.dtype) if trained else y


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that takes no gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def quantize_linears(
    model: nn.Module,
    quant_type: FormatName = "nf4",
    skip: tuple[str, ...] = ("lm_head",),
    absmax_dtype: AbsmaxDtype = "fp32",
    names: set[str] | None = None,
    but: tuple[str, ...] = (),
) -> nn.Module:
    """Replace every linear layer but those whose last name part is in `skip`, in place.

    With `names`, only layers of these names; none in the modules whose names are in `but`. Layers that
    the model does not simply call (`directly_read`, `is_plain_linear`) stay as they are.
    On the meta device only shapes change; a model with weights is quantized where it lies. Returns the
    model. Raises ValueError for an unknown `quant_type` (formats.py) or `absmax_dtype` (fp32, int8), and
    for a model with transformers' Conv1D layers, which `meta_model` makes ordinary ones.
    """
    if any(isinstance(m, Conv1D) for m in model.modules()):
        raise ValueError(
            "quantize_linears takes no layers that hold their weights transposed (transformers' Conv1D, "
            "in GPT-2); make the model with meta_model(config, dtype) and fill it with load_quantized"
        )
    read = directly_read(model)
    for name, module in list(model.named_modules()):
        if not is_plain_linear(module) or module in read or name.rsplit(".", 1)[-1] in skip:
            continue
        if any(name.startswith(f"{module_name}.") for module_name in but):
            continue
        if names is None or name in names:
            made = QuantLinear.from_linear(module, quant_type, absmax_dtype)
            model.set_submodule(name, made)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _refuse_to_save
    return model


def _refuse_to_save(*args, **kwargs):
    """In place of transformers' `save_pretrained`, which would write packed bytes as if they were W."""
    raise ValueError(
        "save_pretrained can't write quantized weights; save the adapter, call "
        "dequantize_linears(model) first, or make a model of 4-bit files with train.py merge "
        "--merge_format bnb4"
    )


def dequantize_linears(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Replace every quantized linear layer by the dense one that it stands for, in place.

    Adapters over them stay, so a `merge_and_unload` that follows is not rounded to the format again.
    Returns the model. Raises ValueError if it is sharded, or holds merged adapters.
    """
    for name, module in list(model.named_modules()):
        if getattr(module, "merged", False):
            raise ValueError(f"{name} has merged adapters; call unmerge_adapter() first")
        if isinstance(module, QuantLinear):
            if isinstance(module.weight, DTensor):
                raise ValueError(
                    "dequantize_linears takes a model that is not sharded; save the adapter and "
                    "merge it with merge_adapter(MODEL, FOLDER, OUTPUT)"
                )
            model.set_submodule(name, module.to_linear(dtype))
        vars(module).pop("save_pretrained", None)
    return model


# ---- layers that must stay what they are -------------------------------------------------------

_WITHOUT_GRADIENTS = re.compile(r"@torch\.no_grad(\(\))?\s+def forward\b")
_WEIGHT_OF_A_PART = re.compile(r"\bself((?:\.[a-z_]\w*)+)\.weight\b")


def directly_read(model: nn.Module) -> set[nn.Module]:
    """Linear layers whose weight the model's own code reads, instead of calling the layer.

    Mamba's kernels take `self.out_proj.weight`: packed bytes would be taken for numbers there, and an
    adapter around the layer would be left out in silence (https://github.com/huggingface/peft/pull/2562).
    """
    found = set()
    for module in model.modules():
        parts = dict(module.named_modules())
        for path in _weights_read_by(type(module)):
            if isinstance(parts.get(path), (nn.Linear, QuantLinear)):
                found.add(parts[path])
    return found


def short_blocks(model: nn.Module) -> dict[str, int]:
    """Inputs of quantized layers that are no whole blocks, by the last part of the layers' names.

    The last block of a row is shorter there; bitsandbytes' blocks run on into the next row, so that a model
    in its 4 bits has other numbers than the one that was trained.
    """
    return {
        name.removesuffix(".base_layer").rsplit(".", 1)[-1]: m.in_features
        for name, m in model.named_modules()
        if isinstance(m, QuantLinear) and m.in_features % BLOCKSIZE
    }


def without_gradients(model: nn.Module) -> set[nn.Module]:
    """Linear layers that the model's own code runs under no_grad, as an indexer of attention is.

    Adapters there would never learn.
    """
    return {
        part
        for module in model.modules()
        if _has_no_gradients(type(module))
        for part in module.modules()
        if isinstance(part, (nn.Linear, QuantLinear))
    }


def _code_of(kind: type) -> str:
    """The code of a class's own methods, with their decorators, where it is in a file.

    `inspect.getsource` of the class would parse its file, once for each of a model's classes.
    """
    found = []
    for method in vars(kind).values():
        with suppress(OSError, TypeError):
            found.append(inspect.getsource(getattr(method, "fget", method)))
    return "\n".join(found)


@cache
def _has_no_gradients(kind: type[nn.Module]) -> bool:
    """Whether a class's forward is decorated with torch.no_grad."""
    if kind.__module__.startswith("torch."):
        return False
    return bool(_WITHOUT_GRADIENTS.search(_code_of(kind)))


@cache
def _weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """The parts whose weight a class of modules reads in its code."""
    found = set()
    for owner in kind.__mro__:
        if owner.__module__.startswith("torch.") or not issubclass(owner, nn.Module):
            continue
        found |= set(_WEIGHT_OF_A_PART.findall(_code_of(owner)))
    return frozenset(path.removeprefix(".") for path in found)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` does; some routers are subclasses that choose experts."""
    return isinstance(module, nn.Linear) and _computes_a_product(type(module))


@cache
def _computes_a_product(kind: type[nn.Linear]) -> bool:
    if kind.forward is nn.Linear.forward:
        return True
    layer = nn.Linear(4, 3)
    layer.__class__ = kind
    x = torch.linspace(-1, 1, 8).view(2, 4)
    try:
        return torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    except Exception:  # noqa: BLE001  it needs more than a layer has
        return False
