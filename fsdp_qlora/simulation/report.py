"""What a simulation found, beside the estimate, as text or JSON."""

from __future__ import annotations

from dataclasses import asdict

from .ranks import Simulated

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_json(found: Simulated) -> dict:
    """All of it, in bytes."""
    return asdict(found)


def report(found: Simulated) -> str:
    """Tables for people."""
    nodes = found.world_size // found.gpus_per_node
    alike = (
        f"{found.simulated_blocks} of {found.blocks} equal blocks simulated, the others multiplied"
        if found.simulated_blocks < found.blocks
        else f"all {found.blocks} blocks simulated"
    )
    lines = [
        f"{found.model_name} on {found.world_size} ranks ({nodes} x {found.gpus_per_node}), "
        f"{found.strategy}, each copy of the weights on {found.shard_ranks}",
        f"{found.accumulation} x {found.tokens} tokens per rank and step; {alike}",
        "",
        f"{'rank 0 holds':<16}{'simulated':>14}{'estimated':>14}",
    ]
    memory = [(part, size, found.estimated_memory[part]) for part, size in found.memory.items()]
    memory.append(("together", *map(sum, zip(*(m[1:] for m in memory), strict=True))))
    lines += [f"{part:<16}{_size(a):>14}{_size(b):>14}" for part, a, b in memory]
    lines += ["", f"{'per step':<16}{'simulated':>14}{'':>8}{'estimated':>14}"]
    for name in sorted({*found.collectives, *found.estimated_collectives}):
        sides = (found.collectives.get(name), found.estimated_collectives.get(name))
        texts = [f"{_size(s.bytes):>14}{f'in {s.calls}':>8}" if s else " " * 22 for s in sides]
        lines.append(f"{name:<16}{''.join(texts)}".rstrip())
    lines += ["", f"{'first machine':<16}{'simulated':>14}{'':>8}{'estimated':>14}"]
    for name, kind in (("reads at start", "read_bytes"), ("a checkpoint", "checkpoint_bytes")):
        own, other = (_size(getattr(f, kind)) for f in (found.files, found.estimated_files))
        lines.append(f"{name:<16}{own:>14}{'':>8}{other:>14}")
    lines[-1] += f", in {found.files.checkpoint_files} files"
    sent = found.messages
    lines += [
        "",
        f"a rank's messages to the store: {sent.rendezvous} at the rendezvous, {sent.group} for gloo's "
        f"process group, {sent.step} in a step",
    ]
    return "\n".join(lines)


def _size(count: float) -> str:
    """Bytes in the unit that leaves up to four digits before the point."""
    for unit in _UNITS:
        if count < 10 * 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
