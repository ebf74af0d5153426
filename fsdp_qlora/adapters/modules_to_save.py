"""Modules that are trained whole beside the adapters: PEFT's `modules_to_save`, without its copies.

PEFT keeps such a module twice, as it was and as it is trained. Here it is trained where it is, so it is
sharded, and the loss takes a head in chunks, as in full fine-tuning. In the adapter's folder it has the
name that PEFT gives it. It is stored in the adapters' dtype, for FSDP reduces the gradients of a unit
together, and computes in the model's.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..experts import StackedExperts
from ..model.blocks import base_model, is_tied, output_head
from ..model.conv1d import transposed_weights
from ..model.trained_dtype import train_in
from ..quantization.quantize import QuantLinear
from .peft_names import name_in_whole


def apply_modules_to_save(
    model: PeftModel, names: list[str], dtype: torch.dtype, embeddings: bool = False
):
    """Unfreeze the modules whose names end so, as PEFT finds them, and store them in `dtype`, in place.

    embeddings: the input embeddings and lm_head too.
    Works on meta and on a loaded model. Raises ValueError for a name that no module has, and for
    modules that are quantized or adapted.
    """
    causal = base_model(model)
    if embeddings:
        ends = [name.rsplit(".", 1)[-1] for name in _embedding_names(causal)]
        names = [*names, *(end for end in ends if end not in names)]
    if not names:
        return
    names, chosen = _with_tied_end(causal, names), []
    for end in names:
        found = [
            (name, m)
            for name, m in causal.named_modules(remove_duplicate=False)
            if name.endswith(end) and any(True for _ in m.parameters())
        ]
        if not found:
            raise ValueError(f"--modules_to_save {end}: {_no_such_module(causal, end)}")
        for name, module in found:
            _check_can_be_whole(name, module, end, dtype)
        if lying := [
            n for n in transposed_weights(model) for name, _ in found if n.startswith(name)
        ]:
            raise ValueError(
                f"--modules_to_save {end}: this model's files store {lying[0]} transposed, so it "
                "can't be trained in full beside adapters; adapt it instead"
            )
        chosen += [module for _, module in found]
    train_in(chosen, dtype)
    model.peft_config[model.active_adapter].modules_to_save = names


def train_only(model: nn.Module, names: list[str]):
    """Freeze a model but for the modules whose names end so, in place; none is all, and changes nothing.

    Raises ValueError for a name that no module has.
    """
    if not names:
        return
    model.requires_grad_(False)
    for end in names:
        found = [m for name, m in model.named_modules(remove_duplicate=False) if _is_end(name, end)]
        if not found:
            raise ValueError(f"--trained_modules {end}: {_no_such_module(model, end)}")
        for module in found:
            module.requires_grad_()


def _is_end(name: str, end: str) -> bool:
    """Whether a module's name ends in whole parts so; layers.1 is not the end of layers.11."""
    return name == end or name.endswith(f".{end}")


def _no_such_module(causal: nn.Module, end: str) -> str:
    """What to say of a name that no module has."""
    known = dict.fromkeys(
        name.rsplit(".", 1)[-1]
        for name, m in causal.named_modules()
        if any(True for _ in m.parameters(recurse=False)) and "lora_" not in name
    )
    near = get_close_matches(end, known, 1)
    return (
        f"no module's name ends so{f'; did you mean {near[0]}?' if near else ''}; this model has "
        f"{', '.join(name for name in known if name not in ('base_layer', 'default'))}"
    )


def _check_can_be_whole(name: str, module: nn.Module, end: str, dtype: torch.dtype):
    """Refuse what is not there to be trained whole, or can't compute in another dtype than `dtype`."""
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            raise ValueError(
                f"--modules_to_save {end}: {name} is adapted, or contains adapted layers; "
                "leave them out of --lora_target_modules"
            )
        if isinstance(part, StackedExperts):
            raise ValueError(
                f"--modules_to_save {end}: {name} contains experts, which stay frozen beside "
                "adapters; leave it out"
            )
        if isinstance(part, QuantLinear):
            raise ValueError(
                f"--modules_to_save {end}: {name} is quantized, or contains quantized layers, "
                "so it can't be trained; use --quant none, or adapt it"
            )
        own = [] if isinstance(part, (nn.Linear, nn.Embedding)) else part.parameters(recurse=False)
        if any(p.dim() > 1 and p.dtype != dtype for p in own):
            raise ValueError(
                f"--modules_to_save {end}: {name} can be trained only in the dtype of "
                "--precision; set --adapter_dtype to the same"
            )


def _with_tied_end(causal: nn.Module, names: list[str]) -> list[str]:
    """The names, with the other end of a tied model where one end is among them: both are trained."""
    if not is_tied(causal):
        return list(names)
    ends = _embedding_names(causal)
    if not any(end.endswith(name) for end in ends for name in names):
        return list(names)
    return [*names, *(last for end in ends if (last := end.rsplit(".", 1)[-1]) not in names)]


def _embedding_names(causal: nn.Module) -> tuple[str, str]:
    """The names of a model's embedding and head."""
    names = {id(m): name for name, m in causal.named_modules()}
    return names[id(causal.get_input_embeddings())], names[id(output_head(causal))]


def with_tied_copy(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A saved adapter's tensors, with a trained embedding that is the head too under both names.

    PEFT makes two modules of it, and a merge finds that they are equal.
    """
    causal = base_model(model)
    if not is_tied(causal):
        return tensors
    ends = (f"base_model.model.{end}.weight" for end in _embedding_names(causal))
    first, second = (name_in_whole(model, end) for end in ends)
    for here, there in ((first, second), (second, first)):
        if here in tensors and there not in tensors:
            tensors = tensors | {there: tensors[here].clone()}
    return tensors
