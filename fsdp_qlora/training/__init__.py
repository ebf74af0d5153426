"""A run, top down: what a rank does, the run it trains, the loop over steps, one step.

    rank -> trainer -> loop -> step

lifecycle/ starts and stops it, preflight/ checks and reads what it needs before it begins.

Modules, each importing only from those before it: loss_scaler, step, cuda_graphs, describe, step_log,
loop, trainer, rank.
"""
