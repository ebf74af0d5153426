"""Start the ranks of a run, stop it with its state saved, and find what went wrong.

Modules, each importing only from those before it: signals, closed_terminal, notify, local_rendezvous,
launcher, lock, agreement, bad_steps, frozen_weights, watchdog.
"""
