"""Frozen weights in few bits: how they are packed, their kernels, and layers that multiply by them."""
