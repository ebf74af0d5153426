"""The order in which a model is made ready to train, on one screen.

Each step is a function that can be used alone; the order matters. Adapters need the final linear
layers, recompute and compile wrap what the block computes, sharding must come before any weight
exists, and adapter values come last because they must be equal under every sharding.
"""
from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from .adapters import apply_adapters, apply_fp8, init_adapters, init_magnitudes, lora_config
from .adapters.fusion import SharedInputs
from .adapters.initial import Start
from .adapters.whole import train_only, train_whole
from .catalog.arch import shape_from_config
from .catalog.block_expansion import Expansion, expanded_shape, expansion_of
from .config import AUTO, RunConfig, block_policies
from .config.settings import counted
from .dist import print_main, ranks_from_env
from .estimate import choose_policies, memory, setup_from_config
from .estimate.policies import choose_tiles
from .estimate.setup import OPTIMIZER_STATES, STATE_BYTES
from .loading import (
    DTYPES,
    LoadProgress,
    check_complete,
    checkpoint_folder,
    expected_shapes,
    load_buffers,
    load_weights,
    materialize,
    meta_model,
    read_config,
)
from .loading.expanded import ExpandedCheckpoint, expanded_config
from .loading.names import match_names
from .loading.prequantized import FourBitCheckpoint, layers_to_quantize, open_weights
from .loading.quantized_cache import QuantizedCache
from .loading.starts import SavedRows, check_start, start_from_weights
from .loading.tokens import grow_vocabulary, load_tokenizer, with_new_rows
from .loading.weight_files import Checkpoint, RandomCheckpoint
from .memory.activations import apply_activation_policy
from .memory.losses import apply_chunked_loss
from .memory.offload import apply_activation_offload
from .memory.tiles import apply_tiled_mlp, tiled_mlps
from .model.attention import choose_attention
from .model.autocast import apply_autocast
from .model.blocks import block_list, decoder_blocks
from .model.expansion import train_new_blocks
from .model.experts import check_quantizable
from .quantization.quantize import quantize_linears
from .sharding import OnHost, apply_sharding, describe_units, make_mesh, parameter_device


def build_model(config: RunConfig, device: torch.device, saved: SavedRows | None = None) -> nn.Module:
    """The model of a run: built on meta, transformed, sharded, then filled from the checkpoint.

    saved: reads the adapter that a run goes on from, which its base may depend on.
    Needs a process group (`dist.process_group`). Raises ValueError for a model, target or strategy
    that does not fit; all ranks raise the same before any waits for another.
    """
    config = with_activation_policy(config, device)
    model, checkpoint = planned_model(config, device)
    if config.compute_dtype == "fp8": apply_fp8(model, device)
    policies = block_policies(config.activation_policy, len(decoder_blocks(model)))
    apply_tiled_mlp(model, config.mlp_tiles, policies)
    apply_activation_policy(model, policies, config.reentrant_checkpointing)
    apply_chunked_loss(model)
    apply_autocast(model, DTYPES.get(config.autocast_dtype))
    if compiles(config, device): compile_blocks(model)
    if config.use_activation_cpu_offload: apply_activation_offload(model, policies)
    on_host = weights_on_host(config, model, device)
    units = apply_sharding(
        model, config.sharding_strategy,
        make_mesh(config.sharding_strategy, device, config.shard_group_size),
        wrap_policy=config.wrap_policy, min_wrap_params=config.min_wrap_params,
        on_host=on_host, backward_prefetch=config.backward_prefetch,
        forward_prefetch=config.forward_prefetch, gather_once=config.gather_once)
    print_main(describe_units(units))
    materialize(model, device, parameter_device(model, device, on_host))
    start, filled = start_of(config), set()
    if start.from_weights:
        filled = start_from_weights(model, checkpoint, device, start, config.seed, saved)
    load(model, checkpoint, device, config, filled)
    if start.from_weights: init_magnitudes(model, device, with_adapter=True)
    else: init_adapters(model, config.seed, device)
    return model


