"""Optimizers: what --optimizer can be. `optim/` builds them and has those that torch lacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}  # 8-bit codes have an fp32 scale a block

# An optimizer that updates weights together joins small tensors up to so many values, and takes a
# large one in chunks: the float32 copies of a chunk's states take 0.5 GiB.
TOGETHER = 2**24
CHUNK = 2**26


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One way to update the trained weights."""

    name: str
    factory: str  # "module:name" of the class, which takes (parameters, lr, **settings)
    settings: dict[str, Any] = field(default_factory=dict)
    decays: bool = False  # takes weight_decay too
    states: int  # values per trained weight
    state_dtype: str | None = None  # None: the weight's
    rounds_stochastically: bool = False  # bf16 weights keep updates too small for them
    updates_together: bool = False  # small tensors joined, large ones in chunks
    scales_steps: bool = True  # a step is about as long as --lr, whatever the gradient's size

    def state_bytes(self, own: float) -> float:
        """Bytes of the states of one trained weight, which itself has `own` bytes."""
        return self.states * (_STATE_BYTES[self.state_dtype] if self.state_dtype else own)

    def working_bytes(self, own: float) -> float:
        """The same while they are updated: 8-bit states are unpacked to float32."""
        return 4.0 * self.states if self.state_dtype == "int8" else self.state_bytes(own)


_ROWS = (
    Optimizer(
        name="adamw",
        factory="torch.optim:AdamW",
        settings=dict(fused=True),
        decays=True,
        states=2,
    ),
    Optimizer(
        name="adamw_bf16",
        factory="fsdp_qlora.optim.adamw:CompactAdamW",
        settings=dict(state_dtype="bf16"),
        decays=True,
        states=2,
        state_dtype="bf16",
        rounds_stochastically=True,
        updates_together=True,
    ),
    Optimizer(
        name="adamw_8bit",
        factory="fsdp_qlora.optim.adamw:CompactAdamW",
        settings=dict(state_dtype="8bit"),
        decays=True,
        states=2,
        state_dtype="int8",
        rounds_stochastically=True,
        updates_together=True,
    ),
    Optimizer(
        name="adafactor",
        factory="fsdp_qlora.optim.adafactor:Adafactor",
        states=0,  # one value for each row and column
        state_dtype="fp32",
        rounds_stochastically=True,
    ),
    Optimizer(
        name="adam",
        factory="torch.optim:Adam",
        settings=dict(fused=True),
        states=2,
    ),
    Optimizer(name="sgd", factory="torch.optim:SGD", states=0, scales_steps=False),
    Optimizer(name="adadelta", factory="torch.optim:Adadelta", states=2, scales_steps=False),
)
OPTIMIZERS = {row.name: row for row in _ROWS}
OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "adafactor", "adam", "sgd", "adadelta"]


def names_where(fact: str) -> list[str]:
    """The optimizers of whose row this fact is true."""
    return [row.name for row in OPTIMIZERS.values() if getattr(row, fact)]
