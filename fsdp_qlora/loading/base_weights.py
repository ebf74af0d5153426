"""The weights of a run: where --model_name and its companions say they are, and their way into a model.

Which of the sources of this package that is: files as they are, under other names, with more rows or
blocks, in 4 bits already, quantized once before, or random numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext

import torch
from torch import nn
from transformers import PretrainedConfig

from ..catalog.llama_pro import Expansion, expansion_of
from ..config import AUTO, RunConfig
from ..config.settings import counted
from ..dist import print_main
from .key_mapping import match_names
from .llama_pro import ExpandedCheckpoint, expanded_config
from .model_folder import check_no_adapter, checkpoint_folder, read_config
from .prequantized import FourBitCheckpoint, check_kind, open_weights, quantization_of
from .quantized_cache import QuantizedCache
from .stream import (
    LoadProgress,
    check_complete,
    expected_shapes,
    load_buffers,
    load_weights,
)
from .tokenizer import grow_vocabulary, load_tokenizer, with_new_rows
from .weight_files import Checkpoint, RandomCheckpoint


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


def open_checkpoint(
    config: RunConfig,
    settings: PretrainedConfig,
    model: nn.Module,
    device: torch.device,
    grown: Expansion | None = None,
) -> Checkpoint:
    """The checkpoint of --model_name, checked to be complete, or random weights.

    grown: which of the model's blocks are new ones of Llama-Pro.
    """
    if config.random_weights:
        return RandomCheckpoint(expected_shapes(model), device, config.seed)
    if grown and config.llama_pro_path:
        checkpoint = match_names(model, Checkpoint(config.llama_pro_path))
    else:
        quantization = quantization_of(settings)
        check_kind(quantization, config.model_name)  # before anything is downloaded
        check_no_adapter(config.model_name)
        checkpoint = with_new_rows(
            model,
            match_names(
                model,
                open_weights(
                    checkpoint_folder(config.model_name, config.revision),
                    quantization,
                    config.model_name,
                ),
            ),
        )
        if grown:
            checkpoint = ExpandedCheckpoint(checkpoint, model, grown)
    check_complete(model, checkpoint)
    if not grown:
        load_buffers(model, checkpoint)  # routers', which Llama-Pro's blocks have none of
    return checkpoint


def load(
    model: nn.Module,
    source: Checkpoint,
    device: torch.device,
    config: RunConfig,
    filled: Collection[str] = (),
):
    """Stream the weights in but those that are there, with a progress bar and a line of what it took."""
    if source.unused:
        print_main(_unused_line(source))
    workers = None if config.loading_workers == AUTO else config.loading_workers
    cached = config.quantized_cache and config.quant != "none" and not config.random_weights
    if cached and isinstance(getattr(source, "base", source), FourBitCheckpoint):
        cached = print_main("--quantized_cache has no effect: the checkpoint is in 4 bits already")
    with (
        QuantizedCache(config.quantized_cache, model, source, device)
        if cached
        else nullcontext(source) as weights
    ):
        progress = LoadProgress(model, weights, filled)
        load_weights(model, weights, device, workers, progress, filled)
        progress.close()


def _unused_line(source: Checkpoint, most: int = 4) -> str:
    """What a checkpoint holds for nothing: files and config.json may be of different models."""
    more = ", ..." if len(source.unused) > most else ""
    return (
        f"warning: {counted(len(source.unused), 'tensor')} of {source.folder} not loaded, for the "
        f"model has no place for them: {', '.join(source.unused[:most])}{more}"
    )
