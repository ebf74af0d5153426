"""Answer a prompt with a base model and an adapter, in plain transformers and PEFT.

The weights of the base are those the adapter was trained on: after QLoRA they are the 4-bit values,
written out in full, so that generation is fast and nothing else differs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import RunConfig
from ..data import choose_pad_token_id, encode_prompt, stop_token_ids
from ..dist import rank_device
from ..experts import is_stackable
from ..export.adapter_folder import AdapterFolder, Delta
from ..export.quantized_base import BaseQuant, base_quant, taken_out_of
from ..hub import asked_hub
from ..loading import (
    DTYPES,
    Checkpoint,
    first_line,
    looks_local,
    not_at_hand,
    pinned,
    read_config,
)
from ..loading.tokenizer import load_tokenizer
from ..model.wrappers import wrapper_class


def load_for_inference(
    model_name: str,
    adapter: str | Path | None = None,
    quant: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The base model on `device`, its linears rounded as `quant` says, with the adapter if given."""
    settings = read_config(model_name, revision, trust_remote_code)  # or one clear line
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ValueError(
            f"--adapter_folder {adapter}: no adapter_config.json there; give a folder that training "
            "saved, such as output/adapter"
        )
    if looks_local(model_name):
        _check_base_folder(Path(model_name))
    with asked_hub(not looks_local(model_name)) as unreachable:
        try:
            # Other weights than safetensors are pickles, which can run code.
            model = (wrapper_class(settings) or AutoModelForCausalLM).from_pretrained(
                model_name, dtype=dtype, use_safetensors=True, **pinned(revision, trust_remote_code)
            )
        except OSError as error:
            if unreachable:
                raise not_at_hand(model_name, unreachable) from error
            raise ValueError(
                f"--model_name {model_name}: {first_line(error)}; give a model's folder or hub name"
            ) from error
    model = model.to(device).eval()
    known = base_quant(quant, adapter)
    if known.quant != "none":
        if not known.is_known:
            raise ValueError(
                f"--adapter_folder {adapter}: it was trained on {known}, which can't be reproduced "
                "here; add --base_quant none for the original weights"
            )
        _round_linears(model, known, taken_out_of(adapter))
    if adapter is None:
        return model
    rows = max(_trained_rows(model, adapter), default=0)
    if rows > model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(rows, mean_resizing=False)
    try:
        return PeftModel.from_pretrained(model, str(adapter)).eval()
    except (ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"--adapter_folder {adapter}: not an adapter of {model_name} "
            f"({first_line(error)}); save it again, or give the model it was trained on"
        ) from error


def _check_base_folder(folder: Path):
    """Refuse a folder without safetensors, and what transformers would take for an adapter's."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"--model_name {folder}: it contains an adapter_config.json, so transformers would load "
            "the model named there instead; give adapters with --adapter_folder, or remove that "
            "file"
        )
    Checkpoint(folder)


def _trained_rows(model: PreTrainedModel, adapter: str | Path) -> list[int]:
    """Rows of the embedding and the head in an adapter that was trained with more tokens."""
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    names = [f"{name}.weight" for name, module in model.named_modules() if id(module) in ends]
    found = AdapterFolder(adapter)
    return [
        found.shape(change.replacement)[0]
        for name, change in found.changes.items()
        if name in names and change.replacement
    ]


def _tokenizer_of(config: RunConfig, adapter: str | Path | None):
    """The tokenizer that an adapter was trained with, if its folder has one, or the model's."""
    if adapter and (Path(adapter) / "tokenizer_config.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"--adapter_folder {adapter}: its tokenizer can't be loaded ({first_line(error)}); save "
                "it again, or remove its tokenizer files to use the model's"
            ) from error
    return load_tokenizer(config.model_name, **config.source)


@torch.no_grad()
def _round_linears(
    model: nn.Module,
    quant: BaseQuant,
    taken: dict[str, Delta],
    skip: tuple[str, ...] = ("lm_head",),
):
    """Give every linear weight but the head's the value that its rounded form stands for, in place.

    What is `taken` out of a weight in training is not rounded.
    """
    names = {id(m): name for name, m in model.named_modules()}
    for module in model.get_decoder().modules():  # not of towers beside it
        name = names[id(module)]
        if is_stackable(module):
            for w in (module.gate_up_proj, module.down_proj):
                w.copy_(quant.round_rows(w.data.flatten(0, 1), w.dtype).view_as(w))
        if isinstance(module, (nn.Linear, Conv1D)) and name.rsplit(".", 1)[-1] not in skip:
            w = module.weight.t() if isinstance(module, Conv1D) else module.weight
            w.copy_(quant.round_rows(w.data, w.dtype, taken.get(f"{name}.weight")))


def answer(config: RunConfig, options):
    """Print the answer to one prompt as it is made."""
    from transformers import TextStreamer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not options.prompt:
        raise ValueError("--prompt is empty; give a prompt")
    if any("\ud800" <= c <= "\udfff" for c in options.prompt):
        raise ValueError("--prompt is not UTF-8; convert it, or set the terminal to UTF-8")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens must be 1 or more, got {options.max_new_tokens}")
    device = rank_device(config.device)
    dtype = torch.float32 if device.type == "cpu" else DTYPES[config.product_dtype]
    tokenizer = _tokenizer_of(config, options.adapter_folder)
    model = load_for_inference(
        config.model_name,
        options.adapter_folder,
        options.base_quant,
        device,
        dtype,
        **config.source,
    )
    inputs = torch.tensor(
        [encode_prompt([{"role": "user", "content": options.prompt}], tokenizer)], device=device
    )
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=choose_pad_token_id(tokenizer),
        eos_token_id=sorted(stop_token_ids(tokenizer)),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
