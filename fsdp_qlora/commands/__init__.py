"""The commands beside `train`, one file each."""
