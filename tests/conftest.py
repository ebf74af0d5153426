"""One thread per process: tests run beside each other's ranks, and idle OpenMP threads cost more."""
import torch

torch.set_num_threads(1)
