"""Answer prompts with a base model and an adapter, in plain transformers and PEFT.

The weights of the base are those the adapter was trained on: after QLoRA they are the 4-bit values,
written out in full, so that generation is fast and nothing else differs.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch
from accelerate import dispatch_model, infer_auto_device_map
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from ..catalog.families import positions_in
from ..catalog.known_models import hub_name
from ..catalog.machine import host_memory_here
from ..choices import FORMATS
from ..data import choose_pad_token_id, encode_prompt, stop_token_ids
from ..dist import print_main, rank_device
from ..experts import each_of_stacks, is_stackable
from ..export.adapter_folder import AdapterFolder, Delta, base_of, why_no_adapter
from ..export.quantized_base import BaseQuant, base_quant, taken_out_of
from ..hub import asked_hub
from ..loading import (
    DTYPES,
    Checkpoint,
    checkpoint_folder,
    first_line,
    looks_local,
    not_at_hand,
    pinned,
    read_config,
)
from ..loading.generation_config import keep_generation_settings
from ..loading.model_folder import check_no_adapter
from ..loading.native_formats import FORMATS as NATIVE_FORMATS
from ..loading.prequantized import kind_of, open_weights, quantization_of
from ..loading.tokenizer import load_tokenizer
from ..model.wrappers import wrapper_class
from ..quantization.quantize import directly_read, is_plain_linear


def load_for_inference(
    model_name: str,
    adapter: str | Path | None = None,
    quant: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    revision: str | None = None,
    trust_remote_code: bool = False,
    load_in: str = "16bit",
) -> PreTrainedModel:
    """The base model on `device`, its linears rounded as `quant` says, with the adapter if given.

    load_in: 16bit holds the rounded values written out in `dtype`; 4bit and 8bit are bitsandbytes'.
    "cuda" is all GPUs: what does not fit one is spread over them, and then over host memory.
    """
    settings = read_config(model_name, revision, trust_remote_code)  # or one clear line
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ValueError(f"--adapter_folder {adapter}: {why_no_adapter(Path(adapter))}")
    if looks_local(model_name):
        check_no_adapter(model_name)
        Checkpoint(model_name)
    device, known = torch.device(device), base_quant(quant, adapter)
    held = _held_in_fewer_bits(load_in, known, adapter, dtype, device)
    with asked_hub(not looks_local(model_name)) as unreachable:
        try:
            if kind_of(quantization_of(settings)) in NATIVE_FORMATS:
                model = _of_numbers(model_name, revision, settings, dtype=dtype, **held)
            else:
                # Other weights than safetensors are pickles, which can run code.
                model = (wrapper_class(settings) or AutoModelForCausalLM).from_pretrained(
                    model_name,
                    dtype=dtype,
                    use_safetensors=True,
                    **held,
                    **pinned(revision, trust_remote_code),
                )
        except OSError as error:
            if unreachable:
                raise not_at_hand(model_name, unreachable) from error
            raise ValueError(
                f"--model_name {model_name}: {first_line(error)}; give a model's folder or hub name"
            ) from error
    if not held:
        model = _rounded(model, known, adapter, device)
    model.eval()
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


def _of_numbers(
    model_name: str, revision: str | None, settings: PretrainedConfig, **how
) -> PreTrainedModel:
    """The model of files that its makers quantized, with the numbers that training reads in them.

    transformers would ask for each format's library, and some leave weights random that they can't read.
    """
    quantization = quantization_of(settings)
    files = open_weights(checkpoint_folder(model_name, revision), quantization, model_name)
    settings = copy.deepcopy(settings)
    for part in (settings, settings.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    kind = wrapper_class(settings) or MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    numbers = {name: files.whole(name) for name in files.shapes}
    model = kind.from_pretrained(None, config=settings, state_dict=numbers, **how)
    keep_generation_settings(model, files.folder)
    return model


def _held_in_fewer_bits(
    load_in: str,
    known: BaseQuant,
    adapter: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
) -> dict:
    """Arguments of from_pretrained for bitsandbytes' weights; none for weights that are written out.

    Its NF4 and FP4 are the values that an adapter was trained beside: the same blocks of 64, fp32 scales.
    """
    if load_in == "16bit":
        return {}
    from transformers import BitsAndBytesConfig

    if taken_out_of(adapter):
        raise ValueError(
            f"--load_in {load_in}: the adapter in {adapter} began as a part of the weights, which "
            "can't be rounded without it; leave --load_in out, or merge it first"
        )
    is_theirs = known.quant in FORMATS and FORMATS[known.quant].is_bitsandbytes
    same = load_in == "4bit" and is_theirs and known.absmax_dtype == "fp32"
    if known.quant != "none" and not same:
        print_main(
            f"--load_in {load_in}: the adapter was trained beside {known}; answers may differ"
        )
    spread = device.type == "cuda"
    bits: dict = dict(load_in_8bit=True)
    if load_in == "4bit":
        kind = known.quant if is_theirs else "nf4"
        bits = dict(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return dict(
        quantization_config=BitsAndBytesConfig(llm_int8_enable_fp32_cpu_offload=spread, **bits),
        device_map="auto" if spread else {"": str(device)},
    )


def _rounded(
    model: PreTrainedModel, known: BaseQuant, adapter: str | Path | None, device: torch.device
) -> PreTrainedModel:
    """The model in its place, with linear weights rounded as the adapter knew them."""
    places = device_map(model, _free_memory(device))
    if not places:  # it fits one device, where rounding is fast
        model = model.to(device)
    if known.quant != "none":
        if not known.is_known:
            raise ValueError(
                f"--adapter_folder {adapter}: it was trained on {known}, which can't be reproduced "
                "here; add --base_quant none for the original weights"
            )
        _round_linears(model, known, taken_out_of(adapter))
    return dispatch_model(model, places) if places else model


def device_map(model: PreTrainedModel, free: dict[int | str, int]) -> dict[str, int | str]:
    """Where each block goes, for a model that is larger than the first device; else empty.

    free: bytes of each GPU that weights may take, and of the host as "cpu".
    """
    if not free or model.get_memory_footprint() <= free[0]:
        return {}
    whole = sorted(model._no_split_modules or ())
    return infer_auto_device_map(model, max_memory=free, no_split_module_classes=whole)


def _free_memory(device: torch.device) -> dict[int | str, int]:
    """What `device_map` may fill: nine tenths of each GPU, for keys and values need some too."""
    if device.type != "cuda":
        return {}
    gpus = {i: int(0.9 * torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count())}
    return {**gpus, "cpu": int(0.9 * host_memory_here() * 2**30)}


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


def _tokenizer_of(model_name: str, source: dict, adapter: str | Path | None):
    """The tokenizer that an adapter was trained with, if its folder has one, or the model's."""
    if adapter and (Path(adapter) / "tokenizer_config.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"--adapter_folder {adapter}: its tokenizer can't be loaded ({first_line(error)}); save "
                "it again, or remove its tokenizer files to use the model's"
            ) from error
    return load_tokenizer(model_name, **source)


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
    names, read = {id(m): name for name, m in model.named_modules()}, directly_read(model)
    for module in model.get_decoder().modules():  # not of towers beside it
        name = names[id(module)]
        if is_stackable(module):
            for w in each_of_stacks(module):
                w.copy_(quant.round_rows(w.flatten(0, 1), w.dtype).view(w.shape))
        if module in read or name.rsplit(".", 1)[-1] in skip:
            continue
        if is_plain_linear(module) or isinstance(module, Conv1D):
            w = module.weight.t() if isinstance(module, Conv1D) else module.weight
            w.copy_(quant.round_rows(w.data, w.dtype, taken.get(f"{name}.weight")))


