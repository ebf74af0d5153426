"""Which modules are gathered together: the units of a wrap policy, in their order.

A unit's weights are whole only inside its own forward and backward; what is in no unit joins the root,
whose weights are gathered for a whole step. Nothing here shards: `fsdp.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..experts import StackedExperts
from ..model.blocks import attention_and_mlp, decoder_blocks, is_tied, output_head, own_weights

# A name, a layer's class or its name, several of them, torch's ModuleWrapPolicy, or a function.
WrapPolicy = str | type | Collection[str | type] | Callable[[nn.Module], bool]


def sharding_units(
    model: nn.Module, policy: WrapPolicy = "block", min_params: int = 100_000_000
) -> list[tuple[str, nn.Module]]:
    """The modules that are gathered together, innermost first; what is left joins the root.

    `policy` is "block", "attention_mlp", "min_params", a layer's class or its name, several of these,
    torch's ModuleWrapPolicy, or a function that is true for each unit; `_gatherable` corrects a choice
    that could not be gathered alone. Raises ValueError for an unknown name, or if a policy of the
    caller's picks nothing.
    """
    if policy == "block":
        chosen = decoder_blocks(model)
    elif policy == "attention_mlp":
        chosen = [m for block in decoder_blocks(model) for m in (*attention_and_mlp(block), block)]
    elif policy == "min_params":
        chosen = _smallest_modules_above(model, min_params)
    else:
        is_unit = _unit_test(model, policy)
        chosen = [m for m in model.modules() if m is not model and is_unit(m)]
        if not chosen:
            raise ValueError("the wrap policy is true for no module of the model")
    names = {id(m): name for name, m in model.named_modules()}
    embedding = _separate_embedding(model)
    if embedding is not None and embedding not in chosen:
        chosen = [embedding, *chosen]
    chosen = _gatherable(model, chosen)
    return sorted(((names[id(m)], m) for m in chosen), key=lambda unit: -unit[0].count("."))


def _unit_test(model: nn.Module, policy: WrapPolicy) -> Callable[[nn.Module], bool]:
    """A policy of layers' classes or of torch's as a function; raises ValueError for unknown names."""
    wanted = getattr(policy, "_module_classes", policy)  # of torch's ModuleWrapPolicy
    if isinstance(wanted, (str, type)):
        wanted = [wanted]
    elif not isinstance(wanted, Collection):
        return wanted
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in wanted}
    known = {type(m).__name__ for m in model.modules()}
    if unknown := sorted(names - known):
        raise ValueError(
            f"--wrap_policy {', '.join(unknown)}: the model has no layer of this class; choose block, "
            f"attention_mlp, min_params, or a class such as {', '.join(sorted(known)[:8])}"
        )
    return lambda module: type(module).__name__ in names


def _gatherable(model: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    """The chosen modules, without those whose weights are used while they are not gathered.

    A unit is whole only inside its own forward. An adapted layer, and experts, read the weights of
    their parts, so a part stands for them; the root's loss reads the head's weight; and a weight
    shared with a module outside of the unit (a tied head) would be split from it. The last two join
    the root.
    """
    layer_of = {
        id(part): layer
        for layer in model.modules()
        if isinstance(layer, (BaseTunerLayer, StackedExperts))
        for part in layer.modules()
    }
    chosen = [layer_of.get(id(m), m) for m in chosen]
    owners = _owners_of_shared_weights(model)
    head = output_head(model)
    return [
        m
        for m in dict.fromkeys(chosen)
        if m is not head and not any(_splits(m, group) for group in owners)
    ]


def _owners_of_shared_weights(model: nn.Module) -> list[set[nn.Module]]:
    """For each parameter that several modules hold, those modules."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), set()).add(module)
    return [group for group in owners.values() if len(group) > 1]


def _splits(unit: nn.Module, owners: set[nn.Module]) -> bool:
    """True if some of `owners` are inside `unit` and some outside."""
    return 0 < len(owners & set(unit.modules())) < len(owners)


def _separate_embedding(model: nn.Module) -> nn.Module | None:
    """The input embedding as a unit of its own, unless its weight is the head's too."""
    if is_tied(model) or not hasattr(model, "get_input_embeddings"):
        return None
    return model.get_input_embeddings()


def _smallest_modules_above(module: nn.Module, min_params: int) -> list[nn.Module]:
    """Innermost modules of at least `min_params` parameters, not counting units inside them."""
    found: list[nn.Module] = []

    def remaining(m: nn.Module) -> int:
        count = own_weights(m) + sum(remaining(child) for child in m.children())
        if count < min_params or m is module or isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            return count
        found.append(m)
        return 0

    remaining(module)
    return found


def needed_in_backward(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units from the first with trained weights on: no gradient goes further back.

    A frozen embedding is left out, and so are the blocks of the base before Llama-Pro's first new one.
    """
    chosen = set(units)
    order = [m for m in model.modules() if m in chosen]
    trained = [any(p.requires_grad for p in m.parameters()) for m in order]
    needed = set(order[trained.index(True) :] if True in trained else ())
    return [unit for unit in units if unit in needed]


def describe_units(units: list[str]) -> str:
    """The FSDP units in one line; numbered ones as a range."""
    if not units:
        return "nothing is sharded: each rank holds the whole model"
    numbered = [u for u in units if u.rsplit(".", 1)[-1].isdecimal()]
    others = [u for u in units if u not in numbered]
    ends = (
        [f"{numbered[0]} to {numbered[-1].rsplit('.', 1)[-1]}"] if len(numbered) > 1 else numbered
    )
    shown = [u.removeprefix("base_model.model.") for u in (*others[:4], *ends)]
    more = ", ..." if len(others) > 4 else ""
    return f"{len(units)} FSDP units, and the root with the rest: {', '.join(shown)}{more}"
