"""Layers that share an input, joined in a compiled block: q, k and v; gate and up.

Each layer of a block is written by itself, as transformers has it. In the graph that torch.compile
makes of the block it can be seen which layers read the same tensor, whatever the family's names are:
their x A^T becomes one product, what products in fp8 read is quantized once, and in backward their dX
are summed by the products themselves instead of being added up after. Runs as a pass of inductor over
each forward and backward graph:
https://docs.pytorch.org/docs/stable/torch.compiler_custom_backends.html

Letters: x the shared input, dX its gradient, as in `lora_ops.py`.
"""

from __future__ import annotations

import operator

import torch
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from ..quantization.fp8_kernels import MOST_TENSORS
from . import lora_ops

ops = torch.ops.fsdp_qlora
# More columns for the adapters of others cost a product what quantizing x once saves.
_MOST_RANKS = 64
_ADD = torch.ops.aten.add.Tensor
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
}


class SharedInputs(CustomGraphPass):
    """Joins the layers of one input, in place."""

    def __call__(self, graph: Graph):
        _join_seeds(graph)
        for group in _groups_of_one_input(graph, ops.adapted_inputs.default, x=0, no=5):
            _join_inputs(graph, group)
        for group in _groups_of_one_input(graph, ops.adapted_linear_backward.default, x=1, no=7):
            _join_backward(graph, group)
        for group in _groups_of_one_input(graph, ops.adapted_linear.default, x=1):
            _join_adapted(graph, group)
        for group in _groups_of_one_input(graph, ops.frozen_linear.default, x=0):
            _join_frozen(graph, group)
        for total, group in _sums_of(graph, ops.frozen_linear_backward.default):
            _join_frozen_backward(graph, total, group)
        stable_topological_sort(graph)  # a joined call stands where its last input is known
        graph.eliminate_dead_code()

    def uuid(self):
        """What compiled graphs are cached under."""
        return get_hash_for_files((__file__, lora_ops.__file__))


def _groups_of_one_input(graph: Graph, op, x: int, no: int | None = None) -> list[list[Node]]:
    """Calls of `op` with one argument `x` and one form, without dropout, in the graph's order.

    `no` is where dropout's seed stands.
    """
    found: dict[tuple, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=op):
        if no is None or node.args[no] is None:
            found.setdefault((node.args[x], *node.args[-3:]), []).append(node)
    return [group for group in found.values() if 1 < len(group) <= MOST_TENSORS]


def _join_seeds(graph: Graph):
    """One `dropout_seeds` for all seeds, drawn in the order in which the block's code uses its layers.

    Calls apart may be put into any order, in one graph otherwise than in another; the backward of an
    MLP in tiles would then drop other places than its forward (memory/tiled_mlp.py).
    """
    found = graph.find_nodes(op="call_function", target=ops.dropout_seed.default)
    if not found:
        return
    joined = call(graph, found[0], ops.dropout_seeds.default, found[0].args[0], len(found))
    places = {node: place for place, node in enumerate(graph.nodes)}
    for i, node in enumerate(sorted(found, key=lambda seed: places[seed.args[1]])):
        node.replace_all_uses_with(call(graph, joined, operator.getitem, joined, i))


def _join_inputs(graph: Graph, group: list[Node]):
    """One `shared_inputs` for the x A^T of a group."""
    x = group[0].args[0]
    joined = call(graph, group[-1], ops.shared_inputs.default, x, [node.args[3] for node in group])
    for i, node in enumerate(group):
        _replace_output(graph, node, 0, joined, i)
        # The token of an output only carries gradients, so any tensor stands for it here.
        if token := output(node, 1):
            token.replace_all_uses_with(x)


def _join_adapted(graph: Graph, group: list[Node]):
    """One `shared_fp8_linears` for the products of a group, if they are in fp8 and ranks are small."""
    _, x, xa, weight, absmax, bias, _, b, scaling, *_ = _columns_of(group)
    if sum(each.meta["val"].shape[1] for each in b) <= _MOST_RANKS:
        _join_linears(graph, group, x[0], xa, weight, absmax, bias, b, scaling)


def _join_frozen(graph: Graph, group: list[Node]):
    """The same for layers without an adapter."""
    x, weight, absmax, bias, *_ = _columns_of(group)
    _join_linears(graph, group, x[0], [], weight, absmax, bias, [], [])


