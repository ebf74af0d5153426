"""Milliseconds of each attention kernel, forward and forward + backward, on the shapes of training.

    python benchmarks/attention.py --results benchmarks/results/attention_h100_2026-11-27.jsonl

Causal attention in bf16 with the heads of Llama-3 8B. A shape is a list of row lengths. Rows that are
not of one length are padded to the longest for the kernels that know no borders; flex, varlen and
FlashAttention 4 (fa4) get them in one line of tokens. TFLOP/s count what is needed: 2 H D n^2 forward
for a causal row of n tokens, and 2.5 times that backward. A kernel that fails is a row with its error.

Shapes: N rows, T tokens of the longest, S tokens of all rows, H heads, K key-value heads, D head
size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from fsdp_qlora.bench.measure import commit, device_name, synchronize, versions
from fsdp_qlora.model.attention_kernels import GQA
from fsdp_qlora.model.flash_attention_4 import flash_attention_4

HEADS, KV_HEADS, SIZE = 32, 8, 128
ERROR_LENGTH = 160  # characters kept of an error


def packed_lengths(count: int = 16, mean: int = 1000) -> list[int]:
    """Lengths of packed rows: from about half to about twice the mean, the same every time."""
    spread = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.35
    return (mean * spread.exp()).int().tolist()


SHAPES = {
    "2 x 8192": [8192] * 2,
    "1 x 4096": [4096],
    "8 x 2048": [2048] * 8,
    "packed 16 x ~1000": packed_lengths(),
}


@dataclass
class Timing:
    """One kernel on one shape: medians in milliseconds, TFLOP/s of forward + backward."""

    shape: str
    backend: str
    rows: int
    tokens: int
    gpu: str
    versions: dict[str, str]
    commit: str
    date: str
    status: str = "ok"
    error: str = ""
    forward_ms: float | None = None
    step_ms: float | None = None
    tflops: float | None = None
    difference: float | None = None  # of the output, from that of fp32 softmax, relative


# ---- layouts -----------------------------------------------------------------------------------


def padded(x: Tensor, lengths: list[int]) -> Tensor:
    """(N, H, T, D) of x (S, H, D)."""
    return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)


def unpadded(x: Tensor, lengths: list[int]) -> Tensor:
    """The inverse of `padded`."""
    return torch.cat([row[:n] for row, n in zip(x.transpose(1, 2), lengths, strict=True)])


def in_one_line(x: Tensor, lengths: list[int]) -> Tensor:
    """(1, H, S, D) of x (S, H, D)."""
    return x.transpose(0, 1)[None]


def as_it_is(x: Tensor, lengths: list[int]) -> Tensor:
    return x


# ---- kernels: lengths -> (to its layout, attention, back to (S, H, D)) -------------------------


def sdpa(kernel: SDPBackend, repeat_heads: bool, lengths: list[int], device: torch.device):
    """One of SDPA's kernels. The memory-efficient one wants as many key-value heads as heads."""

    def attention(q, k, v):
        if repeat_heads:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=not repeat_heads
            )

    return padded, attention, unpadded


def flex(lengths: list[int], device: torch.device):
    """Compiled flex_attention: a causal mask, or one of documents where lengths differ."""
    if len(set(lengths)) == 1:

        def mask(b, h, q, k):
            return q >= k

        tokens, layout, back = lengths[0], padded, unpadded
    else:
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

        def mask(b, h, q, k):
            return (q >= k) & (row[q] == row[k])

        tokens, layout = sum(lengths), in_one_line

        def back(x, lengths):
            return x[0].transpose(0, 1)

    blocks = create_block_mask(mask, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return layout, partial(compiled, block_mask=blocks, enable_gqa=True), back


def varlen(lengths: list[int], device: torch.device):
    """torch's variable-length attention, as packed rows use it here."""
    borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def attention(q, k, v):
        return varlen_attn(
            q, k, v, borders, borders, max(lengths), max(lengths), window_size=(-1, 0), **GQA
        )

    return as_it_is, attention, as_it_is


def fa4(lengths: list[int], device: torch.device):
    """FlashAttention 4, with borders where lengths differ."""
    if len(set(lengths)) == 1:

        def layout(x, lengths):
            return x.unflatten(0, (len(lengths), -1))

        def back(x, lengths):
            return x.flatten(0, 1)

        borders = None
    else:
        layout = back = as_it_is
        borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def attention(q, k, v):
        return flash_attention_4(q, k, v, borders, None, None)[0]

    return layout, attention, back


BACKENDS = {
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, False),
    "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, False),
    "efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, True),
    "flex": flex,
    "varlen": varlen,
    "fa4": fa4,
}


