"""Activation checkpointing policies: what --activation_policy can be, for each decoder block.

`memory/checkpointing_policy.py` carries them out; `estimate/activations.py` counts what each keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a block keeps of its forward for its backward, beside its input."""

    name: str
    recomputes: bool  # the block is checkpointed: what it does not keep runs again
    keeps_attention: bool  # attention's output and log-sum-exp
    keeps_linears: bool  # the outputs of linear layers

    @property
    def is_selective(self) -> bool:
        """Whether some of a checkpointed block's outputs are kept."""
        return self.recomputes and (self.keeps_attention or self.keeps_linears)

    @property
    def keeps_attention_alone(self) -> bool:
        """Whether attention's outputs are all that a checkpointed block keeps beside its input."""
        return self.recomputes and self.keeps_attention and not self.keeps_linears

    @property
    def reruns_mlp(self) -> bool:
        """Whether the MLP runs again in backward, and so can be tiled (--mlp_tiles)."""
        return self.recomputes and not self.keeps_linears


# From the least memory to the most.
_ROWS = (
    Policy(name="recompute_all", recomputes=True, keeps_attention=False, keeps_linears=False),
    Policy(name="keep_attention", recomputes=True, keeps_attention=True, keeps_linears=False),
    Policy(name="keep_linears", recomputes=True, keeps_attention=True, keeps_linears=True),
    Policy(name="keep_all", recomputes=False, keeps_attention=True, keeps_linears=True),
)
POLICIES = {row.name: row for row in _ROWS}
PolicyName = Literal["recompute_all", "keep_attention", "keep_linears", "keep_all"]
