"""Frozen weights in few bits: how they are packed, their kernels, and layers that multiply by them.

Modules, each importing only from those before it: absmax, hqq, formats,
kernels, fp8_kernels, fp8_weight_cache, fp8, quantize.
"""
