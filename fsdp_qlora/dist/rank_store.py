"""What ranks tell each other through torchrun's store: that they are here, an error, and short texts.

torchrun keeps one store for all starts of a run, and the restart count that it exports is each host's
own: an agent does not count a restart that another host's failure caused. So no name tells which store
keys belong to a rank that is gone. Here every rank brings a fresh name, and a rendezvous is complete when
rank 0 has listed the names that answered its own.

A rank with an error exits, and its launcher then ends the others, which may not have come that far. So it
broadcasts the error first, and waits until each has printed it in its own log.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store

POLL_SECONDS, _REPEAT = 0.05, 4  # an error is sent again at every fourth look
_PATIENCE_SECONDS = 10  # for ranks to hear of an error
_LAST_WORDS = "last words"  # of a rank that has waited so long for them
_OFTEN = 64  # ranks; where there are more, each asks less often, or one store could not answer all


# What gloo, NCCL and the store say when another process is gone; none of them has a type for it.
_GONE = (
    "closed by peer",
    "reset by peer",
    "pair closure",
    "Broken pipe",
    "remote process exited",
    "Timed out waiting",
    "Socket Timeout",
    "failed to recv",
)


def is_lost_connection(error: Exception) -> bool:
    """Whether an exception only says that another rank ended, or that its machine can't be reached."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


class ErrorOnAnotherRank(ValueError):
    """Another rank found that the run can't start; the message is that rank's."""


def rendezvous(
    store: Store, rank: int, world_size: int, timeout: timedelta, errors: ErrorKey
) -> Store:
    """Return when all ranks are here: a store of their own, without a trace of earlier starts.

    Raises ErrorOnAnotherRank if one says that it will not come, OSError after `timeout`.
    """
    own, answered = uuid.uuid4().hex, None
    deadline = time.monotonic() + timeout.total_seconds()
    poll = POLL_SECONDS * max(1, world_size / _OFTEN)
    if rank == 0:
        store.set("start", own)
    while time.monotonic() < deadline:
        if rank == 0:
            answers = [f"{own}/{other}" for other in range(1, world_size)]
            if not answers or store.check(answers):
                store.set(f"{own}/all", json.dumps(_values(store, answers)))
                return PrefixStore(own, store)
        elif store.check(["start"]):
            start = store.get("start").decode()
            if start != answered:
                store.set(f"{start}/{rank}", own)
            answered = start
            if store.check([f"{start}/all"]) and own in json.loads(store.get(f"{start}/all")):
                return PrefixStore(start, store)
        if told := errors.look():
            raise ErrorOnAnotherRank(told.text)
        time.sleep(poll)
    raise OSError(f"not all {world_size} ranks reached the rendezvous within {timeout}")


class _Error:
    """An error as `rank` sent it; the text names the rank where it occurred."""

    def __init__(self, value: str):
        self.name, self.rank, self.text, _ = json.loads(value)


class ErrorKey:
    """The store key of errors. Only a value that changes comes from a living rank.

    is_new: the store began with this start of the ranks, so what one left that is gone counts too.
    """

    def __init__(self, store: Store, is_new: bool = False):
        self.store, self.before, self.is_new = store, None, is_new

    def look(self) -> _Error | None:
        """The error that a rank is sending now, or has left for those that came later."""
        if self.is_new and self.store.check([_LAST_WORDS]):
            left = _Error(self.store.get(_LAST_WORDS).decode())
            self.store.delete_key(_LAST_WORDS)  # the rank that hears it sends it on
            return left
        if not self.store.check(["error"]):
            return None
        value = self.store.get("error").decode()
        before, self.before = self.before, value
        return _Error(value) if before not in (None, value) else None


def broadcast_error(
    store: Store, rank: int, world_size: int, text: str, patience_s: float = _PATIENCE_SECONDS
):
    """Send an error that this rank has printed until every other rank has printed one, or time is up."""
    own, errors = uuid.uuid4().hex, ErrorKey(store)
    silent = set(range(world_size)) - {rank}
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    with suppress(RuntimeError):  # the store is gone, and with it whoever could hear
        for look in range(int(patience_s / POLL_SECONDS)):
            if look % _REPEAT == 0:
                store.set("error", json.dumps([own, rank, text, look]))
            if (told := errors.look()) and told.name != own:
                store.set(f"{told.name}/heard/{rank}", "")
                silent.discard(told.rank)
            while silent and store.check([f"{own}/heard/{min(silent)}"]):
                silent.remove(min(silent))
            if not silent:
                return
            time.sleep(POLL_SECONDS)
        store.set(_LAST_WORDS, json.dumps([own, rank, text, 0]))


def _values(store: Store, keys: list[str]) -> list[str]:
    """The texts of keys that are all there, in one message."""
    return [value.decode() for value in store.multi_get(keys)] if keys else []


class RankStore:
    """Where threads of the ranks leave each other short texts, without a collective."""

    def __init__(self, store: Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size

    def post(self, topic: str, text: str):
        """Leave this rank's text on a topic."""
        self.store.set(f"{topic}/{self.rank}", text)

    def read(self, topic: str, rank: int) -> str | None:
        """A rank's text, or None if there is none yet; does not wait."""
        key = f"{topic}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def read_all(self, topic: str) -> list[str | None]:
        """What `read` gives of every rank, in two messages, and a few more for each that is None."""
        return self._read([f"{topic}/{rank}" for rank in range(self.world_size)])

    def _read(self, keys: list[str]) -> list[str | None]:
        """The texts of these keys; halves are asked apart where one is missing."""
        if self.store.check(keys):
            return [*_values(self.store, keys)]
        if len(keys) == 1:
            return [None]
        middle = len(keys) // 2
        return self._read(keys[:middle]) + self._read(keys[middle:])

    def claim(self, topic: str) -> bool:
        """True for the first rank that claims the topic."""
        return self.store.compare_set(topic, "", str(self.rank)).decode() == str(self.rank)

    def wait_for_all(
        self, topic: str, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """The texts of all ranks in their order. Raises OSError if one does not come before that."""
        started = time.monotonic()
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        while not self.store.check(keys):
            if is_over() or time.monotonic() > started + timeout_s:
                waited, silent = time.monotonic() - started, self.read_all(topic).index(None)
                raise OSError(f"rank {silent} sent nothing for {waited:.0f} s")
            time.sleep(0.02)
        return _values(self.store, keys)
