"""What a causal language model is made of: its decoder blocks, its attention.

Modules, each importing only from those before it: experts, blocks, attention, autocast, conv1d,
stored, expansion.
"""
