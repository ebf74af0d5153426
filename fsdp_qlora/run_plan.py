"""The plan of a run on the machine that it runs on: where settings, model and device meet.

`estimate.resolve` decides; here are the device as a `Machine`, and the lines that say what was chosen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from .catalog.arch import ModelShape
from .catalog.gpu import Gpu
from .catalog.hardware import find_gpu
from .catalog.llama_pro import expanded_shape
from .catalog.machine import Machine, cpu_machine, host_memory_here
from .catalog.shapes import shape_from_config
from .config import RunConfig
from .dist import print_main, ranks_from_env
from .estimate import leaves_open, resolve
from .loading import DTYPES, read_config
from .model.attention import choose_attention
from .plan import Plan
from .plan_draft import with_learning_rate


def plan_run(config: RunConfig, device: torch.device) -> Plan:
    """The plan of a run on its ranks; rank 0 prints what was chosen.

    Raises ValueError if an activation budget is too small even with every block recomputed.
    """
    if config.is_auto:
        raise ValueError(
            "--sharding_strategy, --batch_size and --activation_budget_gib auto are chosen "
            "by the train command; here give values, as `fsdp-qlora plan` prints them"
        )
    settings = read_config(config.model_name, **config.source)
    dtype = DTYPES[config.product_dtype]
    attention, _ = choose_attention(
        config.attn_implementation, config.packing, settings, device, dtype
    )
    shape = _shape_of(config, settings)
    plan = resolve(config, shape, _machine_of(device), attention=attention)
    plan = with_learning_rate(plan, settings.get_text_config().hidden_size)
    for line in plan.choices:
        print_main(line)
    return plan


def _machine_of(device: torch.device) -> Machine:
    """This run's ranks as the estimate sees them, each with a device like this one."""
    ranks = ranks_from_env()
    count = dict(gpus=ranks.local_world_size, nodes=ranks.nodes)
    if device.type != "cuda":
        return cpu_machine(**count)
    size = torch.cuda.mem_get_info(device)[1] / 2**30
    gpu = gpu_of(device) or find_gpu("h100")  # of a card that is not known only its size counts
    gpu = replace(gpu, name=torch.cuda.get_device_name(device), memory_gib=size)
    host = host_memory_here()
    return Machine(gpu=gpu, memory_gib=size, host_memory_gib=host, here=True, **count)


def gpu_of(device: torch.device) -> Gpu | None:
    """The catalogue's card of a device; None for the CPU and for cards that it does not have."""
    if device.type != "cuda":
        return None
    try:
        return find_gpu(torch.cuda.get_device_name(device))
    except ValueError:
        return None


def _shape_of(config: RunConfig, settings: PretrainedConfig) -> ModelShape | None:
    """The model's shape; None where it can't be told and nothing that is open needs it."""
    try:
        return expanded_shape(shape_from_config(settings.to_dict(), config.model_name), config)
    except ValueError:
        if leaves_open(config):
            raise
        return None
