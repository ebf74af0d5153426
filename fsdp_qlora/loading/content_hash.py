"""A hash of all that is read of a base's files, made on the way into the model.

The bytes of each tensor are cut into chunks. Who reads the first byte of a chunk hashes it, and reads on
to its end. So ranks hash little more than their own rows, and the hashes of all chunks are the same on
any number of ranks, for any cut into files. XXH3 sees every accident and keeps up with memory.
https://github.com/Cyan4973/xxHash
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from xxhash import xxh3_64, xxh3_128_hexdigest

from ..dist import all_reduce, gather_over_ranks, ranks_from_env

CHUNK = 2**18  # bytes
_READ = 2**25  # bytes that are read at once where nothing but the hash is wanted


class ContentHash:
    """Hashes of the chunks of a checkpoint's tensors, `stored` by their names in the files."""

    def __init__(self, stored: dict):
        self.stored = stored
        self.chunks = {
            name: np.zeros(-(-s.nbytes // CHUNK), dtype=np.int64)  # 0 is not read yet
            for name, s in stored.items()
        }
        self.known: dict[str, str] = {}  # hashes of tensors that need not be read, from a cache
        places = defaultdict(list)
        for name, s in stored.items():
            places[s.path].append((s.offset, name))
        self.places = {path: sorted(found) for path, found in places.items()}

    def take(self, span, data: memoryview):
        """Hash the chunks that begin in a part of a tensor that was read; from any thread."""
        if not span.nbytes:
            return
        places = self.places[span.path]
        _, name = places[bisect_right(places, (span.offset, "\U0010ffff")) - 1]
        whole, hashes = self.stored[name], self.chunks[name]
        first = span.offset - whole.offset
        last = first + span.nbytes
        for number in range(-(-first // CHUNK), -(-last // CHUNK)):
            start, stop = number * CHUNK, min((number + 1) * CHUNK, whole.nbytes)
            hashed = xxh3_64(data[start - first : stop - first])
            if stop > last:
                hashed.update(whole.bytes_of(last, stop).read().numpy())
            hashes[number] = hashed.intdigest() >> 1 or 1  # above 0, which is less than any

    def read_all(self, names: Iterable[str]):
        """Hash whole tensors that are not loaded, each rank its share of their chunks."""
        rank, ranks = ranks_from_env().rank, ranks_from_env().world_size

        def read(name: str):
            whole, count = self.stored[name], len(self.chunks[name])
            begin, end = (min(count * r // ranks * CHUNK, whole.nbytes) for r in (rank, rank + 1))
            for start in range(begin, end, _READ):
                part = whole.bytes_of(start, min(start + _READ, end))
                self.take(part, memoryview(part.read().numpy()))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, names))

    def gather(self):
        """Let every rank know all chunks. Raises ValueError on each if two have read different bytes."""
        own = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self.chunks.values()]))
        largest, cuts = own.clone(), np.cumsum([len(c) for c in self.chunks.values()])
        all_reduce(largest, dist.ReduceOp.MAX)
        odd = torch.nonzero((own != 0) & (own != largest)).flatten()
        name = list(self.chunks)[np.searchsorted(cuts, int(odd[0]), "right")] if len(odd) else None
        for rank, found in enumerate(gather_over_ranks(name)):
            if found:
                raise ValueError(
                    f"rank {rank}: --model_name holds another {found} than other "
                    "ranks read; give every rank the same files"
                )
        for name, part in zip(self.chunks, np.split(largest.numpy(), cuts), strict=False):
            self.chunks[name] = part

    def of_tensors(self) -> dict[str, str]:
        """The hash of each tensor of which something was read, once all chunks are gathered."""
        return self.known | {
            name: xxh3_128_hexdigest(chunks.tobytes())
            for name, chunks in self.chunks.items()
            if chunks.any()
        }

    def digest(self) -> str:
        """One hash of names, types, shapes and values of all tensors that were read by any rank."""
        self.gather()
        digest = hashlib.sha256()
        for name, hashed in sorted(self.of_tensors().items()):
            stored = self.stored[name]
            digest.update(f"{name} {stored.dtype} {tuple(stored.shape)} {hashed}\n".encode())
        return digest.hexdigest()


def stat_of(path: Path) -> list[int]:
    """What changes when a file is written or replaced, also by one of the same time and size."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
