"""An estimate for people, on one screen, and for programs."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap

from ..config.settings import changed_settings, counted, shown
from .cost import OwnedCost, RunCost
from .lengths import Rows, packing_line
from .peak import EXPLAINED
from .question import Estimate
from .stored_weight import packed_bits

_STEP_EXPLAINED = dict(
    linears="large products",
    attention="attention",
    recompute="recomputed in backward",
    adapters="products of adapters' rank",
    activations="passes over activations",
    dequantization="dequantization",
    quantization="tokens to fp8",
    loss="loss over the vocabulary",
    launches="GPU waits for the host",
    communication="communication not hidden",
    offload="host copies not hidden",
    optimizer="optimizer",
    reference="reference policy",
    generation="generation of answers",
)
_HOST_EXPLAINED = dict(
    processes="processes",
    weights="weights",
    gradients="gradients",
    optimizer="optimizer states",
    activations="activations",
)
WIDE = 38  # columns of each table: two of them and a gap are within 80


def report(
    found: Estimate, cost: RunCost | None = None, examples: int = 0, rows: Rows | None = None
) -> str:
    """The whole answer as text; `cost` is of so many `examples`, that of all `rows` is found here."""
    after = [
        verdict(found),
        *([_cost_line(found, cost, examples, rows)] if cost else []),
        *([owned_line(cost.owned)] if cost and cost.owned else []),
        *data_notes(found, rows),
        *notes(found),
    ]
    tables = _side_by_side(_memory_lines(found), _step_lines(found))
    subject, after = (
        [line for text in texts for line in wrapped(text)]
        for texts in (subject_lines(found), after)
    )
    return "\n".join([*subject, "", *tables, "", *after])


def wrapped(text: str) -> list[str]:
    """A line within the terminal's width, or several: what follows is indented."""
    return wrap(
        text,
        max(40, get_terminal_size().columns - 1),
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


def subject_lines(found: Estimate) -> list[str]:
    """What was asked, in three lines."""
    shape, config, plan = found.shape, found.config, found.plan
    quantized = config.quant != "none"
    base = (
        f"{packed_bits(plan.quantization.quant)}-bit {config.quant} base"
        if quantized
        else "16-bit base"
    )
    if config.adapter == "none":
        how = f"{config.trained_modules or 'all weights'} trained"
    elif shape.new_blocks:
        how = f"{base}, {shape.new_blocks} of the blocks new and trained"
    else:
        how = f"{base}, {config.adapter} r={config.lora_rank} on {config.lora_target_modules}"
    return [
        f"{shape.name}: {_billions(shape.total_params())} weights, {shape.layers} blocks; {how}",
        found.machine.describe(),
        settings_line(found)
        + f"; {plan.batch.micro_batch_size} x {plan.batch.context_length:,} tokens per GPU"
        + (f", {plan.batch.accumulation} times a step" if plan.batch.accumulation > 1 else "")
        + (", replayed from CUDA graphs" if plan.replays(shape) else ""),
    ]


def settings_line(found: Estimate) -> str:
    """The settings that decide, as they are typed."""
    plan = found.plan
    parts = [plan.sharding.strategy, plan.memory.activation_policy]
    if plan.batch.ranks_per_row > 1:
        parts.append(f"{plan.batch.ranks_per_row} GPUs share a row")
    if plan.memory.cpu_offload:
        parts.append("CPU offload")
    if plan.memory.activation_offload:
        parts.append("activation offload")
    if plan.memory.mlp_tiles > 1:
        parts.append(f"MLP in {plan.memory.mlp_tiles} tiles")
    if plan.memory.attention_tiles > 1:
        parts.append(f"attention in {plan.memory.attention_tiles}")
    if plan.quantization.compute_dtype == "fp8":
        parts.append("fp8" + ", kept" * plan.quantization.keep_fp8_weights)
    if not plan.loop.compile:
        parts.append("not compiled")
    return ", ".join(parts)


def _billions(count: float) -> str:
    """A number of weights, short."""
    if count < 1e6:
        return f"{count:,.0f}"
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _memory_lines(found: Estimate) -> list[str]:
    """GiB by part, the sum, the limit and the host's."""
    use, machine = found.memory, found.machine
    lines = [row("memory per GPU", "GiB")]
    lines += [
        row("  " + EXPLAINED[name], f"{gib:.2f}") for name, gib in use.parts.items() if gib >= 0.005
    ]
    lines += [row("needed", f"{use.total:.2f}"), row("allowed", f"{machine.memory_gib:.2f}")]
    host = "host memory" if machine.nodes == 1 else "host memory per machine"
    return lines + [row(host, f"{use.host:.1f}")]


def _step_lines(found: Estimate) -> list[str]:
    """Seconds by part, the sum and the speed."""
    step = found.step
    lines = [row("one optimizer step", "s")]
    lines += [
        row("  " + _STEP_EXPLAINED[name], f"{seconds:.3f}")
        for name, seconds in step.parts.items()
        if seconds >= 0.0005
    ]
    lines += [
        row("step", f"{step.total:.3f}"),
        row("tokens/s per GPU", f"{step.tokens_per_second_per_gpu:,.0f}"),
    ]
    if found.machine.world_size > 1:
        whole = step.tokens_per_second_per_gpu * found.machine.world_size
        lines.append(row("tokens/s", f"{whole:,.0f}"))
    return lines


def row(name: str, value: str) -> str:
    """A name and a number, aligned."""
    return f"{name:<{WIDE - 8}}{value:>8}"


def _side_by_side(left: list[str], right: list[str]) -> list[str]:
    """Two tables next to each other."""
    return [f"{a:<{WIDE}}   {b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]


def verdict(found: Estimate) -> str:
    """Whether it fits, and what is short if not."""
    use, machine = found.memory, found.machine
    if not found.fits_gpu:
        return (
            f"does not fit: {use.total - machine.memory_gib:.1f} GiB more than the GPU has, most of "
            f"it {EXPLAINED[use.largest]} ({use.parts[use.largest]:.1f} GiB)"
        )
    if not found.fits_host:
        return (
            f"does not fit: the host needs {use.host:.0f} GiB and has {machine.host_memory_gib:.0f}"
        )
    return f"fits, {machine.memory_gib - use.total:.1f} GiB left; peak at: {use.moment}"


def _cost_line(found: Estimate, cost: RunCost, examples: int, rows: Rows | None) -> str:
    """Wall time and money of a run of so many rows like `rows`, or full ones."""
    config = found.config
    length = rows.mean_length if rows else config.context_length
    tokens = examples * length * config.num_epochs
    epochs = f" x {config.num_epochs:g} epochs" if config.num_epochs != 1 else ""
    return (
        f"{counted(examples, 'row')} x {length:,.0f} tokens{epochs} = "
        f"{_total_tokens(tokens)} tokens: {duration(cost.hours)}, {money(cost)}"
    )


def owned_line(owned: OwnedCost) -> str:
    """What a run costs on cards of one's own."""
    power = f"{owned.watts:.0f} W" if owned.watts else "power of a card that is not known"
    return (
        f"on your own cards: ${owned.dollars:,.2f} (${owned.card_price:,.0f} a card, written off in "
        f"{owned.years:g} years of use around the clock; {power} at ${owned.kwh_price:.2f} per kWh)"
    )


def data_notes(found: Estimate, rows: Rows | None) -> list[str]:
    """What the estimate says of the data: steps, tokens, time and money; and what packing would give."""
    if not rows or not found.batches:
        return []
    share = f"{found.batches.share:.0%} of the places hold a token"
    about = "packed" if found.config.packing else "padded"
    lines = [
        f"the data: rows of {rows.mean_length:,.0f} tokens on average, {about}: {share}; tokens/s "
        "count no padding"
    ]
    cost = found.run_of_data(rows)
    if cost and rows.num_rows and found.epochs and found.steps:
        tokens = rows.num_rows * rows.mean_length * found.epochs
        lines.append(
            f"{counted(rows.num_rows, 'row')}, {_total_tokens(tokens)} tokens in "
            f"{counted(found.steps, 'step')}: {duration(cost.hours)}, {money(cost)}"
        )
    line = packing_line(
        rows, found.config, found.machine.world_size, on_gpu=not found.machine.is_cpu
    )
    return lines + [line] * bool(line)


def _total_tokens(count: float) -> str:
    """Tokens of a run, short."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,.0f}"


def money(cost: RunCost) -> str:
    """Dollars of a run, and the price that they follow from."""
    if cost.dollars is None:
        return "no price known: give --prices or --price_per_hour"
    return f"${cost.dollars:,.2f} at ${cost.price:.2f} per GPU and hour ({cost.price_source})"


def duration(hours: float) -> str:
    """Hours as people say them."""
    minutes = hours * 60
    if minutes < 2:
        return f"{minutes * 60:.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


_MEASURED_MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")  # docs/performance.md has their rows


def notes(found: Estimate) -> list[str]:
    """What to know about the figures."""
    lines, gpu = [], found.machine.gpu
    if not gpu.calibrated:
        lines.append(
            f"uncalibrated: speeds are from {gpu.source}, at the share that an H100 reaches; "
            "--gpu_spec takes measured ones"
        )
    if not found.shape.known_family:
        lines.append(f"{found.shape.family} is not a known family: taken to be built like Llama")
    if found.shape.experts and found.shape.family not in _MEASURED_MIXTURES:
        lines.append(
            f"{found.shape.experts} experts, {found.shape.experts_per_token} for each token: "
            "no run of such a model was measured against these figures"
        )
    return lines


def as_json(
    found: Estimate, cost: RunCost | None = None, examples: int = 0, rows: Rows | None = None
) -> dict:
    """The whole answer as a dict of plain values."""
    use, step, machine = found.memory, found.step, found.machine
    answer = dict(
        model=dict(
            name=found.shape.name,
            weights=found.shape.total_params(),
            num_hidden_layers=found.shape.layers,
        ),
        machine=dict(
            gpu=machine.gpu.name,
            calibrated=machine.gpu.calibrated,
            source=machine.gpu.source,
            gpus=machine.gpus,
            nodes=machine.nodes,
            memory_gib=machine.memory_gib,
            host_memory_gib=machine.host_memory_gib,
            link_gb_s=machine.link_gb_s or machine.gpu.peer_gb_s(machine.gpus),
            host_link_gb_s=machine.gpu.host_gb_s,
        ),
        settings={k: shown(v) for k, v in changed_settings(found.config).items()},
        batch_size=found.plan.batch.micro_batch_size,
        accumulation=found.plan.batch.accumulation,
        memory_gib=use.parts,
        allocated_gib=use.peak_allocated,
        reserved_gib=use.peak_reserved,
        needed_gib=use.total,
        peak_at=use.moment,
        fits=found.fits,
        host_gib=use.host_parts,
        host_needed_gib=use.host,
        step_seconds=step.parts,
        seconds_per_step=step.total,
        tokens_per_second_per_gpu=step.tokens_per_second_per_gpu,
    )
    if cost:
        answer["run"] = asdict(cost) | dict(examples=examples, epochs=found.config.num_epochs)
    if rows and found.batches:
        answer["data"] = asdict(found.batches) | dict(
            rows=rows.num_rows,
            tokens_per_row=rows.mean_length,
            run_steps=found.steps,
            run=asdict(cost) if (cost := found.run_of_data(rows)) else None,
        )
    return answer
