"""What runs inside of an op that torch.compile can't look into."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def outside_of_op():
    """Let autograd and compiled code see tensors inside of an opaque op as they do elsewhere.

    torch keeps autograd away from what runs in one.
    """
    skipped = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        skipped = skipped.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), skipped):
        yield


def tensor_cores(given: Tensor):
    """Products of fp32 on a GPU's tensor cores, in TF32, for what is given in 16 bits."""
    of_16_bits = given.dtype in (torch.float16, torch.bfloat16)
    return _products(given, "high" if of_16_bits else "highest")


def exactly(x: Tensor):
    """Products in fp32: where errors would add up from step to step."""
    return _products(x, "highest")


@contextmanager
def _products(x: Tensor, precision: str):
    if not _on_gpu(x):
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's newer names for it, and torch refuses a mixture
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda
