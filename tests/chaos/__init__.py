"""Runs that are killed, damaged, signalled and stalled at random.

`python -m tests.chaos` is the long form."""
