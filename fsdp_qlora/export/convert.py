"""Adapters of the original fsdp_qlora script, made into PEFT adapter folders.

That script wrote one `model_state_dict.safetensors` whose names follow its own modules:

    train_type                 names                                                    scaling
    custom_lora, custom_qlora  X.lora_AB.0.weight (A), X.lora_AB.1.weight (B)            alpha / rank
    bnb_dora, hqq_dora         X.dora_layer.lora_A.weight, .lora_B.weight,               1
                               X.magnitude_layer.magnitude
    lora, qlora                base_model.model.X.lora_A.default.weight, .lora_B.        alpha / rank

https://github.com/AnswerDotAI/fsdp_qlora: scripts/lora.py and scripts/dora.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..atomic_files import complete_folder
from ..config.options import TRAIN_TYPES
from ..loading import first_line, meta_model, read_config
from ..model.wrappers import wrapper_of
from ..tensor_files import write_tensors
from ..writable import check_folder
from .adapter_folder import WEIGHTS_FILE
from .save import RUN_FILE, save_peft_config

_ORIGINAL_FILE = "model_state_dict.safetensors"
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_NAME = re.compile(
    r"(?P<module>.+?)\.(?:lora_AB\.(?P<sequential>[01])\.weight"
    r"|(?:dora_layer\.)?lora_(?P<letter>[AB])\.(?:default\.)?weight"
    r"|(?P<magnitude>magnitude_layer\.magnitude))"
)


def convert_adapter(
    weights: str | Path,
    output_dir: str | Path,
    model_name: str,
    *,
    lora_alpha: int = 16,
    train_type: str = "",
) -> Path:
    """Write a PEFT adapter folder from a file of the original script, or the folder that holds it.

    lora_alpha: what that run was given; it is in no file. DoRA had no scaling there.
    train_type: that of the run, from which a merge knows the base; "" leaves it unsaid.

    Raises ValueError naming the flag. The folder appears when it is complete.
    """
    quant = _quant_of(train_type) if train_type else None
    output_dir = Path(output_dir)
    if output_dir.exists():
        raise ValueError(f"--output_dir {output_dir} already exists; give a new folder")
    check_folder("output_dir", output_dir)
    state, left_out = _read_original(weights)
    model = meta_model(read_config(model_name), torch.bfloat16)
    if wrapper_of(model):
        raise ValueError(
            f"--model_name {model_name}: the original script trained models for text alone; give the one "
            "that it was given"
        )
    modules = {name.rpartition(".lora_")[0] for name in state if ".lora_A." in name}
    _check_modules(modules, state, model, weights)
    config = peft_config(state, modules, model, model_name, lora_alpha)
    with complete_folder(output_dir) as new:
        write_tensors(
            {f"base_model.model.{name}": tensor for name, tensor in state.items()},
            new / WEIGHTS_FILE,
            {"format": "pt"},
        )
        save_peft_config(config, new)
        if quant:
            (new / RUN_FILE).write_text(json.dumps({"quant": quant}))
    print(
        f"adapter of {len(modules)} layers in {output_dir}: rank {config.r}, alpha {config.lora_alpha}"
        + (", DoRA" if config.use_dora else "")
        + (f"; left out {left_out} tensors of the base" if left_out else "")
    )
    return output_dir


def _quant_of(train_type: str) -> str:
    """What the base was rounded to under a train_type of the original script.

    Its HQQ weights had quantized scales and zeros, which no format here has.
    """
    if train_type not in TRAIN_TYPES:
        raise ValueError(f"--train_type {train_type}: choose {', '.join(TRAIN_TYPES)}")
    quant, _ = TRAIN_TYPES[train_type]
    return "the original script's hqq" if quant == "hqq" else quant


def _read_original(weights: str | Path) -> tuple[dict[str, Tensor], int]:
    """Adapter tensors under PEFT's names without its prefix, and how many others were left out.

    Norms are kept where they are the only others: then they were trained (train_layernorms).
    """
    path = Path(weights)
    if path.is_dir():
        path = path / _ORIGINAL_FILE
    if not path.is_file():
        raise ValueError(
            f"--weights {weights}: no such file; give the {_ORIGINAL_FILE} that the original script "
            "saved, or its folder"
        )
    state: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = {
                key: _WRAPPERS.sub("", key).removeprefix("base_model.model.") for key in file.keys()
            }
            others = [key for key, name in names.items() if not _NAME.fullmatch(name)]
            if all("norm" in key for key in others):
                state |= {names[key]: file.get_tensor(key) for key in others}
            state |= {
                _peft_name(names[key]): file.get_tensor(key)
                for key in names
                if _NAME.fullmatch(names[key])
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--weights {weights}: {path.name} can't be read ({first_line(error)})"
        ) from error
    if not any(".lora_A." in name for name in state):
        raise ValueError(
            f"--weights {weights}: it holds no adapter of the original script (no lora_AB, "
            "dora_layer or lora_A); full fine-tuning and Llama-Pro save none"
        )
    return state, len(names) - len(state)


def _peft_name(name: str) -> str:
    """PEFT's name of an adapter tensor of the original script."""
    found = _NAME.fullmatch(name)
    if found["magnitude"]:
        return f"{found['module']}.lora_magnitude_vector"
    return f"{found['module']}.lora_{found['letter'] or 'AB'[int(found['sequential'])]}.weight"


def _check_modules(
    modules: set[str], state: dict[str, Tensor], model: nn.Module, weights: str | Path
):
    """Every adapted layer must be a linear one of this model, of that shape. Raises ValueError."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name in sorted(modules):
        a, b = (state.get(f"{name}.lora_{letter}.weight") for letter in "AB")
        if b is None:
            raise ValueError(f"--weights {weights}: {name} has A and no B")
        shape = b.shape[0], a.shape[1]
        if name not in linears or linears[name].weight.shape != shape:
            raise ValueError(
                f"--model_name: {name} of --weights is for a weight of shape {shape}, "
                "which that model does not have; give the model that it was trained on"
            )
        if f"{name}.lora_magnitude_vector" in state and linears[name].bias is not None:
            raise ValueError(
                f"--weights {weights}: {name} has a bias, which the original script's DoRA "
                "scaled too and PEFT's does not; it can't be converted"
            )


def peft_config(
    state: dict[str, Tensor], modules: set[str], model: nn.Module, model_name: str, lora_alpha: int
) -> LoraConfig:
    """The PEFT configuration that gives these tensors the meaning they had."""
    ranks = {t.shape[0] for name, t in state.items() if ".lora_A." in name}
    if len(ranks) > 1:
        raise ValueError(
            f"--weights: ranks {', '.join(map(str, sorted(ranks)))} in one adapter; the original "
            "script uses one rank for all layers"
        )
    (rank,), use_dora = ranks, any("magnitude" in name for name in state)
    last = {name.rpartition(".")[2] for name in modules}
    everywhere = {n for n, _ in model.named_modules() if n.rpartition(".")[2] in last}
    norms = {name.split(".")[-2] for name in state if "norm" in name}
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_name,
        r=rank,
        lora_alpha=rank if use_dora else lora_alpha,
        use_dora=use_dora,
        target_modules=sorted(last if everywhere == modules else modules),
        modules_to_save=sorted(norms) or None,
    )
