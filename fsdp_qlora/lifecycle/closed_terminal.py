"""A run outlives its terminal: what it prints after that goes nowhere.

A closed terminal answers each write with an error, and a line about a step would end the run before it
could save, for ranks hear of the SIGHUP only from their launcher. Pure: no torch.
"""

from __future__ import annotations

import errno
import io
import os
import sys


class _Terminal(io.FileIO):
    """A terminal as a file; once it is closed, its descriptor writes to nowhere."""

    def write(self, data) -> int | None:
        """As FileIO's."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(data)


def outlive_terminal():
    """Print to terminals in this way from now on; to files and pipes as before."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or not stream.isatty():
            continue  # None: it was closed before
        raw = _Terminal(stream.fileno(), "w", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
            ),
        )
