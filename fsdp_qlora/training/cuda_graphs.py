"""Forward and backward of a micro-batch as one CUDA graph, which the GPU replays without the host.

A layer of a block is a dozen launches in each direction. With few tokens the GPU has done one before
the host has sent the next, and waits: 8B at 1x512 took 433 ms a step for some 70 ms of work. A graph
is sent in one call (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/).

A graph has the addresses of all it reads and writes, so nothing it needs may be on the host. Gathered
weights are among what it allocates itself, and gathers and reductions are launched from it like the
rest. Gradients are added to tensors that stay too, so a step may mix graphs and ordinary micro-batches.
Each shape of batch gets a graph of its own when it is seen for the second time. The first time it runs
launch by launch from the tensors that the graph will read, so all that depends on them is compiled by
then; a capture that would compile anew is refused. All graphs use the same memory: one runs at a time.

Where weights are sharded a graph holds collectives, so ranks must replay the same one: before each
micro-batch they fill theirs up to the largest of all, and so meet the same shapes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..data.collate import IGNORE
from ..dist import hold_collectives, local_rows, max_over_ranks, print_main
from ..experts import StackedExperts, fits_grouped_kernel
from ..memory.tiled_mlp import tiled_mlps
from ..model.attention import makes_no_masks
from ..plan import Plan
from ..sharding import is_sharded, reduce_gradients, without_gradient_sync
from .step import ForwardBackward, run_micro_batch

_MOST_GRAPHS = 64  # shapes beyond these run as they come
_MOST_PREPARED = 24  # before the first step; each takes about a second
_BORDERS_MULTIPLE = 64  # of packed rows' borders, or each batch had its own shape


def uses_graphs(plan: Plan, model: nn.Module, device: torch.device) -> bool:
    """Whether a run replays its micro-batches from graphs: as planned, if the model allows it."""
    return plan.loop.cuda_graphs and not _why_no_graphs(plan, model, device)


def check_graphs(config: RunConfig, plan: Plan, model: nn.Module, device: torch.device):
    """Raise ValueError where --cuda_graphs asks for what no graph can hold; needs no weights."""
    if config.cuda_graphs and (problem := _why_no_graphs(plan, model, device)):
        raise ValueError(f"--cuda_graphs true: {problem}; leave it out")


def micro_batch_runner(
    config: RunConfig, plan: Plan, model: nn.Module, device: torch.device
) -> ForwardBackward:
    """How a run computes its micro-batches. Raises ValueError as `check_graphs` does."""
    check_graphs(config, plan, model, device)
    if not uses_graphs(plan, model, device):
        return run_micro_batch
    return GraphedMicroBatches(model, may_fail=config.cuda_graphs is None)


def _why_no_graphs(plan: Plan, model: nn.Module, device: torch.device) -> str:
    """What keeps a run's micro-batches from being replayed; empty if nothing does."""
    if not plan.weights_stay:
        for flag in ("no_sync", "gather_once"):
            if plan.value(flag):
                return f"with --{flag}, the last micro-batch of a step differs from the others"
    if not makes_no_masks(model.config.get_text_config()):
        return "its attention needs masks that the CPU makes"
    experts = (m for m in model.modules() if isinstance(m, StackedExperts))
    if not all(map(fits_grouped_kernel, experts)):
        return "the host waits for experts whose widths are not multiples of 8"
    if any(mlp.drops for mlp in tiled_mlps(model)):
        return "MLP tiles draw the same dropout twice, from seeds on the CPU"
    return "" if device.type == "cuda" else "there is no GPU"


class GraphedMicroBatches:
    """`run_micro_batch` for a model whose weights stay in place; see the module.

    may_fail: go on without graphs where one can't be captured, instead of raising what torch raised.
    """

    def __init__(self, model: nn.Module, may_fail: bool = False):
        self.may_fail, self.failed = may_fail, False
        self.sharded = is_sharded(model)
        if self.sharded:
            hold_collectives(self)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.gradients: list[Tensor] = []
        self.graphs: dict[tuple, Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, model: nn.Module, batch: dict, num_items: float, scale: Tensor | None = None
    ) -> Tensor:
        batch = _as_large_as_any(batch) if self.sharded else _with_steady_borders(batch)
        graph, is_new = self._graph_of(batch, scale)
        if graph is None:
            return run_micro_batch(model, batch, num_items, scale)
        graph.fill(batch, num_items, scale)
        if is_new:
            return graph.launch(model)
        self.place_gradients()
        if graph.captured is None and not self._capture(graph, model):
            return graph.launch(model)
        return graph.replay(model)

    def prepare(
        self,
        model: nn.Module,
        shapes: Sequence[tuple[int, int]],
        scale: Tensor | None = None,
        weighted: bool = False,
        marked: bool = False,
    ):
        """Capture the graphs of padded batches of these shapes (B, T) before the first step.

        Rows of any length come in the first steps, which would else go launch by launch. Weights,
        gradients and random numbers are as before. Not where weights are sharded, for there ranks have
        other shapes.
        """
        random_state, device = torch.cuda.get_rng_state(), self.trained[0].device
        for rows, width in shapes[:_MOST_PREPARED] if not self.sharded else ():
            ids = torch.zeros(rows, width, dtype=torch.int64, device=device)
            batch = dict(input_ids=ids, labels=torch.full_like(ids, IGNORE))
            if weighted:
                batch["loss_weights"] = torch.zeros(ids.shape, device=device)
            if marked:
                batch["real_tokens"] = torch.zeros(ids.shape, device=device)
            graph, is_new = self._graph_of(batch, scale)
            if not is_new:
                break
            with without_gradient_sync(model):
                graph.launch(model)
            self.place_gradients()
            self._capture(graph, model)
        torch.cuda.set_rng_state(random_state)
        for p in self.trained:
            p.grad = None

    def _graph_of(self, batch: dict, scale: Tensor | None) -> tuple[Graph | None, bool]:
        """The graph of a batch's shape, and whether it is new; None where that runs as it comes."""
        shape = _shape_of(batch)
        if shape in self.graphs or self.failed or len(self.graphs) == _MOST_GRAPHS:
            return self.graphs.get(shape), False
        self.graphs[shape] = Graph(batch, scale)
        return self.graphs[shape], True

    def _capture(self, graph: Graph, model: nn.Module) -> bool:
        """Capture a graph, on every rank or on none; False if that failed and may."""
        random_state, problem = torch.cuda.get_rng_state(), None
        try:
            graph.capture(model, self.pool)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            problem = error
        if self.sharded and max_over_ranks(problem is not None)[0]:
            problem = problem or RuntimeError("another rank failed to capture it")
        if problem is None:
            return True
        if not self.may_fail:
            raise problem
        self.release()
        _restart_generator(random_state)
        print_main(
            "continuing without CUDA graphs, which is slower for few tokens: "
            + str(problem).splitlines()[0]
        )
        return False

    def place_gradients(self):
        """Let gradients be the tensors that graphs add to; after a step they are gone, which is zero."""
        self.gradients = self.gradients or [torch.zeros_like(p) for p in self.trained]
        moved = [
            (p, g) for p, g in zip(self.trained, self.gradients, strict=True) if p.grad is not g
        ]
        if moved:
            torch._foreach_zero_([local_rows(g)[0] for _, g in moved])
        for p, g in moved:
            if p.grad is not None:
                g.copy_(p.grad)
            p.grad = g

    def release(self):
        """Let go of all graphs, whose collectives keep a process group from ending."""
        for graph in self.graphs.values():
            if graph.captured:
                graph.captured.reset()
        self.graphs.clear()
        self.failed = True