def _join_linears(graph: Graph, group: list[Node], x: Node, xa, weight, absmax, bias, *adapters):
    """One `shared_fp8_linears` in a group's place; not where some have a bias and others have none."""
    in_features, quant_type, product_dtype = group[0].args[-3:]
    if product_dtype != "fp8" or None in bias and any(bias):
        return
    joined = call(
        graph,
        group[-1],
        ops.shared_fp8_linears.default,
        x,
        xa,
        weight,
        _present(absmax),
        _present(bias),
        *adapters,
        in_features,
        quant_type,
    )
    for i, node in enumerate(group):
        node.replace_all_uses_with(call(graph, joined, operator.getitem, joined, i))


def _columns_of(group: list[Node]) -> list[list]:
    """The arguments of a group's calls, those of one place together."""
    return [list(column) for column in zip(*(node.args for node in group), strict=True)]


def _present(values: list) -> list:
    """All or none, for ops that take no list with gaps."""
    return values if values[0] is not None else []


def _join_backward(graph: Graph, group: list[Node]):
    """One `shared_inputs_backward` for a group whose dX have no other use than to be added up."""
    gradients = [output(node, 0) for node in group]
    total = None if None in gradients else _added_up(gradients)
    if total is None:
        return
    dy, x, xa, weight, absmax, a, b, _, scaling, *_ = _columns_of(group)
    joined = call(
        graph,
        group[-1],
        ops.shared_inputs_backward.default,
        dy,
        x[0],
        xa,
        weight,
        _present(absmax),
        a,
        b,
        scaling,
        *group[-1].args[-3:],
    )
    dx = call(graph, joined, operator.getitem, joined, 0)
    for view in _views_of(gradients[0]):
        dx = call(graph, dx, view.target, dx, *view.args[1:])
    total.replace_all_uses_with(dx)
    for i, node in enumerate(group):
        _replace_output(graph, node, 1, joined, 1 + i)
        _replace_output(graph, node, 2, joined, 1 + len(group) + i)


def _join_frozen_backward(graph: Graph, total: Node, group: list[Node]):
    """One `shared_frozen_backward` for the sum of the dX of layers without an adapter."""
    dy, weight, absmax, *_ = _columns_of(group)
    total.replace_all_uses_with(
        call(
            graph,
            total,
            ops.shared_frozen_backward.default,
            dy,
            weight,
            _present(absmax),
            *group[0].args[-3:],
        )
    )


def _sums_of(graph: Graph, op) -> list[tuple[Node, list[Node]]]:
    """Nodes that are the sum of calls of `op` in one form and of nothing else, each with the calls."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=_ADD):
        calls = _summands(node, op)
        if 1 < len(calls) <= MOST_TENSORS and len({each.args[-3:] for each in calls}) == 1:
            found[node] = calls
    return [
        (node, calls)
        for node, calls in found.items()
        if not any(user in found for user in node.users)
    ]


def _summands(node: Node, op) -> list[Node]:
    """The calls of `op` whose sum a node is, used for nothing else; none if it is no such sum."""
    if node.target == op:
        return [node]
    if node.target != _ADD or node.kwargs:
        return []
    parts = [
        _summands(part, op) if isinstance(part, Node) and len(part.users) == 1 else []
        for part in node.args
    ]
    return [each for part in parts for each in part] if all(parts) else []


def _added_up(gradients: list[Node]) -> Node | None:
    """The node that is the sum of all of these and of nothing else, if there is one."""
    parts = {(_views_of(g) or [g])[-1] for g in gradients}
    while len(parts) > 1:
        add = next(
            (
                user
                for part in parts
                for user in part.users
                if user.target == _ADD
                and len(part.users) == 1
                and parts.issuperset(user.all_input_nodes)
                and len(user.all_input_nodes) == 2
            ),
            None,
        )
        if add is None or add.kwargs or any(len(p.users) > 1 for p in add.all_input_nodes):
            return None
        parts = parts - set(add.all_input_nodes) | {add}
    return parts.pop()


def _views_of(node: Node) -> list[Node]:
    """The views that follow a node, one after the other, while each is the only use."""
    views = []
    while len(node.users) == 1 and (user := next(iter(node.users))).target in _VIEWS:
        views.append(node := user)
    return views


def output(node: Node, index: int) -> Node | None:
    """The node that takes output `index` of a call."""
    return next((user for user in node.users if user.args[1] == index), None)


def _replace_output(graph: Graph, old: Node, which: int, new: Node, index: int):
    """Let output `index` of `new` stand for output `which` of `old`."""
    if item := output(old, which):
        item.replace_all_uses_with(call(graph, new, operator.getitem, new, index))


def call(graph: Graph, after: Node, target, *args) -> Node:
    """A new call after a node, with the shapes of its result."""
    with graph.inserting_after(after):
        node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda n: n.meta["val"])
    with detect_fake_mode([n.meta["val"] for n in node.all_input_nodes]):
        node.meta["val"] = target(*values)
    return node
