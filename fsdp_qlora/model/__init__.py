"""What a causal language model is made of: its decoder blocks, its attention."""
