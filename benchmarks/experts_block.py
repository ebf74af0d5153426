"""Milliseconds and memory of one block's experts, forward and backward: one by one, and grouped.

    python benchmarks/experts_block.py

Shapes of Qwen3-30B-A3B and Mixtral 8x7B with random NF4 weights and tokens that are routed evenly at
random, in bf16, every kernel of a forward and a backward. The loop is what a block did before: each
expert that has tokens unpacks its rows and multiplies, after the host has heard how many there are.

Shapes: N tokens, K experts of each, E experts, D hidden, F intermediate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from torch import nn

from fsdp_qlora.adapters.lora import lora_config
from fsdp_qlora.dist import rank_device
from fsdp_qlora.experts import StackedExperts
from fsdp_qlora.experts.lora import LoraExperts
from fsdp_qlora.quantization.quantize import QuantLinear, frozen_linear

MODELS = {
    "Qwen3-30B-A3B": dict(experts=128, chosen=8, hidden=2048, intermediate=768),
    "Mixtral-8x7B": dict(experts=8, chosen=2, hidden=4096, intermediate=14336),
    "tiny": dict(experts=4, chosen=2, hidden=64, intermediate=128),
}


def random_experts(experts: int, hidden: int, intermediate: int, device, **_) -> StackedExperts:
    """A block's experts in NF4."""

    def weight(*shape):
        return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)

    module = StackedExperts(
        SimpleNamespace(
            num_experts=experts,
            act_fn=nn.SiLU(),
            gate_up_proj=weight(experts, 2 * intermediate, hidden),
            down_proj=weight(experts, hidden, intermediate),
        )
    )
    for name in module.stacks:
        linear = getattr(module, name)
        made = QuantLinear(linear.in_features, linear.out_features, device=device)
        made.weight.data.view(torch.uint8).random_(0, 256)
        made.absmax.data.fill_(0.02)
        setattr(module, name, made)
    return module


def with_lora(module: StackedExperts, rank: int) -> StackedExperts:
    """The same under LoRA."""
    for name in module.stacks:
        setattr(
            module,
            name,
            LoraExperts(
                getattr(module, name), "default", lora_config(), module.num_experts, rank, 16
            ).to(torch.float32),
        )
    return module


def one_by_one(module: StackedExperts, hidden, index, weights):
    """The same sum with a product per expert, and a wait for the GPU."""
    k, chosen = index.shape[-1], index.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()

    def product(layer, e, x):
        rows = layer.out_features // module.num_experts
        mine = slice(e * rows, (e + 1) * rows)
        return frozen_linear(
            x, layer.weight[mine], layer.absmax[mine], None, layer.in_features, layer.quant_type, ""
        )

    made = []
    for e, x in enumerate(hidden[order // k].split(counts)):
        if not len(x):
            continue
        gate, up = product(module.gate_up_proj, e, x).chunk(2, dim=-1)
        made.append(product(module.down_proj, e, module.act_fn(gate) * up))
    made = torch.cat(made) * weights.flatten()[order, None]
    return made[order.argsort()].unflatten(0, (-1, k)).sum(1).to(hidden.dtype)


def measured(forward, inputs, repeats: int, device) -> tuple[float, float, float]:
    """Median ms of a forward and of a forward + backward, and GiB that they took at the most."""

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    once, both = [], []
    for i in range(repeats + 2):
        if i == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        y = forward(*inputs)
        wait()
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        wait()
        once.append(middle - start)
        both.append(time.perf_counter() - start)
        inputs[0].grad = None
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return *(1e3 * statistics.median(times[2:]) for times in (once, both)), peak


def as_graph(forward, inputs):
    """Whether a forward and backward can be captured in a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward(*inputs).sum().backward()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            forward(*inputs).sum().backward()
        graph.replay()
        torch.cuda.synchronize()
        return "captured"
    except RuntimeError as error:
        return f"not captured: {str(error).splitlines()[0][:80]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="Qwen3-30B-A3B,Mixtral-8x7B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    options, device = parser.parse_args(), rank_device("auto")
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch "
        f"{torch.__version__}, {options.tokens} tokens, NF4, bf16\n"
    )
    print("| model | experts | forward ms | forward + backward ms | peak GiB | against the loop |")
    print("|---|---|---|---|---|---|")
    for name in options.models.split(","):
        torch.manual_seed(0)
        sizes = MODELS[name]
        module = random_experts(device=device, **sizes)
        hidden = torch.randn(options.tokens, sizes["hidden"], device=device, dtype=torch.bfloat16)
        scores, index = torch.rand(options.tokens, sizes["experts"], device=device).topk(
            sizes["chosen"]
        )
        inputs = hidden.requires_grad_(), index, (scores / scores.sum(1, keepdim=True)).bfloat16()
        expected, notes = one_by_one(module, *inputs).detach(), []
        adapted = with_lora(random_experts(device=device, **sizes), options.rank)
        ways = {
            "one by one": lambda *given, m=module: one_by_one(m, *given),
            "grouped": module,
            "grouped, compiled": torch.compile(module),
            f"grouped, LoRA r={options.rank}": adapted,
            "the same, compiled": torch.compile(adapted),
        }
        for way, forward in ways.items():
            with torch.no_grad():
                found = forward(*inputs)
            apart = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
            forward_ms, step_ms, peak = measured(forward, inputs, options.repeats, device)
            against = "" if "LoRA" in way or "same" in way else f"{apart:.1e}"
            print(
                f"| {name} | {way} | {forward_ms:.2f} | {step_ms:.2f} | {peak:.2f} | {against} |",
                flush=True,
            )
            torch.compiler.reset()
        if device.type == "cuda":
            notes.append(f"{name} as a CUDA graph: {as_graph(adapted, inputs)}")
        print(*notes, sep="\n", end="\n" if notes else "")


if __name__ == "__main__":
    main()
