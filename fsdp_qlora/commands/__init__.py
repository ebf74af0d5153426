"""The commands beside `train`, one file each.

Modules, each importing only from those before it: planning, check, data, dryrun, probe, generate,
export, report, doctor, calibrate, simulate.
"""
