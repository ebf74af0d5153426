"""Write trained weights: a PEFT adapter, or a whole model after full fine-tuning.

Weights are gathered one at a time; only rank 0 keeps them, on the host. A folder appears under its
name when all its files are complete, never half written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..adapters import trainable_parameters
from ..adapters.modules_to_save import with_tied_copy
from ..adapters.peft_names import peft_names, saved_names, saved_parameters
from ..atomic_files import complete_folder, remove_folder, replace_folder, scratch_of
from ..config import RunConfig
from ..dist import full_tensor, local_rows, main_only, ranks_from_env, split_as
from ..experts import stacked_weights
from ..json_input import read_object
from ..lora_init import for_original_base, saved_config, taken_out
from ..model.blocks import own_weights
from ..model.conv1d import transposed_weights
from ..model.wrappers import wrapper_of
from ..quantization.formats import dequantize_rows
from ..quantization.quantize import QuantLinear
from ..redact import redact_all
from ..sharding import free_gathered
from ..tensor_files import write_tensors
from .card import write_card
from .config_file import write_older_names
from .generation_config import stop_at_trained_ends, write_generation_settings
from .merged_files import copy_processor
from .stored_names import by_block, under_stored_names
from .tokenizer_files import save_tokenizer

SHARD_BYTES = 5 * 10**9  # transformers' default size of one file


# Of PEFT 0.9, the first with DoRA.
_LORA_OPTIONS = frozenset(
    "r target_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
    "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config "
    "megatron_core loftq_config use_dora peft_type auto_mapping base_model_name_or_path revision "
    "task_type inference_mode".split()
)
RUN_FILE = "fsdp_qlora.json"  # beside the weights: the settings they were trained with


def weights_folder(config: RunConfig, suffix: str = "") -> Path:
    """Where trained weights go: adapter or model, and the suffix."""
    kind = "adapter" if config.has_lora else "model"
    return Path(config.output_dir) / f"{kind}{suffix}"


def save_trained(
    model: nn.Module,
    folder: str | Path,
    tokenizer: ProcessorMixin | PreTrainedTokenizerBase | None = None,
    settings: dict | None = None,
) -> Path:
    """Save the adapter of a PEFT model, or else the whole model; every rank must call it.

    `settings` are those of the run (`card.run_record`): they are kept in the folder, and with the
    metrics.jsonl beside it they make its model card.

    Raises OSError on every rank if rank 0 can't write.
    """

    def write_rest(new: Path):
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)
            if not hasattr(model, "peft_config"):
                stop_at_trained_ends(new, tokenizer)
        if settings is None:
            return
        (new / RUN_FILE).write_text(json.dumps(redact_all(settings), indent=2))
        if "about" in settings:  # a whole record of a run, not settings of one's own
            write_card(new, redact_all(settings), Path(folder).parent / "metrics.jsonl")

    save = save_adapter if hasattr(model, "peft_config") else _save_full
    return save(model, folder, write_rest)


def trained_bytes(model: nn.Module) -> int:
    """Size of what `save_trained` will write; the model may still be on meta.

    An adapter that begins as a part of its base takes twice that.
    """
    if not hasattr(model, "peft_config"):
        return _whole_bytes(model)
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _whole_bytes(model: nn.Module) -> int:
    """Size of all weights, also of towers beside them, in the dtype of the model's configuration."""
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    packed = {p for layer in layers for p in (layer.weight, layer.absmax)}
    plain = sum(p.numel() for p in model.parameters() if p not in packed)
    wrapper = wrapper_of(model)
    shapes = [wrapper.files.shapes[name] for name in wrapper.others] if wrapper else []
    count = plain + sum(map(own_weights, layers)) + sum(map(math.prod, shapes))
    return count * _saved_dtype(model).itemsize


def _saved_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a whole model is saved in: that of its configuration.

    transformers' own `save_pretrained` leaves its name there.
    """
    dtype = getattr(model.config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def save_adapter(
    model: nn.Module, folder: str | Path, write_rest: Callable[[Path], None] | None = None
) -> Path:
    """An adapter folder with the key names and shapes of PEFT's own `save_pretrained`.

    It fits the original base, whatever the adapter took out of it to begin from (lora_init). Parts of the
    active adapter that are frozen are in it too.
    `write_rest` writes more files into the folder before it gets its name. Every rank must call it.
    Raises OSError on every rank if rank 0 can't write, and ValueError if what is trained is not the
    active adapter, of the model's one or more.
    """
    folder, is_main = Path(folder), ranks_from_env().is_main
    parameters = saved_parameters(model)
    if not trainable_parameters(model):
        raise ValueError(
            f"{folder}: no adapter weight is trainable, so there is nothing to save; call "
            "model.set_adapter(NAME) to unfreeze it"
        )
    saved_names(model), saved_config(model)  # raise on every rank what rank 0 would alone
    state = dict(gathered(parameters))
    taken = dict(gathered({n: split_as(t, parameters[n]) for n, t in taken_out(model).items()}))
    with main_only():
        if is_main:
            with complete_folder(folder) as new:
                whole = {n: for_original_base(n, t, taken.get(n)) for n, t in state.items()}
                tensors = with_tied_copy(model, peft_names(model, whole))
                write_tensors(
                    {k: v.contiguous() for k, v in tensors.items()},
                    new / "adapter_model.safetensors",
                    {"format": "pt"},
                )
                save_peft_config(saved_config(model), new)
                if write_rest:
                    write_rest(new)
    return folder


def save_peft_config(config, folder: Path):
    """adapter_config.json, marked for inference as PEFT does, of LoRA without what a later PEFT leaves off.

    PEFT before 0.14, and what is built on it, ends on a name that it does not know:
    https://github.com/huggingface/peft/issues/2275.
    """
    training, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = training
    if isinstance(config, LoraConfig):
        path, off = folder / "adapter_config.json", LoraConfig().to_dict()
        told = read_object(path)
        told = {k: v for k, v in told.items() if k in _LORA_OPTIONS or k in off and v != off[k]}
        path.write_text(json.dumps(told, indent=2, sort_keys=True), encoding="utf-8")


def gathered(parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, on the host of rank 0; the others get none."""
    is_main = ranks_from_env().is_main
    for name, parameter in parameters.items():
        whole = full_tensor(parameter.detach())
        if is_main:
            yield name, whole.cpu().clone()


