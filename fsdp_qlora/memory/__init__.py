"""What a GPU need not hold: activations computed again or on the host, weights on the host, logits.

Modules, each importing only from those before it: checkpointing_policy, tiled_mlp, pinned_memory,
activation_offload, weight_streaming, vocab_parallel, logit_map, chunked_cross_entropy.
"""