class Graph:
    """One micro-batch's graph, with the tensors that it reads and the loss that it writes.

    A tensor that a batch holds under two names is one tensor here too: compiled code asks for that.
    """

    def __init__(self, batch: dict, scale: Tensor | None):
        own = {id(value): value.clone() for value in batch.values() if isinstance(value, Tensor)}
        self.batch = {name: own.get(id(value), value) for name, value in batch.items()}
        self.num_items = torch.ones((), device=batch["input_ids"].device)
        self.scale = None if scale is None else torch.ones_like(scale)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None

    def fill(self, batch: dict, num_items: float, scale: Tensor | None):
        """Take the values of a batch of this shape."""
        for name, value in self.batch.items():
            if isinstance(value, Tensor):
                value.copy_(batch[name], non_blocking=True)
        self.num_items.fill_(num_items)
        if scale is not None:
            self.scale.copy_(scale)

    def launch(self, model: nn.Module) -> Tensor:
        """The loss of the values taken, and gradients added up, launch by launch."""
        return run_micro_batch(model, self.batch, self.num_items, self.scale)

    def capture(self, model: nn.Module, pool):
        """Record what `launch` does; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that read data ahead may pin memory meanwhile.
        with (
            without_gradient_sync(model),
            torch.compiler.set_stance("fail_on_recompile"),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self.loss = self.launch(model)
        self.captured = graph

    def replay(self, model: nn.Module) -> Tensor:
        """What `launch` gives, from the graph."""
        self.captured.replay()
        reduce_gradients(model)
        return self.loss.clone()


def _restart_generator(random_state: Tensor):
    """Let this GPU's random numbers go on from a state; a capture that failed leaves them shut."""
    device = torch.cuda.current_device()
    fresh = torch.Generator(f"cuda:{device}")
    fresh.set_state(random_state)
    torch.cuda.default_generators[device].graphsafe_set_state(fresh)


def _shape_of(batch: dict) -> tuple:
    """What two batches must have in common to be replayed from one graph."""
    return tuple(
        (name, (value.shape, value.dtype) if isinstance(value, Tensor) else value)
        for name, value in sorted(batch.items())
    )


def _with_steady_borders(batch: dict, count: int = 0) -> dict:
    """A batch of packed rows with rows of no tokens at its end, for which attention computes nothing.

    `count` borders at least.
    """
    if "cu_seq_lens_q" not in batch:
        return batch
    borders = batch["cu_seq_lens_q"]
    count = -(-max(count, len(borders)) // _BORDERS_MULTIPLE) * _BORDERS_MULTIPLE
    borders = torch.cat([borders, borders[-1:].expand(count - len(borders))])
    return batch | dict(cu_seq_lens_q=borders, cu_seq_lens_k=borders)


def _as_large_as_any(batch: dict) -> dict:
    """A batch filled up to the rows (B), the width (T) and the borders of the largest of all ranks.

    Every rank must call it. Padding is not trained, and a rank would wait for the largest batch anyway.
    """
    rows, width = batch["input_ids"].shape
    borders = batch.get("cu_seq_lens_q")
    most, widest, longest = max_over_ranks(rows, width, 0 if borders is None else len(borders))
    filling = (0, widest - width, 0, most - rows)
    larger = {
        name: nn.functional.pad(value, filling, value=IGNORE if name == "labels" else 0)
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() == 2
    }
    if borders is None:
        return batch | larger
    # What is filled up is rows of its own, none longer than the longest that the batch tells of.
    piece = batch["max_length_q"]
    ends = *range(piece, width, piece), width
    more = [row * width + end for row in range(rows, most) for end in ends]
    larger["cu_seq_lens_q"] = torch.cat([borders, borders.new_tensor(more)])
    return _with_steady_borders(batch | larger, longest + most * -(-width // piece))
