"""What is known of models and GPUs by name, and the machine a run is estimated for. No torch."""
