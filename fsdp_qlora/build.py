"""The order in which a model is made ready to train, on one screen.

Each step is a function that can be used alone; the order matters. Adapters need the final linear
layers, recompute and compile wrap what the block computes, sharding must come before any weight
exists, and adapter values come last because they must be equal under every sharding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .adapters import apply_adapters, apply_fp8, keep_fp8_weights
from .adapters.modules_to_save import apply_modules_to_save, train_only
from .adapters.settings import adapter_settings
from .adapters.shared_inputs import SharedInputs
from .config import RunConfig, block_policies
from .dist import print_main
from .experts import apply_router_balance, check_quantizable
from .loading import DTYPES, materialize, meta_model
from .loading.base_weights import load, model_settings, open_checkpoint
from .loading.generation_config import keep_generation_settings
from .loading.llama_pro import train_new_blocks
from .loading.prequantized import layers_to_quantize
from .loading.weight_files import Checkpoint
from .lora_init import (
    LoraInit,
    SavedRows,
    check_init,
    init_adapters,
    init_from_weights,
    init_magnitudes,
)
from .memory.activation_offload import apply_activation_offload
from .memory.checkpointing_policy import apply_activation_policy
from .memory.chunked_cross_entropy import apply_chunked_cross_entropy
from .memory.tiled_mlp import apply_tiled_mlp, tiled_mlps
from .model.attention import choose_attention
from .model.attention_kernels import apply_attention_tiles
from .model.autocast import apply_autocast
from .model.block_kinds import num_block_kinds
from .model.blocks import base_model, block_list, decoder_blocks, final_norm
from .model.delta_nets import apply_delta_rule
from .model.eager_calls import EagerCalls
from .model.input_gradients import asking_for_gradient
from .model.packing_probe import keep_rows_apart
from .model.row_mixers import leave_uncompiled
from .model.sequence_parallel import apply_sequence_parallel
from .model.state_space_mixers import apply_state_space_scan
from .plan import Plan
from .quantization.quantize import quantize_linears
from .run_plan import plan_run
from .sharding import OnHost, apply_sharding, describe_units, make_mesh, parameter_device
from .type_probe import check_type


def build_model(
    config: RunConfig,
    device: torch.device,
    saved: SavedRows | None = None,
    plan: Plan | None = None,
) -> nn.Module:
    """The model of a run: built on meta, transformed, sharded, then filled from the checkpoint.

    saved: reads the adapter that a run goes on from, which its base may depend on. plan: the run's,
    which is made here if it is not given.
    Needs a process group (`dist.process_group`). Raises ValueError for a model, target or strategy
    that does not fit; all ranks raise the same before any waits for another.
    """
    plan = plan or plan_run(config, device)
    model, checkpoint = sharded_model(config, device, plan)
    materialize(model, device, parameter_device(model, device, on_host(plan)))
    start, filled = _init_of(config), set()
    if start.from_weights:
        filled = init_from_weights(model, checkpoint, device, start, config.seed, saved)
    load(model, checkpoint, device, config, filled)
    model.weights_hash = "random" if checkpoint.content is None else checkpoint.content.digest()
    if start.from_weights:
        init_magnitudes(model, device, with_adapter=True)
    else:
        init_adapters(model, config.seed, device)
    if plan.quantization.compute_dtype == "fp8":
        keep_fp8_weights(model, forms=plan.quantization.keep_fp8_weights)
    return model


def sharded_model(
    config: RunConfig, device: torch.device, plan: Plan
) -> tuple[nn.Module, Checkpoint]:
    """The model transformed and sharded, still on meta, and the checkpoint that will fill it."""
    memory, sharding = plan.memory, plan.sharding
    model, checkpoint = planned_model(config, device)
    if plan.quantization.compute_dtype == "fp8":
        apply_fp8(model, device)
    policies = block_policies(memory.activation_policy, len(decoder_blocks(model)))
    apply_tiled_mlp(model, memory.mlp_tiles, policies)
    apply_attention_tiles(model, memory.attention_tiles, policies)
    apply_activation_policy(model, policies, memory.reentrant_checkpointing)
    sequence = apply_sequence_parallel(model, plan.batch.ranks_per_row)
    if getattr(base_model(model).config, "output_router_logits", False):
        base_model(model).config.output_router_logits = False  # the flag decides, not config.json
    apply_chunked_cross_entropy(model, sequence, weighted=config.weight_column is not None)
    if config.router_aux_loss_coef:
        model.router_balance = apply_router_balance(base_model(model), config.router_aux_loss_coef)
    apply_autocast(model, DTYPES.get(config.autocast_dtype))
    if plan.loop.compile:
        compile_blocks(model, dynamic=plan.batch.unit != "bin")
    if memory.activation_offload:
        apply_activation_offload(model, policies, memory.attention_offload)
    units = apply_sharding(
        model,
        sharding.strategy,
        make_mesh(sharding.strategy, device, sharding.shard_group_size),
        wrap_policy=sharding.wrap_policy,
        min_wrap_params=sharding.min_wrap_params,
        on_host=on_host(plan),
        backward_prefetch=sharding.backward_prefetch,
        forward_prefetch=sharding.forward_prefetch,
        gather_once=sharding.gather_once,
    )
    print_main(describe_units(units))
    return model, checkpoint


def on_host(plan: Plan) -> OnHost:
    """Which shards wait in host memory."""
    memory = plan.memory
    return OnHost(memory.cpu_offload, memory.trained_offload, memory.vocabulary_offload)


def planned_model(config: RunConfig, device: torch.device) -> tuple[nn.Module, Checkpoint]:
    """The model on meta with quantized linears and adapters, and the checkpoint that will fill it.

    Needs no process group: a wrong model, checkpoint or target module is found here.
    """
    settings, grown = model_settings(config)
    model = meta_model(
        settings,
        DTYPES[config.stored_dtype],
        attention(config, settings, device)[0],
        **config.source,
    )
    model.config._name_or_path = config.model_name  # PEFT writes it into the adapter's config
    check_type(model)
    if config.packing:
        keep_rows_apart(model)
    checkpoint = open_checkpoint(config, settings, model, device, grown)
    keep_generation_settings(model, getattr(checkpoint, "folder", None))
    if config.quant != "none":
        check_quantizable(model, config.quant)
        quantize_linears(
            model,
            config.quant_type,
            absmax_dtype=config.absmax_dtype,
            names=layers_to_quantize(checkpoint, config.quant_type),
            but=grown.new_in(block_list(model)[0]) if grown else (),
        )
    if grown:
        train_new_blocks(model, grown.new, DTYPES[config.adapter_dtype])
    elif config.has_lora:
        model = apply_adapters(model, adapter_settings(config, model), DTYPES[config.adapter_dtype])
        check_init(model, checkpoint, _init_of(config))
        apply_modules_to_save(
            model,
            config.whole_modules,
            DTYPES[config.adapter_dtype],
            embeddings=bool(config.added_tokens),
        )
    else:
        train_only(model, config.only_modules)
    return model, checkpoint


def _init_of(config: RunConfig) -> LoraInit:
    """How the run's adapters begin."""
    return LoraInit(config.init_lora_weights, config.loftq_iter) if config.has_lora else LoraInit()


