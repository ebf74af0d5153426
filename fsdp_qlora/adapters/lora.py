"""LoRA and DoRA on frozen linear layers: PEFT's bookkeeping, ops of our own for the arithmetic.

PEFT decides what an adapter is called, how it is configured and how it is saved, so that everything
written here loads in plain PEFT; `lora_ops` and `dora` compute. LoRA is arXiv:2106.09685.

Shapes: I inputs, O outputs, R rank.  A (R, I), B (O, R)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn

from ..catalog.families import DEFAULT_TARGETS
from ..config.settings import default_of
from ..experts import adapt_experts, expert_parameters, stacked_weights, target_ends
from ..model.blocks import (
    base_model,
    block_list,
    has_experts,
    linear_layers,
    linear_names,
    output_head,
)
from ..model.conv1d import holds_transposed
from ..quantization.formats import FrozenWeight
from ..quantization.fp8_weight_cache import forget_fp8_weight
from ..quantization.quantize import (
    QuantLinear,
    compute_input,
    directly_read,
    frozen_linear,
    without_gradients,
)
from .biases import add_biases_as_computed, check_biases
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


def lora_config(
    *,
    rank: int = 64,
    alpha: int = 16,
    dropout: float = 0.0,
    target_modules: str | list[str] | None = "all-linear",
    **more: Any,
) -> LoraConfig:
    """A PEFT LoRA configuration for causal language models; `more` is PEFT's, such as use_dora.

    The adapter's output is scaled by alpha / rank. dropout: share of its input. target_modules:
    "all-linear" is every linear layer but the head, None is PEFT's choice.
    """
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        **more,
    )


def apply_adapters(
    model: nn.Module, config: LoraConfig, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """Freeze the model and inject LoRA layers; adapters are stored in `dtype`.

    `config.target_parameters` names those of experts, or is ["experts"] for all of them.
    Works on the meta device (values come later, `init_adapters`) and on a loaded model. Raises
    ValueError, listing the candidates, if a target module or parameter does not exist, and for what
    PEFT's configuration can ask for and these layers don't compute.
    """
    _check_options(config)
    _check_suits(model, config)
    left = left_out(model) if config.target_modules == "all-linear" else {}
    config.target_modules = resolve_targets(model, config.target_modules)
    targets, blocks = config.target_parameters, config.layers_to_transform
    within = tuple(f"{block_list(model)[0]}.{i}." for i in blocks or ())
    experts = expert_parameters(base_model(model), targets, within)
    ends = target_ends(targets, experts)
    config.target_parameters = None  # PEFT would look for parameters of that name now
    _check_patterns(model, config, experts)
    if holds_transposed(model):
        config.fan_in_fan_out = True  # as PEFT calls it where it loads this
    config._register_custom_module({QuantLinear: LoraLinear, nn.Linear: LoraLinear})
    on_meta, excluded = next(model.parameters()).is_meta, config.exclude_modules
    config.exclude_modules = _but_experts(model, excluded)
    with warnings.catch_warnings():  # patterns are checked, and PEFT does not see those of experts
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
        peft_model = get_peft_model(
            model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=on_meta
        )
    config.exclude_modules = excluded
    with torch.device("meta") if on_meta else nullcontext():
        adapt_experts(peft_model, experts, config)
    config.target_parameters = ([*experts] if blocks else ends) if experts else None
    check_biases(peft_model, config.bias)
    for p in trainable_parameters(peft_model).values():
        p.data = p.data.to(dtype)
    if config.use_dora:
        _measure_magnitudes_again(peft_model)
    add_biases_as_computed(peft_model)
    peft_model.left_out = left
    return peft_model


def _measure_magnitudes_again(model: PeftModel):
    """Norms in the adapters' dtype: PEFT took them when A and B still had the model's."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            for name in layer.lora_magnitude_vector:
                Magnitude.init(layer, name)


# Fields of a LoraConfig that are followed here, and those that change nothing in training.
_FOLLOWED = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "lora_bias",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "init_lora_weights",
    "fan_in_fan_out",
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
}
_OTHER_WAYS = {
    "modules_to_save": "call adapters.modules_to_save.apply_modules_to_save after it",
    "trainable_token_indices": "train all embeddings, with adapters.modules_to_save",
}


def _check_options(config: LoraConfig, but: Iterable[str] = ()):
    """Refuse what PEFT's own layers would compute and these would silently leave out.

    `but` names options that PEFT follows by itself, beside the layers.
    """
    for f in fields(config):
        given = getattr(config, f.name)
        if f.name in (*_FOLLOWED, *but) or not given or given == default_of(f):
            continue
        raise ValueError(
            f"LoraConfig.{f.name} = {given!r} is not computed here; "
            f"{_OTHER_WAYS.get(f.name, 'leave it out')}"
        )


