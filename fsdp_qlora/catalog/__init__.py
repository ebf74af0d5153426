"""What is known of models and GPUs by name, and the machine a run is estimated for. No torch.

Modules, each importing only from those before it: families, known_models, blocks, arch,
shapes, llama_pro, gpu, known_gpus, hardware, calibration, machine.
"""
