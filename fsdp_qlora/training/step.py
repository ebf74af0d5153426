"""One optimizer step.

The loss of a step is the sum over its trained tokens, on all ranks and in all micro-batches,
divided by their number, which is counted before the first backward. So a step's gradient does not
depend on how its rows are cut up.

Shapes: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import num_trained_tokens, on_device
from ..dist import all_reduce, full_tensor, sum_over_ranks
from ..memory.chunked_cross_entropy import take_right_tokens
from ..sharding import is_sharded, set_gradient_sync
from ..sharding.prefetch import set_last_micro_batch
from .loss_scaler import LossScaler

_BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k"}
ForwardBackward = Callable[[nn.Module, dict, float, Tensor | None], Tensor]


@dataclass
class StepResult:
    """What one optimizer step gave, over all ranks.

    Loss and norm stay on the device until they are read, which waits for it.
    """

    loss_and_norm: Tensor  # (2,)
    trained_tokens: int
    tokens: int
    right_tokens: Tensor | None = None  # of the trained ones, those with the largest logit
    loss_scale: Tensor | None = None  # of this step, with fp16
    expert_load: Tensor | None = None  # (2,) of a mixture (experts/routing.py)
    stepped: bool = True  # False if no token was trained: the weights are unchanged

    @property
    def loss(self) -> float:
        """Sum of the trained tokens' losses divided by their number."""
        return self.loss_and_norm[0].item()

    @property
    def token_accuracy(self) -> float | None:
        """Share of the trained tokens that had the largest logit; None where that was not counted."""
        if self.right_tokens is None or not self.trained_tokens:
            return None
        return self.right_tokens.item() / self.trained_tokens

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping."""
        return self.loss_and_norm[1].item()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[dict],
    *,
    max_grad_norm: float | None = None,
    no_sync: bool = False,
    ranks_per_row: int = 1,
    agree: Callable[..., list[int]] | None = None,
    scaler: LossScaler | None = None,
    forward_backward: ForwardBackward | None = None,
) -> StepResult:
    """Forward and backward of every micro-batch, then one optimizer step.

    Each micro-batch is a dict of input_ids and labels (B, T), and what else the model takes; every
    rank must bring the same number of them. Gradients are averaged over ranks, so the sum of losses
    is divided by the tokens per rank. `ranks_per_row` ranks bring the same micro-batches, each for the
    loss of its part of their tokens (model/sequence_parallel.py). `agree` sums counts over ranks,
    before the step and between micro-batches; if it raises, weights and optimizer are as they were.
    So they are after a step whose loss or gradient is not finite, on every rank, for both are sums over
    ranks. Raises ValueError for an optimizer that holds none of the weights that are trained. With a
    `scaler` the loss is scaled for the backward, and the norm is that of the gradients themselves.
    `forward_backward` may be another way to compute a micro-batch (cuda_graphs.py).
    """
    balance = getattr(model, "router_balance", None)
    trained, tokens, *with_rows = (agree or sum_over_ranks)(
        sum(num_trained_tokens(b) for b in micro_batches),
        sum(b["input_ids"].numel() for b in micro_batches),
        *([sum(map(_has_rows, micro_batches))] if balance else []),
    )
    trained, tokens = trained // ranks_per_row, tokens // ranks_per_row
    if not trained:
        return StepResult(torch.zeros(2), 0, tokens, stepped=False)
    device = compute_device(model)
    loss_sum = torch.zeros((), device=device)
    if balance:
        balance.share.fill_(dist.get_world_size() / max(1, *with_rows))
    take_right_tokens(model)
    for i, batch in enumerate(micro_batches):
        if i and agree:
            agree()
        last = i == len(micro_batches) - 1
        set_gradient_sync(model, last or is_sharded(model) and not no_sync)
        set_last_micro_batch(model, last)
        loss_sum += (forward_backward or run_micro_batch)(
            model,
            on_device(batch, device),
            trained / dist.get_world_size(),
            scaler and scaler.scale,
        )
    if scaler:
        scaler.unscale(trained_weights(optimizer))
    if all(p.grad is None for p in trained_weights(optimizer)):
        raise ValueError(
            "no weight in the optimizer has a gradient after the backward, so it would train "
            "nothing; build the optimizer from the trained weights of the finished model"
        )
    norm = clip_gradients(trained_weights(optimizer), max_grad_norm)
    loss_sum, right = _summed(loss_sum, take_right_tokens(model))
    loss_and_norm = torch.stack([loss_sum / dist.get_world_size(), norm.to(loss_sum)])
    finite = loss_and_norm.isfinite().all()
    step_if(finite, optimizer)
    optimizer.zero_grad()
    scale = scaler and scaler.scale
    if scaler:
        scaler.update(finite)
    return StepResult(loss_and_norm, trained, tokens, right, scale)


def _has_rows(batch: dict) -> bool:
    """Whether a micro-batch is more than a filler, which tokens that are marked tell."""
    return "real_tokens" not in batch or bool(batch["real_tokens"].any())


def _summed(loss: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A loss and a count of right tokens over all ranks, in one message."""
    if right is None:
        all_reduce(loss)
        return loss, None
    sums = torch.stack([loss.double(), right.double()])
    all_reduce(sums)
    return sums[0].to(loss), sums[1]


def run_micro_batch(
    model: nn.Module, batch: dict, num_items: float | Tensor, scale: Tensor | None = None
) -> Tensor:
    """Forward and backward of one micro-batch; the sum of its losses divided by `num_items`."""
    for name in (
        _BORDERS & batch.keys()
    ):  # compiled code is to be made for any number of packed rows
        torch._dynamo.maybe_mark_dynamic(batch[name], 0)
    loss = model(**batch, num_items_in_batch=num_items).loss
    (loss if scale is None else loss * scale).backward()
    return loss.detach()


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer):
    """The optimizer's step, or none; fused kernels decide it on the device.

    Reading `finite` would make the host wait for the GPU in every step. `found_inf` is what torch's
    GradScaler gives fused optimizers: 1 leaves weights, moments and the step count alone. For weights in
    host memory torch would not wait for it to come there, and take what it finds from the step count.
    """
    on_device = all(p.device == finite.device for p in trained_weights(optimizer))
    if optimizer.defaults.get("fused") and on_device:
        optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite.item():
        optimizer.step()


def compute_device(model: nn.Module) -> torch.device:
    """Where the forward runs; under CPU offload the parameters are elsewhere."""
    buffer = next(model.buffers(), None)
    return buffer.device if buffer is not None else next(model.parameters()).device


def trained_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer trains: asking it takes no walk through the model's modules."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Norm of all gradients over all ranks; gradients are scaled down to `max_norm` if given."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = full_tensor(norm)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def seed_everything(seed: int, rank: int, deterministic: bool = False):
    """Seed dropout and shuffling; ranks differ, or all would drop the same places."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
        torch.use_deterministic_algorithms(True)
