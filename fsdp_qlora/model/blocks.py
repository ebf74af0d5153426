"""Find the decoder blocks of a causal language model, and what is inside and around them.

Every later transform works block by block (recompute, compile, shard), so it asks here what the
blocks are. There is no table of families: the blocks are the largest list of modules that all hold
linear layers, which is how every decoder in transformers is written. Some of them are of several
classes (attention here, a Mamba mixer there).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import Parameter
from types import MethodType

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from ..experts import StackedExperts
from ..quantization.quantize import (
    QuantLinear,
    directly_read,
    is_plain_linear,
    without_gradients,
)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def gets_cache(*args, **kwargs) -> bool:
    """Whether a block with these arguments generates: fills a cache of keys and values, or of states."""
    return any(isinstance(value, Cache) for value in (*args, *kwargs.values()))


def is_linear(module: nn.Module) -> bool:
    """A linear layer, plain or quantized."""
    return isinstance(module, QuantLinear) or is_plain_linear(module)


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's decoder blocks, in order.

    Raises ValueError if there is no list of like blocks.
    """
    return list(block_list(model)[1])


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks with its name in the model. Raises ValueError as `decoder_blocks`."""
    lists = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList)
        and len(m)
        and all(any(is_linear(x) for x in block.modules()) for block in m)
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of decoder blocks; pass a wrap policy "
            "of your own: a function of a module that is true for each unit"
        )
    return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))


def final_norm(model: nn.Module) -> nn.Module | None:
    """What the hidden states go through after the last block: the next module that takes them alone.

    By its class, as its own forward may be wrapped by now.
    """
    name, blocks = block_list(model)
    around = list(model.get_submodule(name.rpartition(".")[0]).children())
    after = around[around.index(blocks) + 1 :]
    return next((m for m in after if _takes_one(MethodType(type(m).forward, m))), None)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that can be adapted, by name.

    All but those that hold experts, those whose weight the model's code reads by itself, and those it runs
    without gradients. One that is adapted already is itself, without what is inside it.
    """
    unadapted = directly_read(model) | without_gradients(model)
    others = unadapted | {
        part
        for m in model.modules()
        if isinstance(m, (StackedExperts, BaseTunerLayer))
        for part in m.modules()
        if part is not m
    }
    return {
        name: m
        for name, m in model.named_modules()
        if m not in others and _is_adaptable(getattr(m, "base_layer", m))
    }


def _is_adaptable(module: nn.Module) -> bool:
    """A linear layer; PEFT's own layer computes over one that holds its weight transposed."""
    return is_linear(module) or isinstance(module, Conv1D)


def linear_names(model: nn.Module) -> dict[str, int]:
    """The ends of names of `linear_layers` but the head, with how often each occurs.

    An end is the last part of a name, or as many of the last as it takes to mean no other module:
    a list's second layer is `altup_projections.1`, not `1`, which every second block is called.
    """
    head = output_head(model)
    adapted = [name for name, m in linear_layers(model).items() if m is not head]
    experts = {
        part for m in model.modules() if isinstance(m, StackedExperts) for part in m.modules()
    }
    others = [n for n, m in model.named_modules() if n not in adapted and m not in experts]
    counts: dict[str, int] = {}
    for name in adapted:
        key = _shortest_end(name, others)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _shortest_end(name: str, others: list[str]) -> str:
    """The fewest last parts of a name that are the end of none of the other names."""
    parts = name.split(".")
    ends = (".".join(parts[-n:]) for n in range(1, len(parts)))
    return next(
        (end for end in ends if not any(o == end or o.endswith(f".{end}") for o in others)), name
    )


def has_experts(model: nn.Module) -> bool:
    """True for a mixture of experts."""
    return any(isinstance(m, StackedExperts) for m in model.modules())


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that turns hidden states into logits."""
    model = base_model(model)
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def is_tied(model: nn.Module) -> bool:
    """True if the embedding and the head are one tensor."""
    config = getattr(base_model(model), "config", None)  # a plain module has none
    return bool(config and getattr(config.get_text_config(), "tie_word_embeddings", False))


def attention_and_mlp(block: nn.Module) -> Iterator[nn.Module]:
    """The direct children of a block that hold linear layers: its attention and its MLP."""
    for child in block.children():
        if any(is_linear(m) for m in child.modules()):
            yield child


def mlp_of(block: nn.Module) -> nn.Module | None:
    """The part of a block that takes the hidden states alone, so each token by itself: its MLP."""
    return next(
        (m for m in attention_and_mlp(block) if not is_linear(m) and _takes_one(m.forward)), None
    )


def _takes_one(forward) -> bool:
    """Whether a function takes one argument and no other."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    return len(kinds) == 1 and kinds[0] in (
        Parameter.POSITIONAL_ONLY,
        Parameter.POSITIONAL_OR_KEYWORD,
    )


def own_weights(module: nn.Module) -> int:
    """Weights of a module without its children's; a quantized weight counts unpacked."""
    if isinstance(module, QuantLinear):
        return module.out_features * module.in_features
    return sum(p.numel() for p in module.parameters(recurse=False))
