"""A linear layer with LoRA or DoRA: PEFT's layer, ops of our own for the arithmetic.

Shapes: I inputs, O outputs, R rank.  A (R, I), B (O, R)
"""

from __future__ import annotations

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.fp8_weight_cache import forget_fp8_weight
from ..quantization.quantize import QuantLinear, compute_input, frozen_linear
from .dora import Magnitude, norms_of, turned_linear
from .dropout import SeededDropout, drop_inputs, dropout_seed
from .lora_ops import adapted_inputs, adapted_linear
from .merging import check_can_merge, merge_rows, merges_rows, unmerge_rows


class LoraLinear(PeftLinear):
    """PEFT's LoRA layer over a QuantLinear or an nn.Linear, with the fused forward.

    One active adapter over a frozen weight is fused; PEFT's own forward computes all else: several
    adapters, one for each row, biases of B, other kinds. `product_dtype` is "" for products in the
    input's dtype, or "fp8" for the frozen weight's.
    """

    product_dtype = ""
    only_gradients = (
        False  # leave the product out, for a backward that follows (memory/tiled_mlp.py)
    )
    taken = None  # what the base lacks of the adapter's first values (lora_init)
    in_shards: bool | None = (
        None  # whether apply_sharding split the base layer's weight; None before
    )
    before_merge: dict[str, Tensor] | None = None  # the base layer's own, while adapters are merged

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs,
    ):
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = False  # our models hold no weight transposed (model/conv1d.py)
        self.is_target_conv_1d_layer = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs
    ):
        """Add an adapter as PEFT does; raises ValueError for what is not computed here."""
        if self.in_shards is not None:
            raise ValueError(
                f"adapter {adapter_name!r} comes after apply_sharding, so nothing would reduce its "
                "gradients; add all adapters first"
            )
        _check_suits_layer(self.get_base_layer(), config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if config.lora_dropout:
            self.lora_dropout[adapter_name] = SeededDropout(config.lora_dropout)

    def _get_in_out_features(self, module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer):
        """Where new adapters lie, and as what: packed bytes are stored in bf16, which says nothing."""
        device, dtype = super()._get_base_layer_device_and_dtype(base_layer)
        return device, None if isinstance(base_layer, QuantLinear) else dtype

    @property
    def lora_variants(self) -> dict:
        """The kinds of LoRA that this layer computes, as PEFT asks for them."""
        kinds = super().lora_variants | {("use_dora",): Magnitude}
        if isinstance(self.get_base_layer(), QuantLinear):
            return {key: kind for key, kind in kinds.items() if _READS_WEIGHTS.isdisjoint(key)}
        return kinds

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        name = self._fused_adapter(**kwargs)
        if name is None:
            return super().forward(x, *args, **kwargs)
        x = compute_input(x)
        drop = self.lora_dropout[name]
        p = drop.p if self.training and isinstance(drop, nn.Dropout) else 0.0
        rows = x.reshape(-1, x.shape[-1])
        with_magnitude = name in self.lora_magnitude_vector and not self.disable_adapters
        y = self.turned(rows, name, p) if with_magnitude else self.adapted(rows, name, p)
        # Not a view to autograd: FSDP warns of units that return one.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    def _fused_adapter(self, adapter_names: list[str] | None = None, **_) -> str | None:
        """The only active adapter, if the fused forward computes it, also where it is off."""
        if self.merged or adapter_names is not None:
            return None
        active = self.active_adapters
        if len(active) != 1 or active[0] not in self.lora_A or self.lora_bias[active[0]]:
            return None
        kind = self.lora_variant.get(active[0])
        of_peft = kind is not None and not isinstance(kind, Magnitude)
        trained = self.get_base_layer().weight.requires_grad
        return None if of_peft or trained else active[0]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None):
        """PEFT's, also into packed weights (back to their format) and a rank's own rows.

        Every rank must call it for a sharded model. Raises ValueError for what can't be merged so.
        """
        self._forget_fp8()
        if not merges_rows(self):
            return super().merge(safe_merge, adapter_names)
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        check_can_merge(self, names)
        if names:
            merge_rows(self, names, safe_merge)

    def unmerge(self):
        """PEFT's; packed weights and a rank's own rows become what they were, to the bit."""
        self._forget_fp8()
        if not self.merged or not merges_rows(self):
            return super().unmerge()
        unmerge_rows(self)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """What PEFT's `unload` and `merge_and_unload` leave in this layer's place."""
        if self.in_shards:
            raise ValueError(
                "a sharded model can't lose its PEFT wrapper, whose forward gathers its weights; call "
                "merge_adapter() and keep the wrapper, or save the adapter and use train.py merge"
            )
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.get_base_layer()

    def enable_adapters(self, enabled: bool):
        """PEFT's; its forward would unmerge adapters that are off, but weights are gathered then."""
        if not enabled and self.merged and self.in_shards:
            raise ValueError(
                "adapters are merged into a sharded model; call unmerge_adapter() before they are "
                "turned off"
            )
        super().enable_adapters(enabled)

    def _forget_fp8(self):
        """Weights change in place, so what is kept of them in fp8 is of no use."""
        forget_fp8_weight(self.get_base_layer().weight)

    def adapted(self, rows: Tensor, name: str, p: float = 0.0, with_bias: bool = True) -> Tensor:
        """x W^T + bias + scaling (x' A^T) B^T (N, O), where x' is x with a share p dropped.

        An adapter that is off is scaled by 0 in the same ops. W unpacked by itself would be rounded from
        other numbers than with an adapter, and a reference policy would not be the policy it began as.
        """
        w = FrozenWeight.of(self.base_layer)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        seed = dropout_seed(rows, a) if p else None
        scale = 0.0 if self.disable_adapters else self.scaling[name]
        form = (*w.form, self.product_dtype)
        xa, token = adapted_inputs(rows, w.weight, w.absmax, a, b, seed, scale, p, *form)
        bias = self.base_layer.bias if with_bias else None
        trained = bias is not None and bias.requires_grad
        y = (
            token
            if self.only_gradients
            else adapted_linear(
                token,
                rows.detach(),
                xa.detach(),
                w.weight,
                w.absmax,
                None if trained else bias,
                None if p else a.detach(),
                b.detach(),
                scale,
                *form,
            )
        )
        return y + bias.to(y.dtype) if trained else y

    def turned(self, rows: Tensor, name: str, p: float) -> Tensor:
        """DoRA's output (N, O). As in PEFT, what dropout takes away goes through W alone."""
        base, a, b = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        left = drop_inputs(rows, dropout_seed(rows, a), p) if p else rows
        w, scale = FrozenWeight.of(base), self.scaling[name]
        if self.product_dtype:  # unpacks W for itself, so norms need one of their own
            norms = norms_of(base, a, b, scale, rows.dtype)
            y = self.adapted(left, name, with_bias=False)
        else:
            xa, token = adapted_inputs(
                left, w.weight, w.absmax, a, b, None, scale, 0.0, *w.form, ""
            )
            inputs = left.detach(), xa.detach(), w.weight, w.absmax, a.detach(), b.detach()
            y, norms = turned_linear(token, *inputs, scale, *w.form)
        y = y * (self.lora_magnitude_vector[name].weight / norms.detach())
        if p:
            y = y + frozen_linear(
                rows - left, w.weight, w.absmax, None, *w.form, self.product_dtype
            )
        return (y if base.bias is None else y + base.bias).to(rows.dtype)


# Kinds of LoRA that PEFT computes from a weight's own numbers, and first values that need none of them.
_READS_WEIGHTS = {"mica", "kasa_config"}
_NEEDS_NO_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")


def _check_suits_layer(base: nn.Module, config: LoraConfig):
    """Refuse what PEFT would make of numbers that are packed, or not there yet."""
    first = config.init_lora_weights
    if base.weight.is_meta and first is not True:
        raise ValueError(
            f"LoraConfig.init_lora_weights = {first!r}: on the meta device there are no weights to "
            "begin from, and PEFT's default is what adapters get; leave it out"
        )
    if isinstance(base, QuantLinear) and first not in _NEEDS_NO_WEIGHTS:
        raise ValueError(
            f"LoraConfig.init_lora_weights = {first!r} decomposes weights, which are packed here; "
            "leave it out, or use --init_lora_weights of train.py"
        )
