"""What a GPU need not hold: activations computed again or on the host, weights on the host, logits."""
