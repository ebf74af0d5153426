"""One thread per process: tests run beside each other's ranks, and idle OpenMP threads cost more."""

import os

import torch
from hypothesis import settings

from tests import reaper

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests launch
torch.set_num_threads(1)
# The same examples in every run: a new one that fails should fail where it is being looked for.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_configure():
    reaper.start()
