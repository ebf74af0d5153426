"""Settings of a run that follow from its model and its machine; what is chosen is printed once.

`RunConfig` knows neither, so this is where the two meet: before a model is built, or while it is on
the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import torch
from peft import LoraConfig
from torch import nn
from transformers import PretrainedConfig

from .adapters import lora_config
from .catalog.arch import ModelShape, shape_from_config
from .catalog.llama_pro import Expansion, expanded_shape, expansion_of
from .choices import OPTIMIZERS
from .config import AUTO, RunConfig
from .config.run import check_kept_stay
from .dist import print_main, ranks_from_env
from .estimate import Setup, choose_policies, keeps_fp8_weights, memory, setup_from_config
from .estimate.policies import SPARE_SHARE, choose_tiles
from .loading import DTYPES, read_config
from .loading.llama_pro import expanded_config
from .loading.tokenizer import grow_vocabulary, load_tokenizer
from .lora_init import LoraInit
from .model.attention import choose_attention
from .model.blocks import decoder_blocks
from .sharding import OnHost

TRAINED_SHARE = 1 / 8  # of a GPU that trained weights may take before they are offloaded too


def model_settings(config: RunConfig) -> tuple[PretrainedConfig, Expansion | None]:
    """config.json with --added_tokens and the new blocks of Llama-Pro; and these, if there are any."""
    settings = read_config(config.model_name, **config.source)
    if config.added_tokens:
        grow_vocabulary(
            settings,
            load_tokenizer(config.model_name, **config.source, added_tokens=config.new_tokens),
        )
    grown = expansion_of(config, settings.get_text_config().num_hidden_layers)
    return expanded_config(settings, grown) if grown else settings, grown


def with_choices(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with what the estimate chooses on this device in its place.

    That is --activation_budget_gib, --mlp_tiles -1 and --keep_fp8_weights None. Raises ValueError if a
    budget is too small even with every block recomputed.
    """
    chosen = _with_activation_policy(config, device)
    return _with_kept_fp8(chosen, device, config.activation_budget_gib)


def _with_activation_policy(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with --activation_budget_gib and --mlp_tiles -1 resolved, if given."""
    if config.is_auto:
        raise ValueError(
            "--sharding_strategy, --batch_size and --activation_budget_gib auto are chosen "
            "by the train command; here give values, as `fsdp-qlora plan` prints them"
        )
    budget = config.activation_budget_gib
    if budget is None and config.mlp_tiles != AUTO:
        return config
    shape, setup = _shape_and_setup(config, device)
    if config.mlp_tiles == AUTO:
        setup = replace(setup, mlp_tiles=choose_tiles(shape, setup, budget))
        config = replace(config, mlp_tiles=setup.mlp_tiles)
        print_main(f"--mlp_tiles {setup.mlp_tiles}: chosen by the estimate")
    if budget is None:
        return config
    policy = choose_policies(shape, setup, budget)
    peak = memory(shape, replace(setup, activation_policy=policy)).peak_allocated
    print_main(
        f"--activation_policy {policy}: {peak:.1f} GiB at the peak by the estimate, within "
        f"{budget:g}"
    )
    return replace(config, activation_policy=policy, activation_budget_gib=None)


def _with_kept_fp8(config: RunConfig, device: torch.device, budget_gib: float | None) -> RunConfig:
    """The configuration with --keep_fp8_weights None resolved: kept on a GPU if there is room.

    That is a budget's, else the GPU's memory. Raises ValueError where they can't be kept as asked.
    """
    check_kept_stay(config, ranks_from_env().world_size)
    if config.keep_fp8_weights is not None or config.compute_dtype != "fp8":
        return config
    if device.type != "cuda":
        return replace(config, keep_fp8_weights=False)
    room, needed = budget_gib, attrgetter("peak_allocated")
    if room is None:
        room = (1 - SPARE_SHARE) * torch.cuda.mem_get_info(device)[1] / 2**30
        needed = attrgetter("total")
    keeps = keeps_fp8_weights(*_shape_and_setup(config, device), room, needed)
    print_main(f"--keep_fp8_weights {str(keeps).lower()}: chosen by the estimate")
    return replace(config, keep_fp8_weights=keeps)


def _shape_and_setup(config: RunConfig, device: torch.device) -> tuple[ModelShape, Setup]:
    """What the estimate takes for a run."""
    settings = read_config(config.model_name, **config.source)
    shape = expanded_shape(shape_from_config(settings.to_dict(), config.model_name), config)
    return shape, setup_from_config(
        config, ranks_from_env().world_size, compile=compiles(config, device)
    )


def attention(
    config: RunConfig, settings: PretrainedConfig, device: torch.device
) -> tuple[str, str]:
    """The attention implementation of a run on `device`, and the reason."""
    return choose_attention(
        config.attn_implementation, config.packing, settings, device, DTYPES[config.product_dtype]
    )


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: as --compile says, else on a GPU."""
    return device.type == "cuda" if config.compile is None else config.compile


def adapter_settings(config: RunConfig, model: nn.Module) -> LoraConfig:
    """The run's adapters as PEFT is told of them; raises ValueError for a block that is not there."""
    lora = lora_config(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.target_modules,
        target_parameters=config.target_parameters,
        use_dora=config.adapter == "dora",
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        bias=config.bias,
    )
    lora.revision, lora.layers_to_transform = config.revision, adapted_blocks(config, model)
    return lora


def adapted_blocks(config: RunConfig, model: nn.Module) -> list[int] | None:
    """The blocks of --layers_to_transform. Raises ValueError for one that the model does not have."""
    chosen, count = config.adapted_blocks, len(decoder_blocks(model))
    if chosen and chosen[-1] >= count:
        raise ValueError(
            f"--layers_to_transform {config.layers_to_transform}: the model has no such "
            f"block; give some of 0 to {count - 1}"
        )
    return chosen


def start_of(config: RunConfig) -> LoraInit:
    """How the run's adapters begin."""
    return (
        LoraInit() if not config.has_lora else LoraInit(config.init_lora_weights, config.loftq_iter)
    )


def weights_on_host(config: RunConfig, model: nn.Module, device: torch.device) -> OnHost:
    """What --use_cpu_offload and its two companions move; the derived choice is printed."""
    frozen, trained = config.use_cpu_offload, config.use_trained_cpu_offload
    if frozen and trained is None:
        trained = (
            device.type == "cpu"
            or config.adapter == "none"
            or TRAINED_SHARE < (training_bytes(config, model) / torch.cuda.mem_get_info(device)[1])
        )
    if frozen and config.adapter != "none":
        print_main(
            "--use_trained_cpu_offload "
            + (
                "true: trained weights, gradients and optimizer states are in host memory too"
                if trained
                else "false: these stay on the GPU"
            )
        )
    vocabulary = config.use_vocabulary_cpu_offload
    return OnHost(frozen, bool(frozen and trained), frozen if vocabulary is None else vocabulary)


def training_bytes(config: RunConfig, model: nn.Module) -> float:
    """Bytes of a rank's trained weights, their gradients and optimizer states."""
    optimizer = OPTIMIZERS[config.optimizer]
    bytes_of = [(p.numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    whole = sum(n * (2 * size + optimizer.state_bytes(size)) for n, size in bytes_of)
    return whole / setup_from_config(config, ranks_from_env().world_size).shard_ranks
