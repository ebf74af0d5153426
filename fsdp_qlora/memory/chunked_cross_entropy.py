"""Cross-entropy over the vocabulary without ever holding all logits.

A head of 128k tokens makes the logits of 16k tokens 4 GB in bf16 and 8 GB in fp32. The head and
the loss are taken here in chunks of tokens: each chunk's logits give its loss and its gradient with
respect to the hidden states at once, so backward has no head product left to do.

`apply_chunked_cross_entropy` changes the model's own forward, so `model(**batch, labels=...).loss` is all
that a training loop needs, as with any transformers model, and FSDP's hooks see one forward.

What a model does to the head's output is part of its own forward, which is not called here, so the loss
does the same (`logit_map.py`).

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..config.run import chunk_tokens
from ..dist import print_main
from ..model.attention import rows_alone
from ..model.blocks import base_model, output_head
from ..model.sequence_parallel import SequenceParallel, rows_are_cut
from ..quantization.quantize import compute_input
from .logit_map import decoder, logit_map
from .vocab_parallel import gathered_weight

IGNORE = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of token losses of hidden (N, D) against labels (N,), with the head's weight (V, D).

    right: a counter, to which is added how many of the labels have the largest logit.
    weights: (N,) that the tokens' losses are multiplied by, or None.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, scale, softcap, chunk, right=None, weights=None):
        loss = hidden.new_zeros((), dtype=torch.float32)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        d_bias = (
            torch.zeros_like(bias, dtype=torch.float32)
            if bias is not None and bias.requires_grad
            else None
        )
        weight, bias = (t if t is None else t.to(hidden.dtype) for t in (weight, bias))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            chunk_loss, chunk_right, d_logits = _loss_and_d_logits(
                hidden[part],
                weight,
                bias,
                labels[part],
                scale,
                softcap,
                None if weights is None else weights[part],
            )
            loss += chunk_loss
            if right is not None:
                right += chunk_right
            torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True; autograd did not see the gradients being made
            raise ValueError(
                "the loss in chunks can't be differentiated twice; leave apply_chunked_cross_entropy out"
            )
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        d_hidden = (d_hidden * d_loss).to(d_hidden.dtype)
        if d_weight is not None:
            d_weight = (d_weight * d_loss).to(weight_dtype)
        if d_bias is not None:
            d_bias = (d_bias * d_loss).to(bias_dtype)
        return d_hidden, d_weight, d_bias, *[None] * 6


def _loss_and_d_logits(
    hidden, weight, bias, labels, scale, softcap, weights
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_loss_of_logits` gives for one chunk."""
    logits = nn.functional.linear(hidden, weight, bias)
    if not logits.is_cuda:
        return _loss_of_logits(logits, labels, scale, softcap, weights)
    for rows in (logits, labels) if weights is None else (logits, labels, weights):
        torch._dynamo.maybe_mark_dynamic(rows, 0)  # the last chunk is shorter
    return _compiled_loss_of_logits()(logits, labels, scale, softcap, weights)


