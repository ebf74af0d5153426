"""One thread per process: tests run beside each other's ranks, and idle OpenMP threads cost more."""

import os
from importlib import metadata

import bitsandbytes.nn.modules
import pytest
import torch
from hypothesis import settings

from fsdp_qlora.config import delta_kernels, scan_kernels
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


@pytest.fixture
def install(monkeypatch):
    """Let packages that mixers run on be installed, and a version of Triton: install({"fla"}, "3.6")."""

    version = metadata.version

    def clear():
        delta_kernels.has_flash_linear_attention.cache_clear()
        delta_kernels.why_on_plain_torch.cache_clear()
        scan_kernels.why_mamba2_on_plain_torch.cache_clear()

    def let(packages: set[str], triton: str = "3.3.1"):
        for module in (delta_kernels, scan_kernels):
            monkeypatch.setattr(module, "find_spec", lambda name: name in packages or None)
        of = {"triton": triton}
        monkeypatch.setattr(metadata, "version", lambda name: of.get(name) or version(name))
        clear()

    yield let
    monkeypatch.undo()
    clear()
