"""Whether a type of model trains here, tried on a small model of its own code before weights are read.

Types that the tests know (`catalog.families.TESTED_TYPES`) need no trial. Of any other a small random
model is made, saved and given to what a run does: its files' names must be found, its layers and experts
changed for ours must give its logits, the loss in chunks must be its loss, and adapters must get
gradients. So an unknown type trains, or is refused by name, and never fails halfway.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .adapters import apply_adapters, lora_config
from .adapters.lora import trainable_parameters
from .catalog.families import TESTED_TYPES
from .dist import print_main
from .experts import apply_stacked_experts
from .loading import Checkpoint
from .loading.key_mapping import match_names
from .loading.stream import check_complete
from .memory.chunked_cross_entropy import apply_chunked_cross_entropy
from .model.conv1d import apply_plain_linears
from .model.packing_probe import small_instance

_TOKENS = 9
_TOLERANCE = 1e-3  # relative; fp32 rounds at 1e-6, and a wrong product is of the logits' size


def check_type(model: nn.Module):
    """Refuse a model, on meta and without adapters, whose type does not train here.

    Raises ValueError naming --model_name and what went wrong. A type that can't be tried is said to be
    untried.
    """
    if untried := why_untried(model):
        print_main(f"{model.config.model_type} is not among the tested types, and {untried}")


def why_untried(model: nn.Module) -> str:
    """Why an untested type could not be tried; empty if it was, or is tested. Raises as `check_type`."""
    if model.config.model_type in TESTED_TYPES:
        return ""
    try:
        plain = small_instance(model)
    except Exception as error:  # noqa: BLE001  sizes of a config that nobody has seen
        return f"no small model of it could be made to try it ({_said(error)})"
    if fault := _fault_of(plain):
        raise ValueError(
            f"--model_name {model.config._name_or_path}: {model.config.model_type} can't be trained "
            f"here: tried on a small model, {fault}; docs/families.md lists the types that can"
        )
    return ""


def _fault_of(plain: nn.Module) -> str:
    """What goes wrong with a small model; empty if it trains as its own code computes."""
    steps = {
        "the names in its files are not found": _find_its_files,
        "its layers compute something else": _compare_logits,
        "its loss is another": _compare_loss,
    }
    for fault, step in steps.items():
        try:
            step(plain)
        except Exception as error:  # noqa: BLE001  whatever its code does
            return f"{fault} ({_said(error)})"
    return ""


def _said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__} {error}".strip().splitlines()[0]


def _find_its_files(plain: nn.Module):
    with TemporaryDirectory() as folder, _without_progress():
        # Every rank tries by itself; transformers would save on rank 0 of a process group alone.
        plain.should_save_on_this_rank = lambda *_: True  # type: ignore[assignment]
        plain.save_pretrained(folder)
        ours = _ours(plain)
        check_complete(ours, match_names(ours, Checkpoint(folder)))


@contextmanager
def _without_progress() -> Iterator[None]:
    """Within it, transformers shows no bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _compare_logits(plain: nn.Module):
    with torch.no_grad():
        _compare(_ours(plain)(_ids()).logits, plain(_ids()).logits)


def _compare_loss(plain: nn.Module):
    ids = _ids()
    with torch.no_grad():
        logits = plain(ids).logits.float()
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    ours = apply_adapters(_ours(plain), lora_config(rank=2))
    apply_chunked_cross_entropy(ours)
    loss = ours(input_ids=ids, labels=ids).loss
    _compare(loss, expected)
    loss.backward()
    if all(p.grad is None for p in trainable_parameters(ours).values()):
        raise ValueError("adapters get no gradient; use another model")


def _ours(plain: nn.Module) -> nn.Module:
    """A copy with its layers and experts changed as in a run."""
    return apply_stacked_experts(apply_plain_linears(copy.deepcopy(plain)))


def _ids() -> Tensor:
    return torch.arange(3, 3 + _TOKENS)[None]


def _compare(ours: Tensor, expected: Tensor):
    difference = ((ours - expected).norm() / expected.norm()).item()
    if not difference < _TOLERANCE:
        raise ValueError(f"off by {difference:.0e} of it; use another model")