def attention(
    config: RunConfig, settings: PretrainedConfig, device: torch.device
) -> tuple[str, str]:
    """The attention implementation of a run on `device`, and the reason."""
    return choose_attention(
        config.attn_implementation, config.packing, settings, device, DTYPES[config.product_dtype]
    )


_GRAPHS_OF_A_KIND = 8  # torch's own limit for a function
_kinds_compiled: list[int] = []  # kinds of blocks of each model of this process


def compile_blocks(model: nn.Module, dynamic: bool = False):
    """torch.compile each decoder block's forward and the norm after them, in place.

    Like blocks share one graph; where they fill a cache, or are recorded, they run eager. An MLP in tiles is
    one op of its block's graph, and has a graph of its own. Eager, the norm would hold several copies of all
    hidden states in fp32. `dynamic` compiles for any number of rows and tokens at once, instead of for the
    first ones, then the next.
    """
    apply_delta_rule(model)  # of one that was made elsewhere
    apply_state_space_scan(model)
    leave_uncompiled(model)
    # Else the integers of modules that FSDP owns (head_dim, in_features) are symbols under `dynamic`, and
    # shapes are terms of them: twice the time to compile. Those of other modules are constants anyway.
    torch._dynamo.config.skip_fsdp_guards = False
    _allow_graphs_of(model)
    compiled = partial(torch.compile, dynamic=dynamic or None)
    options = dict(post_grad_custom_pre_pass=SharedInputs())
    for mlp in tiled_mlps(model):
        mlp.forward = compiled(mlp.forward, options=options)
    first, *_ = blocks = decoder_blocks(model)
    calls = EagerCalls()
    for block in blocks:
        block.forward = partial(calls.block, compiled(block.forward, options=options))
    if any(weight.requires_grad for weight in first.parameters()):
        first.forward = partial(_as_later_blocks, first.forward)
    if norm := final_norm(model):
        norm.forward = partial(calls.norm, compiled(norm.forward))


def _allow_graphs_of(model: nn.Module):
    """Have torch make graphs of this model's blocks beside those of models that were compiled before it.

    To torch, blocks under an activation policy are one function, whichever model they are of, and it runs
    that eager after so many graphs: with and without autograd, a gradient of the input, or sizes that may
    change. Models of other ranks or dropout need theirs, and those of a model that is gone are kept.
    """
    _kinds_compiled.append(num_block_kinds(model))
    limits, most = torch._dynamo.config, _GRAPHS_OF_A_KIND * sum(_kinds_compiled)
    limits.recompile_limit = max(limits.recompile_limit, most)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, most)


def _as_later_blocks(forward, hidden: Tensor, *args, **kwargs):
    """The first block's forward on an input that asks for its gradient, as those of later blocks do.

    A frozen embedding's output does not, for which torch would compile the block once more, to save the
    products of that gradient: three of a model's some hundreds.
    """
    return forward(asking_for_gradient(hidden), *args, **kwargs)
