"""The mix of activation policies that trains fastest within a memory budget.

What keeping a block's tensors saves in time and takes in memory is the same for every block, so a mix
is four counts. They are searched, not filled up one after the other: whether keep_attention or
keep_linears saves more time per byte depends on the length of rows, and blocks are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, mul

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..catalog.hardware import find_gpu
from ..choices import POLICIES
from ..plan import Plan
from .activations import kept_by_block
from .compute import compute_parts, launch_seconds
from .kept import offloaded
from .peak import GIB, Memory, Peak, memory

# From the first block on. The end matters by less than one block: all that is kept is there at the
# end of the forward, whatever the order; only with recomputed blocks last does their backward, which
# makes one of them whole again, come on top of everything kept for the others.
ORDER = tuple(reversed(POLICIES))
TILES = (1, 2, 4, 8, 16, 32)  # of an MLP, that are tried
SPARE_SHARE = 0.03  # of the card's memory, left free where no budget is given
_LITTLE = 0.03  # of the peak, which is not worth twice the tiles
Counts = tuple[int, int, int, int]  # blocks of each policy, in ORDER


def choose_policies(
    shape: ModelShape,
    plan: Plan,
    budget_gib: float,
    gpu: Gpu | None = None,
    needed: Callable[[Memory], float] = attrgetter("peak_allocated"),
    seen: Plan | None = None,
) -> str:
    """The fastest mix whose predicted need is within the budget, for --activation_policy.

    What is needed is what torch counts as allocated, unless said otherwise (`Memory.total`).
    `plan.memory.activation_policy` is not looked at. Times are those of `gpu`, an H100 if not given, and of
    `seen` where rows are shorter than those that must fit (`Batches.seen`).
    Raises ValueError, with the predicted need, if it is not enough even for recompute_all.
    """
    peak = Peak(shape, plan)

    def fits(counts: Counts) -> bool:
        return (
            needed(peak([run for run in zip(ORDER, counts, strict=True) if run[1]])) <= budget_gib
        )

    least = peak([("recompute_all", shape.layers)])
    if not needed(least) <= budget_gib:
        raise ValueError(
            f"--activation_budget_gib {budget_gib:g}: a step needs {needed(least):.2f} GiB by "
            "the estimate, with every block recomputed; give more, or lower --batch_size or "
            "--context_length"
        )
    best, best_seconds = (0, 0, 0, shape.layers), float("inf")
    seconds = _mix_seconds(shape, seen or plan, gpu or find_gpu("h100"))
    for bound, most in sorted((seconds(c), c) for c in candidates(shape, plan, least, budget_gib)):
        if bound >= best_seconds:
            break
        found = _most_attention_that_fits(most, fits)
        if found is not None and (time := seconds(found)) < best_seconds:
            best, best_seconds = found, time
    return _policy_text(best)


def keeps_fp8_weights(
    shape: ModelShape,
    plan: Plan,
    room_gib: float,
    needed: Callable[[Memory], float] = attrgetter("total"),
) -> bool:
    """Whether --keep_fp8_weights None keeps them: where weights stay, if they fit beside the rest.

    The rest has all that `plan.memory.activation_policy` keeps: of a budget, activations come first.
    """
    stay = (
        plan.quantization.compute_dtype == "fp8"
        and not plan.sharded
        and not plan.memory.cpu_offload
    )
    return stay and needed(memory(shape, plan, keep_fp8_weights=True)) <= room_gib


def choose_tiles(shape: ModelShape, plan: Plan, budget_gib: float | None = None) -> int:
    """How many tiles --mlp_tiles -1 is: the fewest that fit, or after which twice as many save little.

    With a budget, for every block recomputed; the most if not even those fit. Experts take none.
    """
    if shape.expert_linears():
        return 1

    def peak(tiles: int, **changes) -> float:
        return memory(shape, plan, mlp_tiles=tiles, **changes).peak_allocated

    for tiles in TILES[:-1]:
        if budget_gib is not None:
            enough = peak(tiles, activation_policy="recompute_all") <= budget_gib
        else:
            enough = peak(2 * tiles) > (1 - _LITTLE) * peak(tiles)
        if enough:
            return tiles
    return TILES[-1]


def _mix_seconds(shape: ModelShape, plan: Plan, gpu: Gpu) -> Callable[[Counts], float]:
    """Seconds of a micro-batch under a mix: the GPU's or the host's launches, both sums over blocks.

    What communication shows is left out: it is the same for every mix, but for what hides it.
    """
    alone = [plan.change(activation_policy=p) for p in ORDER]
    busy = [sum(compute_parts(shape, gpu, s).values()) / shape.layers for s in alone]
    launches = [launch_seconds(shape, s) / shape.layers for s in alone]

    def seconds(counts: Counts) -> float:
        return max(sum(map(mul, counts, busy)), sum(map(mul, counts, launches)))

    return seconds


def candidates(shape: ModelShape, plan: Plan, least: Memory, budget_gib: float) -> list[Counts]:
    """For each number of keep_all and of keep_linears, the most of keep_attention that might fit.

    Judged by one moment alone, the loss, to which every kept byte adds: quick, and never too strict.
    keep_attention keeps nothing of some attention (KEPT_ATTENTION), and is not tried there.
    """
    layers = shape.layers
    each = {p: kept_by_block(shape, plan, p) - sum(offloaded(shape, plan, p)) for p in ORDER}
    more = {p: (each[p] - each["recompute_all"]) / GIB for p in ORDER}
    room = budget_gib - least.moments["loss"]
    found = []
    for whole in range(layers + 1):
        for linears in range(layers + 1 - whole):
            left = room - whole * more["keep_all"] - linears * more["keep_linears"]
            if left < -1e-9:
                break  # rounding apart
            rest = layers - whole - linears
            per_block = more["keep_attention"]
            attention = min(rest, int(left / per_block + 1e-6)) if per_block else 0
            found.append((whole, linears, attention, rest - attention))
    return found


def _most_attention_that_fits(most: Counts, fits: Callable[[Counts], bool]) -> Counts | None:
    """`most` with as many of its keep_attention blocks as fit, the others recomputed; None if no mix.

    By bisection: each block that keeps attention takes more memory than one that does not.
    """
    whole, linears, attention, again = most
    mixes = [(whole, linears, n, again + attention - n) for n in range(attention + 1)]
    if fits(mixes[-1]):
        return mixes[-1]
    if attention and not fits(mixes[0]):
        return None
    low, high = 0, attention  # mixes[high] does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(mixes[middle]) else (low, middle)
    return mixes[low] if attention else None


def _policy_text(counts: Counts) -> str:
    """Counts as --activation_policy takes them: `keep_linears:16,recompute_all:16`, or one name."""
    used = [(name, count) for name, count in zip(ORDER, counts, strict=True) if count]
    return used[0][0] if len(used) == 1 else ",".join(f"{name}:{count}" for name, count in used)
