"""The commands beside `train`, one file each.

Modules, each importing only from those before it: guide, data, dryrun, probe, generate, delivery,
reporting, doctor, calibrate.
"""
