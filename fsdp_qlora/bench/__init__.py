"""Measure configurations on random tokens: single ones, or grids of them with tables and pictures.

Each measurement is a row, one JSON object a line; running out of memory is a row too. What is planned
for a run is measured on the run's own rows.

Modules, each importing only from those before it: row, grid, cell_processes, auto, batches,
measure, ceilings, cell_worker, accuracy, tables, pictures, command. Only batches, measure, ceilings
and cell_worker, which run on the ranks, import torch.
"""
