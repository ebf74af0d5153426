"""Frozen weights in few bits: how they are packed, their kernels, and layers that multiply by them.

Modules, each importing only from those before it: blocks64, absmax, fourbit, int8, hqq, formats,
kernels, fp8_kernels, kept, fp8, quantize, grouped.
"""
