"""What runs inside of an op that torch.compile can't look into."""

from __future__ import annotations

from contextlib import contextmanager

import torch


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
