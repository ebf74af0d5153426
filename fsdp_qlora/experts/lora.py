"""LoRA on the weights of all experts of a block: PEFT's `target_parameters`, in names and files.

PEFT wraps the module that holds such a parameter, and a second parameter of it wraps the wrapper, so in
a folder an adapter of `experts.down_proj` is called `experts`, and one of `experts.gate_up_proj` beside
it `experts.base_layer`. Here each is a layer under the parameter's own name, over the experts' rows.

Shapes: E experts, I inputs, O outputs of each, R rank.  A (E R, I), B (O, R E)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.quantize import compute_input
from .grouped_matmul import Routing
from .lora_ops import adapted_experts
from .stacked import AllExperts, StackedExperts


class LoraExperts(nn.Module, LoraLayer):
    """PEFT's LoRA of every expert, over a linear layer that holds their rows."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        experts: int,
        r: int,
        lora_alpha: int,
    ):
        super().__init__()
        self.num_experts = experts
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r * experts, lora_alpha=lora_alpha, config=config)
        self.r[adapter_name] = r
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)

    def _get_in_out_features(self, module) -> tuple[int, int]:
        return module.in_features, module.out_features // self.num_experts

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x (S, I), ordered by expert -> (S, O), or tokens on either side."""
        (name,), w = self.active_adapters, FrozenWeight.of(self.base_layer)
        return adapted_experts(
            compute_input(x),
            *routing,
            w.weight,
            w.absmax,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            0.0 if self.disable_adapters else self.scaling[name],
            *w.form,
            getattr(self.base_layer, "product_dtype", ""),
        )


def expert_parameters(
    causal: nn.Module, targets: list[str] | None, within: tuple[str, ...] = ()
) -> dict[str, int]:
    """Names of the experts' parameters to adapt, as PEFT finds them, each with its number of experts.

    within: prefixes of names, if only some are meant, such as those of some blocks. Raises ValueError,
    listing what there is, for a target that is not found.
    """
    known = adaptable_stacks(causal)
    ends = target_ends(targets, known)
    missing = [end for end in ends if not any(is_target(name, end) for name in known)]
    if missing:
        stacks = dict.fromkeys(name.rsplit(".", 1)[-1] for name in known)
        if not known:
            raise ValueError(
                f"--lora_target_parameters {','.join(missing)}: this model has no experts that PEFT can "
                "adapt; leave it out"
            )
        raise ValueError(
            f"--lora_target_parameters {','.join(missing)}: no such parameter; this model "
            f"has experts: {', '.join(stacks)}"
        )
    return {
        name: count
        for name, count in known.items()
        if name.startswith(within or "") and any(is_target(name, end) for end in ends)
    }


def adaptable_stacks(causal: nn.Module) -> dict[str, int]:
    """Names of the experts' parameters that PEFT can adapt, each with its number of experts."""
    return {
        f"{name}.{stack}": m.num_experts
        for name, m in causal.named_modules()
        if isinstance(m, StackedExperts)
        and not isinstance(m, AllExperts)  # PEFT mistakes their sides
        for stack in m.stacks
    }


def target_ends(targets: list[str] | None, known: Iterable[str]) -> list[str]:
    """The ends of parameters' names that are meant; "experts" stands for all of the `known` ones."""
    stacks = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in known)) or ["experts"]
    return [
        end for target in targets or () for end in (stacks if target == "experts" else [target])
    ]


def is_target(name: str, end: str) -> bool:
    """Whether PEFT takes a parameter's name for a target."""
    return name == end or name.endswith(f".{end}")


def adapt_experts(model: nn.Module, parameters: dict[str, int], config: LoraConfig):
    """Put LoRA on experts of a model under PEFT, in place, with ranks and alphas as PEFT reads them."""
    causal = model.get_base_model()
    for name, experts in parameters.items():
        rank, alpha = (
            pattern.get(get_pattern_key(pattern.keys(), name), default)
            for pattern, default in (
                (config.rank_pattern, config.r),
                (config.alpha_pattern, config.lora_alpha),
            )
        )
        causal.set_submodule(
            name,
            LoraExperts(
                causal.get_submodule(name), model.active_adapter, config, experts, rank, alpha
            ),
        )


def names_of_wrappers(model: nn.Module) -> dict[str, str]:
    """What PEFT's files call each layer of adapted experts, by its name here."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, StackedExperts):
            continue
        wrapped = name  # PEFT wraps the first first, so the last is outermost
        for stack in reversed(module.stacks):
            if not isinstance(getattr(module, stack), LoraExperts):
                continue
            found[f"{name}.{stack}"] = wrapped
            wrapped += ".base_layer"
    return found
