"""A run: all that precedes the first step, a step, what stops a run and brings it back.

    launch -> rank -> prepare -> trainer -> loop -> step

Modules, each importing only from those before it: signals, terminal, notice, rendezvous, launch, lock,
prepare, sample, scaler, step, graphs, describe, steplog, frozen, faults, watchdog, loop, trainer, rank.
"""