def _whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight of a model without adapters on the host of rank 0, in the dtype of its configuration.

    Quantized ones become the numbers that they stood for in training. Buffers that files hold, such as the
    biases of routers, are as they are.
    """
    dtype = _saved_dtype(model)
    layers = {f"{name}.": m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    packed = {prefix + leaf for prefix in layers for leaf in ("weight", "absmax")}
    plain = {name: p for name, p in model.named_parameters() if name not in packed}
    for name, tensor in gathered(plain):
        yield name, tensor.to(dtype)
    for prefix, layer in layers.items():
        parts = [t for _, t in gathered(dict(weight=layer.weight, absmax=layer.absmax))]
        if not parts:
            continue
        packed_rows, scales = parts
        yield (
            f"{prefix}weight",
            dequantize_rows(packed_rows, scales, layer.in_features, layer.quant_type, dtype),
        )
    yield from gathered(_stored_buffers(model))


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that are in its files, by their names."""
    kept = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _named_in_whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`_whole_weights` as transformers has them in the model that is saved, which may be around this one."""
    transposed, stacks, wrapper = (
        transposed_weights(model),
        stacked_weights(model),
        wrapper_of(model),
    )
    for name, tensor in _whole_weights(model):
        if name in transposed:
            tensor = tensor.t().contiguous()
        if stack := stacks.get(name):
            name, tensor = stack.stored_name, stack.as_stored(tensor)
        yield wrapper.outer(name) if wrapper else name, tensor


def _save_full(
    model: nn.Module, folder: str | Path, write_rest: Callable[[Path], None] | None = None
) -> Path:
    """The whole model in transformers' format, in files of at most SHARD_BYTES.

    What was quantized is written as the numbers that it stood for in training (`_whole_weights`).
    `write_rest` writes more files into the folder before it gets its name.
    """
    folder, is_main = Path(folder), ranks_from_env().is_main
    scratch = scratch_of(folder)
    if is_main:
        remove_folder(scratch)  # of a run that was killed
    writer, wrapper = ShardWriter(scratch), wrapper_of(model)
    try:
        for tensors in by_block(_named_in_whole(model)):
            writer.add_block(model, tensors)
        for name in sorted(wrapper.others) if wrapper and is_main else ():
            writer.add(name, wrapper.files.whole(name))
        with main_only():
            if is_main:
                writer.finish()
                (wrapper.config_of(model) if wrapper else model.config).save_pretrained(scratch)
                write_older_names(scratch)
                copy_processor(wrapper.files if wrapper else None, scratch)
                write_generation_settings(model, scratch)
                if write_rest:
                    write_rest(scratch)
                replace_folder(scratch, folder)
    finally:
        if is_main:
            remove_folder(scratch)
    return folder


class ShardWriter:
    """Collects tensors and writes a safetensors file whenever enough have come together.

    A failure is kept for `finish`: the other ranks are still gathering, and can be told only then.
    """

    def __init__(self, folder: Path):
        self.folder, self.size = folder, 0
        self.pending: dict[str, Tensor] = {}
        self.parts: list[tuple[list[str], int]] = []  # names of tensors, bytes
        self.error: Exception | None = None

    def add(self, name: str, tensor: Tensor):
        if self.error:
            return
        if self.size + tensor.nbytes > SHARD_BYTES and self.pending:
            try:
                self.flush()
            except Exception as error:
                self.error = error
        self.pending[name] = tensor
        self.size += tensor.nbytes

    def add_block(self, model: nn.Module, tensors: dict[str, Tensor]):
        """Add what a block has, under the names of the model's files."""
        try:
            for name, tensor in under_stored_names(model, tensors).items():
                self.add(name, tensor)
        except Exception as error:
            self.error = self.error or error

    def flush(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(
            self.pending, self.folder / f"part-{len(self.parts)}.safetensors", {"format": "pt"}
        )
        self.parts.append((list(self.pending), self.size))
        self.pending, self.size = {}, 0

    def finish(self):
        """Write what is left and give the files the names that transformers expects."""
        if self.error:
            raise self.error
        self.flush()
        count, weight_map = len(self.parts), {}
        for i, (names, _) in enumerate(self.parts):
            final = (
                "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            )
            (self.folder / f"part-{i}.safetensors").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            total = sum(size for _, size in self.parts)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Fill a built model's active adapter from an adapter folder, each rank its own rows; returns the model.

    Its frozen parts too. Needs no other rank. Raises FileNotFoundError without
    adapter_model.safetensors, and safetensors' own error for an adapter of other layers.
    """
    from safetensors import safe_open

    free_gathered(model)  # or rows would be copied into what the next backward throws away
    with (
        safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file,
        torch.no_grad(),
    ):
        keys = saved_names(model)
        for name, parameter in saved_parameters(model).items():
            local, start, stop = local_rows(parameter)
            rows = file.get_slice(keys[name])[start:stop]
            local.copy_(rows[:, : local.shape[1]] if local.dim() == 2 else rows)
    return model