# ---- measuring ---------------------------------------------------------------------------------


def inputs(lengths: list[int], heads: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """q (S, H, D), k and v (S, K, D), and the gradient of the output (S, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    h, kv, size = heads
    return [
        torch.randn(sum(lengths), n, size, dtype=torch.bfloat16, device=device, generator=generator)
        for n in (h, kv, kv, h)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The output of the first head in fp32, row by row: (S, D)."""
    rows = zip(*(x[:, 0].float().split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat(
        [scaled_dot_product_attention(*(x[None] for x in row), is_causal=True)[0] for row in rows]
    )


def milliseconds(function, device: torch.device, repeats: int) -> float:
    """Median time of a call, after three that are dropped."""
    seconds = []
    for _ in range(3 + repeats):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[3:])


def measure(
    timing: Timing,
    make,
    lengths: list[int],
    heads: tuple[int, int, int],
    device: torch.device,
    repeats: int,
):
    """Fill the timing of one kernel, made by `make`, on rows of `lengths`."""
    q, k, v, d_out = inputs(lengths, heads, device)
    layout, attention, back = make(lengths, device)
    leaves = [layout(x, lengths).detach().requires_grad_() for x in (q, k, v)]
    d_out = layout(d_out, lengths)

    def forward():
        return attention(*leaves)

    def step():
        return torch.autograd.grad(forward(), leaves, d_out)

    out, exact = back(forward().detach(), lengths)[:, 0].float(), reference(q, k, v, lengths)
    timing.difference = ((out - exact).norm() / exact.norm()).item()
    timing.forward_ms = milliseconds(forward, device, repeats)
    timing.step_ms = milliseconds(step, device, repeats)
    flops = 3.5 * 2 * heads[0] * heads[2] * sum(n * n for n in lengths)
    timing.tflops = flops / timing.step_ms / 1e9


def run(
    shapes: dict[str, list[int]],
    device: torch.device,
    repeats: int = 20,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, SIZE),
    results: str | None = None,
) -> list[Timing]:
    """Measure every kernel on every shape; print each, and append it to `results`."""
    print(f"{'shape':<20}{'kernel':<11}{'forward':>9}{'+backward':>11}{'TFLOP/s':>9}  difference")
    timings = []
    for shape, lengths in shapes.items():
        for backend, make in BACKENDS.items():
            timing = Timing(
                shape,
                backend,
                len(lengths),
                sum(lengths),
                device_name(device),
                versions(),
                commit(),
                date.today().isoformat(),
            )
            try:
                measure(timing, make, lengths, heads, device, repeats)
            except Exception as error:  # noqa: BLE001  a kernel that this GPU lacks is a result
                timing.status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
                timing.error = f"{type(error).__name__}: {error}".split("\n")[0][:ERROR_LENGTH]
            report(timing, results)
            timings.append(timing)
    return timings


def report(timing: Timing, results: str | None):
    """Print a timing, and append it to `results` as a line of JSON."""
    figures = (
        f"{timing.forward_ms:>9.3f}{timing.step_ms:>11.3f}{timing.tflops:>9.0f}  "
        f"{timing.difference:.1e}"
        if timing.status == "ok"
        else f"  {timing.error}"
    )
    print(f"{timing.shape:<20}{timing.backend:<11}{figures}", flush=True)
    if not results:
        return
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    with open(results, "a") as file:
        file.write(json.dumps(asdict(timing)) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", help="JSON-lines file the timings are appended to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention.py needs a GPU")
    run(SHAPES, torch.device("cuda", 0), options.repeats, results=options.results)


if __name__ == "__main__":
    main()
