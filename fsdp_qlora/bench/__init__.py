"""Measure configurations on random tokens: single ones, or grids of them with tables and pictures.

Each measurement is a row, one JSON object a line; running out of memory is a row too. Modules, each
importing only from those before it: row, grid, drive, auto, measure, ceilings, cells, accuracy,
tables, pictures. Only measure, ceilings and cells, which run on the ranks, import torch.

Modules, each importing only from those before it: row, grid, drive, auto, measure, ceilings, cells,
accuracy, tables, pictures, command.
"""
