"""One thread per process: tests run beside each other's ranks, and idle OpenMP threads cost more."""

import os

import bitsandbytes.nn.modules
import torch
from hypothesis import settings

from tests import reaper

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests launch
torch.set_num_threads(1)
# On CPUs with AVX512-BF16 it packs 4-bit weights anew for inference, and multiplies in bf16: references are
# to be exact.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
# The same examples in every run: a new one that fails should fail where it is being looked for.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_configure():
    reaper.start()