def answer(options):
    """Print the answer to the prompt, or to each line of a chat, as it is made."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    _check_options(options)
    model_name, source = _asked_model(options)
    device = rank_device(options.device)
    tokenizer = _tokenizer_of(model_name, source, options.adapter_folder)
    model = load_for_inference(
        model_name,
        options.adapter_folder,
        options.base_quant,
        device,
        _dtype(options.dtype, device),
        load_in=options.load_in,
        **source,
    )
    torch.manual_seed(options.seed)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if options.prompt:
        messages = _with_answer(messages, options.prompt, model, tokenizer, options)
    while options.chat and (line := _next_line()):
        messages = _with_answer(messages, line, model, tokenizer, options)


def _check_options(options):
    """Refuse what no model is needed for to refuse."""
    if not options.prompt and not options.chat:
        raise ValueError("--prompt is empty; give a prompt, or --chat")
    for name in ("prompt", "system"):
        if any("\ud800" <= c <= "\udfff" for c in getattr(options, name)):
            raise ValueError(f"--{name} is not UTF-8; convert it, or set the terminal to UTF-8")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens must be 1 or more, got {options.max_new_tokens}")
    if not 0 <= options.temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or more, got {options.temperature:g}")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top_p must be above 0 and at most 1, got {options.top_p:g}")
    if options.top_k < 0:
        raise ValueError(f"--top_k must be 0 or more, got {options.top_k}")
    if not 0 < options.repetition_penalty < float("inf"):
        raise ValueError(
            f"--repetition_penalty must be above 0, got {options.repetition_penalty:g}"
        )
    if options.trust_remote_code and not options.revision:
        raise ValueError(
            "--trust_remote_code needs --revision; give the full commit of the code that you have read"
        )


def _asked_model(options) -> tuple[str, dict]:
    """The base's name, and which version of it is read: those of the adapter, if they are not given."""
    name, revision = options.model_name, options.revision
    if name is None:
        if options.adapter_folder is None:
            raise ValueError(
                "--adapter_folder is missing; give a trained adapter's folder, or a model with "
                "--model_name"
            )
        name, trained_on = base_of(options.adapter_folder)
        revision = revision or trained_on
    source = dict(revision=revision, trust_remote_code=options.trust_remote_code)
    return hub_name(os.path.expanduser(name)), source


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """What is multiplied in."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def _next_line() -> str:
    """What the user says next; empty at the end of the chat."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _with_answer(
    messages: list[dict], prompt: str, model: nn.Module, tokenizer, options
) -> list[dict]:
    """The conversation with a message more and the answer to it, which is printed as it is made."""
    from transformers import TextStreamer

    messages = [*messages, {"role": "user", "content": prompt}]
    inputs = torch.tensor([encode_prompt(messages, tokenizer)], device=model.device)
    positions = positions_in(model.config) or sys.maxsize
    if inputs.shape[1] >= positions:
        raise ValueError(
            f"--prompt: with {inputs.shape[1]:,} tokens it leaves no room for an answer in the model's "
            f"{positions:,} positions; shorten it, or begin another --chat"
        )
    sampling = dict(do_sample=False)
    if options.temperature:
        sampling = dict(
            do_sample=True,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
    ids = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=min(options.max_new_tokens, positions - inputs.shape[1]),
        repetition_penalty=options.repetition_penalty,
        pad_token_id=choose_pad_token_id(tokenizer),
        eos_token_id=sorted(stop_token_ids(tokenizer)),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    if not options.chat:
        return messages
    said = tokenizer.decode(ids[0, inputs.shape[1] :], skip_special_tokens=True)
    return [*messages, {"role": "assistant", "content": said}]