def planned_model(config: RunConfig, device: torch.device) -> tuple[nn.Module, Checkpoint]:
    """The model on meta with quantized linears and adapters, and the checkpoint that will fill it.

    Needs no process group: a wrong model, checkpoint or target module is found here.
    """
    settings = read_config(config.model_name, **config.source)
    if config.added_tokens:
        grow_vocabulary(settings, load_tokenizer(config.model_name, **config.source,
                                                 added_tokens=config.new_tokens))
    grown = expansion_of(config, settings.get_text_config().num_hidden_layers)
    if grown: settings = expanded_config(settings, grown)
    model = meta_model(settings, DTYPES[config.stored_dtype], attention(config, settings, device)[0],
                       **config.source)
    model.config._name_or_path = config.model_name  # PEFT writes it into the adapter's config
    checkpoint = open_checkpoint(config, settings, model, device, grown)
    if config.quant != "none":
        check_quantizable(model, config.quant)
        quantize_linears(model, config.quant_type, absmax_dtype=config.absmax_dtype,
                         names=layers_to_quantize(checkpoint, config.quant_type),
                         but=grown.new_in(block_list(model)[0]) if grown else ())
    if grown: train_new_blocks(model, grown.new, DTYPES[config.adapter_dtype])
    elif config.has_lora:
        lora = lora_config(rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
                           target_modules=config.target_modules,
                           target_parameters=config.target_parameters,
                           use_dora=config.adapter == "dora", use_rslora=config.use_rslora,
                           rank_pattern=config.rank_pattern, alpha_pattern=config.alpha_pattern,
                           bias=config.bias)
        lora.revision, lora.layers_to_transform = config.revision, adapted_blocks(config, model)
        model = apply_adapters(model, lora, DTYPES[config.adapter_dtype])
        check_start(model, checkpoint, start_of(config))
        train_whole(model, config.whole_modules, DTYPES[config.adapter_dtype],
                    both_ends=bool(config.added_tokens))
    else: train_only(model, config.only_modules)
    return model, checkpoint


def adapted_blocks(config: RunConfig, model: nn.Module) -> list[int] | None:
    """The blocks of --layers_to_transform. Raises ValueError for one that the model does not have."""
    chosen, count = config.adapted_blocks, len(decoder_blocks(model))
    if chosen and chosen[-1] >= count:
        raise ValueError(f"--layers_to_transform {config.layers_to_transform}: the model has no such "
                         f"block; give some of 0 to {count - 1}")
    return chosen


def start_of(config: RunConfig) -> Start:
    """How the run's adapters begin."""
    return Start() if not config.has_lora else Start(config.init_lora_weights, config.loftq_iter)


