"""What a rank does before it meets the others: check the device, read the tokenizer and the data.

Tokenizing can take minutes, and a process group would count them as a hang; a mistake found here
ends every rank with the same line.
"""
from __future__ import annotations

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .config import RunConfig
from .dist import print_main, ranks_from_env
from .loading import first_line, read_config


def check_device(config: RunConfig, device: torch.device):
    """Refuse a precision that the device does not have."""
    if device.type != "cuda" or config.precision == "fp32": return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"--precision {config.precision}: {torch.cuda.get_device_name(device)} has "
                         "no bf16 arithmetic; use --precision fp32")


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises ValueError naming --model_name."""
    read_config(model_name)  # a missing folder is said in the same words everywhere
    try:
        return AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_name {model_name}: no tokenizer there ({first_line(error)}); "
                         "copy the tokenizer files of the model into it") from error


def tokenized_data(config: RunConfig, tokenizer: PreTrainedTokenizerBase):
    """The run's data set as token ids and trained masks; prints the data report on rank 0."""
    from .data import SAMPLED_NAMES, load_dataset, preview
    samples = config.dataset_samples if config.dataset in SAMPLED_NAMES else None
    dataset = load_dataset(config.dataset, tokenizer, split=config.dataset_split, samples=samples,
                           context_length=config.context_length, train_on=config.train_on,
                           seed=config.seed, cache_dir=config.data_cache,
                           is_writer=ranks_from_env().local_rank == 0)
    print_main(dataset.report.format_report())
    if config.preview: print_main(preview(dataset, tokenizer, config.preview))
    return dataset