def _check_suits(model: nn.Module, config: LoraConfig):
    """Refuse options that this model gives no meaning."""
    if config.fan_in_fan_out and not holds_transposed(model):
        raise ValueError(
            "LoraConfig.fan_in_fan_out = True is for weights that lie transposed, and this "
            "model has none; leave it out"
        )
    if next(model.parameters()).is_meta and config.init_lora_weights is not True:
        raise ValueError(
            f"LoraConfig.init_lora_weights = {config.init_lora_weights!r}: on the meta "
            "device there are no weights to begin from, and init_adapters gives PEFT's "
            "default; leave it out, or load the model first"
        )


def _but_experts(model: nn.Module, excluded: str | list[str] | None) -> str | list[str] | None:
    """PEFT's `exclude_modules` with stacked experts: a layer beside them may be called as they are."""
    names = [weight.removesuffix(".weight") for weight in stacked_weights(model)]
    if not names:
        return excluded
    if isinstance(excluded, str):
        return "|".join([f"({excluded})", *map(re.escape, names)])
    return [*(excluded or ()), *names]


def _check_patterns(model: nn.Module, config: LoraConfig, experts: Iterable[str] = ()):
    """Refuse a rank or alpha for what is not adapted: PEFT only warns, or says nothing."""
    targets = config.target_modules
    if targets is None:
        targets = PEFT_TARGETS[base_model(model).config.model_type]
    if isinstance(targets, str):
        return
    adapted = [
        name
        for name in linear_layers(model)
        if any(name == t or name.endswith(f".{t}") for t in targets)
    ] + [*experts]
    for flag in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, flag):
            if any(re.fullmatch(rf"(.*\.)?({key})", name) for name in adapted):
                continue
            found = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in adapted))
            raise ValueError(
                f"--lora_{flag} {key}: no adapted layer of that name; there are {found}"
            )


def resolve_targets(model: nn.Module, targets) -> set[str] | list[str] | str | None:
    """Module names to adapt; "all-linear" is every linear layer but the head.

    Raises ValueError with the names that exist, if one is not found.
    """
    found = linear_names(model)
    taken = taken_for_experts(model, found)
    if targets == "all-linear":
        return found.keys() - taken
    if targets is None:
        targets = _default_targets(base_model(model).config.model_type, found)
    if targets is None or isinstance(targets, str):
        return targets
    if lost := sorted(taken_for_experts(model, targets)):
        raise ValueError(
            f"--lora_target_modules {','.join(lost)}: in {base_model(model).config.model_type}, PEFT "
            "takes this for the experts' weights; leave it out, or adapt the experts: "
            "--lora_target_parameters experts"
        )
    head = output_head(model)
    linears = linear_layers(model)
    known = set(found) | {name for name, m in model.named_modules() if m is head}
    missing = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in linears)]
    if missing:
        frozen = "; for its experts see --lora_target_parameters" if has_experts(model) else ""
        raise ValueError(
            f"--lora_target_modules {','.join(missing)}: no such linear layer; this "
            f"model has {', '.join(sorted(known))}{frozen}"
        )
    return targets


def taken_for_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of layers that PEFT takes for the experts' weights, where older files had such layers.

    In some mixtures it reads `gate_proj` as `experts.gate_up_proj`, also where a dense MLP or a shared
    expert is called so: adapters of these would not load
    (https://github.com/huggingface/peft/pull/3083).
    """
    fused = ["gate_proj", "up_proj", "w1", "w3"]  # PEFT wants both of a pair, or refuses one
    asked = LoraConfig(target_modules=[*names, *fused])
    convert_peft_config_for_transformers(asked, model=base_model(model), conversions=None)
    return {*names} - set(asked.target_modules)


def left_out(model: nn.Module) -> dict[str, str]:
    """Names of linear layers that all-linear leaves out, each with the reason; the head is none of them."""
    found = linear_names(model)
    names = {m: name for name, m in model.named_modules()}

    def last_parts(layers: set[nn.Module]) -> list[str]:
        return sorted({names[m].rsplit(".", 1)[-1] for m in layers if m is not output_head(model)})

    return (
        dict.fromkeys(last_parts(without_gradients(model)), "the model runs it without gradients")
        | dict.fromkeys(last_parts(directly_read(model)), "the model's code reads its weight")
        | dict.fromkeys(
            sorted(taken_for_experts(model, found)), "PEFT takes its name for the experts'"
        )
    )


def _default_targets(family: str, found) -> list[str] | None:
    """Names for a family that PEFT has no choice for; None leaves the choice to PEFT.

    Raises ValueError, listing the candidates, if there is none here either.
    """
    if family in PEFT_TARGETS:
        return None
    if family in DEFAULT_TARGETS:
        return list(DEFAULT_TARGETS[family])
    raise ValueError(
        f"--lora_target_modules default: PEFT has no choice for {family}; give "
        f"all-linear or some of {', '.join(found)}"
    )


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
