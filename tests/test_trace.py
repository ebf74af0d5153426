"""The tables of a profile, from events written by hand."""

from __future__ import annotations

import random

import pytest

from fsdp_qlora.observe.trace import (
    Span,
    device_spans,
    kind_of,
    length,
    number_of_steps,
    summarize,
    summary_table,
    union,
    without,
)


def kernel(
    name: str, start: float, duration: float, stream: int = 7, category: str = "kernel"
) -> dict:
    return dict(ph="X", cat=category, name=name, ts=start, dur=duration, tid=stream)


PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def parts(events: list[dict]) -> dict:
    return {p.kind: p for p in summarize(device_spans(events)).parts}


def test_communication_is_exposed_where_nothing_is_computed():
    """0 to 100 a product, 50 to 150 a gather: half of it is hidden."""
    found = parts([kernel(PRODUCT, 0, 100), kernel(GATHER, 50, 100, stream=20)])
    assert found["all-gather"].seconds == pytest.approx(100e-6)
    assert found["all-gather"].exposed == pytest.approx(50e-6)
    assert found["products"].exposed is None


def test_overlapping_collectives_hide_nothing_of_each_other():
    found = parts([kernel(PRODUCT, 0, 10), kernel(GATHER, 20, 30, 20), kernel(SCATTER, 30, 30, 24)])
    assert found["all-gather"].exposed == pytest.approx(30e-6)
    assert found["reduce-scatter"].exposed == pytest.approx(30e-6)


def test_several_kernels_hide_one_collective_with_its_gaps_left():
    found = parts(
        [
            kernel(GATHER, 0, 100, 20),
            kernel(PRODUCT, 10, 20),
            kernel("triton_red_fused", 40, 20),
            kernel(PRODUCT, 90, 50),
        ]
    )
    assert found["all-gather"].exposed == pytest.approx((100 - 20 - 20 - 10) * 1e-6)


def test_copies_are_neither_computing_nor_communication():
    found = parts(
        [
            kernel("Memcpy HtoD (Pinned -> Device)", 0, 40, 30, "gpu_memcpy"),
            kernel(GATHER, 0, 40, 20),
            kernel(PRODUCT, 30, 30),
        ]
    )
    assert found["copies"].exposed == pytest.approx(30e-6)
    assert found["all-gather"].exposed == pytest.approx(30e-6)


def test_idle_is_when_no_stream_works():
    summary = summarize(
        device_spans([kernel(PRODUCT, 0, 10), kernel(GATHER, 20, 10, 20), kernel(PRODUCT, 35, 5)])
    )
    assert summary.seconds == pytest.approx(40e-6) and summary.idle == pytest.approx(15e-6)


@pytest.mark.parametrize(
    "name, kind",
    [
        (GATHER, "all-gather"),
        (SCATTER, "reduce-scatter"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all-reduce"),
        ("ncclSymkDevKernel_AllGather_LL", "all-gather"),
        ("ncclDevKernel_SendRecv", "other communication"),
        (PRODUCT, "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "quantize, dequantize"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_mul_silu_3", "other compute"),
        ("gloo:all_gather", "all-gather"),
        ("aten::mm", "products"),
        ("aten::mul", "other compute"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ],
)
def test_names_are_sorted_into_kinds(name, kind):
    assert kind_of(name) == kind


def test_on_the_cpu_torchs_operators_compute_and_gloo_threads_communicate():
    events = [
        dict(ph="X", cat="cpu_op", name="fsdp_qlora::adapted_linear", ts=0, dur=100, tid=1),
        dict(ph="X", cat="cpu_op", name="aten::mm", ts=10, dur=50, tid=1),
        dict(ph="X", cat="cpu_op", name="aten::resolve_conj", ts=11, dur=1, tid=1),
        dict(ph="X", cat="user_annotation", name="gloo:all_gather", ts=40, dur=40, tid=9),
        dict(ph="X", cat="cpu_op", name="aten::copy_", ts=40, dur=40, tid=9),
        dict(ph="X", cat="cpu_op", name="c10d::allgather_", ts=120, dur=9, tid=1),
        dict(ph="X", cat="user_annotation", name="ProfilerStep#4", ts=0, dur=130, tid=1),
        dict(ph="i", cat="Trace", name="Record Window End", ts=130, tid=1),
    ]
    found = parts(events)
    assert set(found) == {"products", "all-gather"}
    assert found["all-gather"].exposed == pytest.approx(20e-6)
    assert number_of_steps(events) == 1


def test_interval_arithmetic_equals_counting_single_units():
    draw = random.Random(0)
    for _ in range(200):
        ours, others = (
            [(a, a + draw.randint(1, 9)) for a in draw.sample(range(60), 6)] for _ in range(2)
        )
        units = lambda intervals: {u for a, b in intervals for u in range(a, b)}  # noqa: E731
        left = without(union(ours), union(others))
        assert units(left) == units(ours) - units(others)
        assert length(left) == len(units(left)) and left == sorted(left)


def test_the_table_divides_by_the_steps_and_marks_what_is_exposed():
    spans = [Span("products", 0, 6000, 7), Span("all-gather", 5000, 8000, 20)]
    lines = summary_table(summarize(spans, steps=2)).splitlines()
    assert lines[0] == "one of 2 recorded steps: 4.0 ms"
    assert lines[3].split() == ["all-gather", "0", "1.50", "37.5%", "1.00"]
    assert summarize([]).parts == []
