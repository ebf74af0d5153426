"""Data: from a name or a file to the micro-batches of each optimizer step.

    read_rows -> tokenize_rows -> StepSampler -> StepLoader -> Step.micro_batches
    open_source -> StreamSampler -> StreamLoader -> Step.micro_batches, for data beyond memory

`load_dataset` does the first two, with a cache that ranks share. Each piece is usable alone and
takes plain arguments; none knows of models, processes or configurations.

Modules, each importing only from those before it: messages, formats, records, json_tables,
file_records, files, hub_datasets, sources, template_bounds, message_forms, templates,
conversation_warnings, marked_tokens, masking, collate, report, prompt_format, node_share, cache,
tokenized, kept_rows, dataset, packing, sampler, loader, lengths, stream_sampler, stream.
"""

from .collate import choose_pad_token_id, collate, filler
from .dataset import load_dataset, tokenize_rows
from .formats import Row, row_from_record
from .lengths import RowLengths, row_lengths
from .loader import Step, StepLoader, num_trained_tokens, on_device
from .masking import TRAIN_ON, encode_prompt, stop_token_ids
from .packing import block_diagonal_mask, collate_packed, pack
from .prompt_format import keep_prompt_format
from .records import NAMES, Source
from .report import DataReport, preview
from .sampler import BinSampler, StepSampler, rank_share, step_sampler
from .sources import SAMPLED_NAMES, open_source, read_rows, reads_from
from .stream import StreamLoader
from .stream_sampler import StreamBinSampler, StreamSampler
from .templates import ChatTemplate
from .tokenized import Subset, TokenizedDataset, hold_out, shared_rows

__all__ = [
    "NAMES",
    "SAMPLED_NAMES",
    "TRAIN_ON",
    "BinSampler",
    "ChatTemplate",
    "DataReport",
    "Row",
    "RowLengths",
    "Source",
    "Step",
    "StepLoader",
    "StepSampler",
    "StreamBinSampler",
    "StreamLoader",
    "StreamSampler",
    "Subset",
    "TokenizedDataset",
    "block_diagonal_mask",
    "choose_pad_token_id",
    "collate",
    "collate_packed",
    "encode_prompt",
    "filler",
    "hold_out",
    "keep_prompt_format",
    "load_dataset",
    "num_trained_tokens",
    "on_device",
    "open_source",
    "pack",
    "preview",
    "rank_share",
    "read_rows",
    "reads_from",
    "row_from_record",
    "row_lengths",
    "shared_rows",
    "step_sampler",
    "stop_token_ids",
    "tokenize_rows",
]