def with_activation_policy(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with --activation_budget_gib and --mlp_tiles -1 resolved, if given.

    The choice is the estimate's: `estimate.choose_policies` and `choose_tiles`. Raises ValueError if the
    budget is too small even with every block recomputed.
    """
    if config.is_auto:
        raise ValueError("--sharding_strategy, --batch_size and --activation_budget_gib auto are chosen "
                         "by the train command; here give values, as `fsdp-qlora plan` prints them")
    budget = config.activation_budget_gib
    if budget is None and config.mlp_tiles != AUTO: return config
    settings = read_config(config.model_name, **config.source)
    shape = expanded_shape(shape_from_config(settings.to_dict(), config.model_name), config)
    setup = setup_from_config(config, ranks_from_env().world_size, compile=compiles(config, device))
    if config.mlp_tiles == AUTO:
        setup = replace(setup, mlp_tiles=choose_tiles(shape, setup, budget))
        config = replace(config, mlp_tiles=setup.mlp_tiles)
        print_main(f"--mlp_tiles {setup.mlp_tiles}: chosen by the estimate")
    if budget is None: return config
    policy = choose_policies(shape, setup, budget)
    peak = memory(shape, replace(setup, activation_policy=policy)).peak_allocated
    print_main(f"--activation_policy {policy}: {peak:.1f} GiB at the peak by the estimate, within "
               f"{budget:g}")
    return replace(config, activation_policy=policy, activation_budget_gib=None)


def attention(config: RunConfig, settings: PretrainedConfig, device: torch.device
              ) -> tuple[str, str]:
    """The attention implementation of a run on `device`, and the reason."""
    return choose_attention(config.attn_implementation, config.packing, settings, device,
                            DTYPES[config.product_dtype])


def open_checkpoint(config: RunConfig, settings: PretrainedConfig, model: nn.Module,
                    device: torch.device, grown: Expansion | None = None) -> Checkpoint:
    """The checkpoint of --model_name, checked to be complete, or random weights.

    grown: which of the model's blocks are new ones of Llama-Pro.
    """
    if config.random_weights: return RandomCheckpoint(expected_shapes(model), device, config.seed)
    if grown and config.llama_pro_path:
        checkpoint = match_names(model, Checkpoint(config.llama_pro_path))
    else:
        quantization = settings.to_dict().get("quantization_config")
        checkpoint = with_new_rows(model, match_names(model, open_weights(
            checkpoint_folder(config.model_name, config.revision), quantization, config.model_name)))
        if grown: checkpoint = ExpandedCheckpoint(checkpoint, model, grown)
    check_complete(model, checkpoint)
    if not grown: load_buffers(model, checkpoint)  # routers', which Llama-Pro's blocks have none of
    return checkpoint


def load(model: nn.Module, source: Checkpoint, device: torch.device, config: RunConfig,
         filled: Collection[str] = ()):
    """Stream the weights in but those that are there, with a progress bar and a line of what it took."""
    if source.unused: print_main(unused_line(source))
    workers = None if config.loading_workers == AUTO else config.loading_workers
    cached = config.quantized_cache and config.quant != "none" and not config.random_weights
    if cached and isinstance(getattr(source, "base", source), FourBitCheckpoint):
        cached = print_main("--quantized_cache has no effect: the checkpoint is in 4 bits already")
    with QuantizedCache(config.quantized_cache, model, source, device) if cached \
            else nullcontext(source) as weights:
        progress = LoadProgress(model, weights, filled)
        load_weights(model, weights, device, workers, progress, filled)
        progress.close()


def unused_line(source: Checkpoint, most: int = 4) -> str:
    """What a checkpoint holds for nothing: files and config.json may be of different models."""
    more = ", ..." if len(source.unused) > most else ""
    return (f"warning: {counted(len(source.unused), 'tensor')} of {source.folder} not loaded, for the "
            f"model has no place for them: {', '.join(source.unused[:most])}{more}")


TRAINED_SHARE = 1 / 8  # of a GPU that trained weights may take before they are offloaded too


def weights_on_host(config: RunConfig, model: nn.Module, device: torch.device) -> OnHost:
    """What --use_cpu_offload and its two companions move; the derived choice is printed."""
    frozen, trained = config.use_cpu_offload, config.use_trained_cpu_offload
    if frozen and trained is None:
        trained = device.type == "cpu" or config.adapter == "none" or TRAINED_SHARE < (
            trained_bytes(config, model) / torch.cuda.mem_get_info(device)[1])
    if frozen and config.adapter != "none":
        print_main("--use_trained_cpu_offload " + ("true: trained weights, gradients and optimizer "
                   "states are in host memory too" if trained else "false: these stay on the GPU"))
    vocabulary = config.use_vocabulary_cpu_offload
    return OnHost(frozen, bool(frozen and trained), frozen if vocabulary is None else vocabulary)


def trained_bytes(config: RunConfig, model: nn.Module) -> float:
    """Bytes of a rank's trained weights, their gradients and optimizer states."""
    states = OPTIMIZER_STATES[config.optimizer]
    bytes_of = [(p.numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    whole = sum(n * (2 * size + states * STATE_BYTES.get(config.optimizer, size))
                for n, size in bytes_of)
    return whole / setup_from_config(config, ranks_from_env().world_size).shard_ranks


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: as --compile says, else on a GPU."""
    return device.type == "cuda" if config.compile is None else config.compile


def compile_blocks(model: nn.Module):
    """torch.compile each decoder block's forward, in place; like blocks share one graph.

    An MLP in tiles is one op of its block's graph, and has a graph of its own.
    """
    options = dict(post_grad_custom_pre_pass=SharedInputs())
    for mlp in tiled_mlps(model): mlp.forward = torch.compile(mlp.forward, options=options)
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, options=options)