def _loss_of_logits(
    logits: Tensor,
    labels: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy of logits (N, V) in fp32, and d loss / d logits in the logits' dtype.

    Each token's is multiplied by its weight, if there are any. Between them the number of labels that
    have the largest logit, alone or not. The gradient is softmax(logits) - onehot(label), zero where the
    label is ignored; what the model does to the head's output first (`logit_map`) is followed back.
    """
    capped = logits.float()
    if scale != 1:
        capped = capped * scale
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    counted = (labels != IGNORE)[:, None]
    target = labels.clamp(min=0)[:, None]
    log_sum, of_target = capped.logsumexp(-1, keepdim=True), capped.gather(-1, target)
    right = ((of_target >= capped.amax(-1, keepdim=True)) & counted).sum()
    if weights is not None:
        counted = counted * weights[:, None]
    loss = ((log_sum - of_target) * counted).sum()
    grad = (capped - log_sum).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == target
    grad = (grad - is_target.float()) * counted
    if softcap:
        grad = grad * (1 - (capped / softcap) ** 2)
    if scale != 1:
        grad = grad * scale
    return loss, right, grad.to(logits.dtype)


@cache
def _compiled_loss_of_logits():
    """`_loss_of_logits` in fused kernels: on a GPU its many passes cost more than the head."""
    return torch.compile(_loss_of_logits)


def _shifted(values: Tensor, last: float) -> Tensor:
    """Labels or weights (B, T) moved one left: position t predicts token t+1, the last one nothing."""
    return nn.functional.pad(values[:, 1:], (0, 1), value=last)


def _chunked_forward(
    model,
    plain_forward,
    after_head,
    sequence,
    input_ids=None,
    attention_mask=None,
    labels=None,
    num_items_in_batch=None,
    loss_weights=None,
    **kwargs,
):
    """A causal model's forward: with labels only the loss, without labels its own forward.

    The loss is the sum over trained tokens divided by `num_items_in_batch`, or their mean, as in
    transformers; of tokens with `loss_weights` (B, T), the weighted sum or mean. `after_head` is the scale
    and the cap of its logits. `sequence`: the ranks that share the batch's rows, or None; then the loss is
    that of this rank's part of the tokens.
    """
    kwargs["attention_mask"] = attention_mask
    if labels is None:
        return plain_forward(input_ids=input_ids, **kwargs)
    if _is_another_loss(model, kwargs) and sequence is None and loss_weights is None:
        items = {} if num_items_in_batch is None else dict(num_items_in_batch=num_items_in_batch)
        return plain_forward(input_ids=input_ids, labels=labels, **items, **kwargs)
    as_tuple = kwargs.pop("return_dict", None) is False
    labels = _shifted(labels, IGNORE)
    if loss_weights is not None:
        loss_weights = _shifted(loss_weights, 0.0)
    if num_items_in_batch is None:
        num_items_in_batch = _num_items(labels, loss_weights)
    if sequence:
        input_ids, labels, kwargs = sequence.part(model.config, input_ids, labels, kwargs)
        loss_weights = None if loss_weights is None else sequence.own(loss_weights)
        masks = rows_are_cut(model.config, sequence)
    else:
        masks = rows_alone(model.config) if _are_alone(kwargs) else nullcontext()
    with masks:
        outputs = decoder(model)(input_ids=input_ids, **kwargs)
    head = output_head(model)
    hidden, labels, loss_weights = _counted(
        outputs.last_hidden_state.flatten(0, 1), labels.flatten(), loss_weights
    )
    # In the head's own dtype or autocast's: norms in fp32 give another, and autocast knows no `out=`. A
    # head that is trained beside adapters is stored in another one (adapters/modules_to_save.py).
    hidden = compute_input(hidden.to(getattr(head, "compute_dtype", head.weight.dtype)))
    weight = gathered_weight(head.weight, hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        total = _ChunkedCrossEntropy.apply(
            hidden,
            weight,
            head.bias,
            labels,
            *after_head,
            chunk_tokens(len(weight)),
            _right_tokens(model, hidden.device),
            loss_weights,
        )
    return _as_asked(total / num_items_in_batch, outputs, kwargs, as_tuple)


def _is_another_loss(model: nn.Module, given: dict) -> bool:
    """Whether transformers would compute another loss, which is left to the model's own forward.

    Its routers' balance may be added, a function of the script's own be set, or labels come in another form.
    """
    balanced = given.get("output_router_logits")
    if balanced is None:
        balanced = getattr(model.config, "output_router_logits", False)
    function = getattr(model, "loss_function", ForCausalLMLoss)
    return (
        bool(balanced)
        or function is not ForCausalLMLoss
        or given.get("shift_labels") is not None
        or given.get("ignore_index", IGNORE) != IGNORE
    )


def _are_alone(given: dict) -> bool:
    """Whether a decoder that is given this sees rows without padding, which begin at their first token.

    A cache holds tokens before it, by which no kernel without a mask would move the diagonal.
    """
    return given.get("past_key_values") is None and not (
        given["attention_mask"] is not None or "position_ids" in given
    )


def _as_asked(loss: Tensor, outputs: Any, given: dict, as_tuple: bool):
    """The loss with what else the decoder was asked for; a cache that nobody wants is let go of."""
    cached = given.get("use_cache") or given.get("past_key_values") is not None
    names = ["hidden_states", "attentions"] + ["past_key_values"] * bool(cached)
    found = CausalLMOutputWithPast(
        loss=loss, **{name: getattr(outputs, name, None) for name in names}
    )
    return found.to_tuple() if as_tuple else found


def _counted(
    hidden: Tensor, labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tokens (N, D) that have a label, with it and their weight; on a GPU all of them.

    There the host would have to wait for their number; of fake tensors nobody knows it.
    """
    weights = None if weights is None else weights.flatten()
    if hidden.device.type != "cpu" or detect_fake_mode(hidden):
        return hidden, labels, weights
    found = (labels != IGNORE).nonzero().flatten()
    return hidden[found], labels[found], None if weights is None else weights[found]


def _num_items(labels: Tensor, loss_weights: Tensor | None) -> Tensor:
    """What the sum of a batch's losses is divided by for their mean."""
    counted = labels != IGNORE
    if loss_weights is None:
        return counted.sum().clamp(min=1)
    total = (counted * loss_weights).sum()
    return torch.where(total > 0, total, 1)


def _right_tokens(model: nn.Module, device: torch.device) -> Tensor:
    """The counter of a model's predictions that were right, on the device of its losses.

    It is one tensor that is added to, so that a CUDA graph counts as well.
    """
    counter = getattr(model, "right_tokens", None)
    if counter is None:
        counter = model.right_tokens = torch.zeros((), dtype=torch.int64, device=device)
    return counter


def take_right_tokens(model: nn.Module) -> Tensor | None:
    """How many trained tokens had the largest logit on this rank since it was last asked.

    None of a model that keeps its own forward.
    """
    counter = getattr(base_model(model), "right_tokens", None)
    if counter is None:
        return None
    found = counter.clone()
    counter.zero_()
    return found


def apply_chunked_cross_entropy(
    model: nn.Module, sequence: SequenceParallel | None = None, weighted: bool = False
) -> nn.Module:
    """Let the model compute its training loss in chunks, in place; of `sequence`'s part of its rows.

    A model whose head is adapted, or which makes its logits in a way not known here, keeps its own
    forward, which holds all logits; with `sequence`, or where tokens are `weighted`, it is refused by a
    ValueError.
    """
    causal = base_model(model)
    linear = isinstance(output_head(model), nn.Linear)
    after_head = logit_map(causal) if linear else None
    if after_head is None and sequence:
        raise ValueError(
            f"--sequence_parallel {sequence.size}: the loss of {type(causal).__name__} needs whole rows, "
            "for it makes its logits in an unknown way; leave it out"
        )
    if after_head is None:
        if weighted:
            _refuse_weights(causal, (), dict(loss_weights=True))
        causal.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
    if not linear:
        return model
    if after_head is None:
        print_main(
            f"all logits are held for the loss: {type(causal).__name__} makes them in a way "
            "that is not known here"
        )
        return model
    causal.forward = partial(_chunked_forward, causal, causal.forward, after_head, sequence)
    return model


def _refuse_weights(causal: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raise ValueError where a model that keeps its own forward is given weights, which it would ignore."""
    if kwargs.get("loss_weights") is not None:
        raise ValueError(
            f"--weight_column: {type(causal).__name__} computes its own loss, which takes no weights "
            "(its head is adapted, or its logits are made in an unknown way); leave the flag out"
        )
