"""A run: all that precedes the first step, a step, what stops a run and brings it back."""
