"""One weight as it is stored: whole, in one rank's shard, and the bytes of a quantized value."""

from __future__ import annotations

from dataclasses import dataclass

from ..choices import FORMATS
from ..plan import BYTES, Plan

BLOCKSIZE = 64  # weights per absmax value (quantization/quantize.py)


@dataclass(frozen=True)
class Weight:
    """One parameter as it is stored and sharded: rows on dim 0, padded to whole shards."""

    kind: str  # the part of the table it belongs to
    rows: int
    row_bytes: float
    values: int  # numbers per row; 0 where the bytes are packed or frozen
    trained: bool
    by_rows: bool = (
        False  # of the vocabulary, frozen: never gathered by FSDP (memory/vocab_parallel.py)
    )

    def shard(self, ranks: int) -> float:
        """Bytes of one rank's part."""
        return -(-self.rows // ranks) * self.row_bytes

    def shard_values(self, ranks: int) -> int:
        """Trained numbers in one rank's part."""
        return -(-self.rows // ranks) * self.values if self.trained else 0


def plain(kind: str, rows: int, width: int, dtype: str, trained: bool) -> Weight:
    """A weight (rows, width) in a float dtype."""
    by_rows = kind in ("embedding", "head") and not trained
    return Weight(kind, rows, width * BYTES[dtype], width, trained, by_rows)


def packed_bits(quant: str) -> int:
    """Bits of a quantized value, without its scale (quantization/formats.py)."""
    return FORMATS[quant].bits


def scale_bytes(blocks: int, plan: Plan) -> int:
    """Bytes of a row's scales: one number a block, HQQ has two; in 8 bits a row adds its range."""
    return FORMATS[plan.quantization.quant].scales * blocks * plan.quantization.absmax_bytes
