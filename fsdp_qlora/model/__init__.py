"""What a causal language model is made of: its decoder blocks, its attention.

Modules, each importing only from those before it: blocks, block_kinds, eager_calls, on_meta,
input_gradients, flash_attention_4, sinks, attention_kernels, attention, opaque_ops, own_rules, delta_rule,
delta_nets, state_space_scan, state_space_mixers, row_mixers, packing_probe, padding_free, part_probe,
sequence_parallel, wrappers, autocast, conv1d, trained_dtype.
"""
