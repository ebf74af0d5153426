"""Whether vLLM takes an adapter folder as it is, by the rules of vLLM's own loader.

Read from https://github.com/vllm-project/vllm: `vllm/lora/peft_helper.py` (validate_legal) for
adapter_config.json, `vllm/lora/lora_model.py` (from_local_checkpoint) for file names,
`vllm/lora/utils.py` (parse_fine_tuned_lora_name) for tensor names, `vllm/config/lora.py` for ranks,
`vllm/lora/model_manager.py` (_convert_3d_to_2d_moe_lora) for adapters of experts.
An adapter that is not taken can be merged, and the merged model served.
"""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..loading import first_line
from .adapter_folder import INITS, WEIGHTS_FILE, base_of, read_adapter_config

_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank can be; 16 if left out
_INITS_TAKEN = (*INITS, "mica", "lora_ga")
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?:lora_[AB]\.weight|lora_embedding_[AB])"
)

# A setting that is not taken -> what vLLM says of it.
_NOT_TAKEN = {
    "modules_to_save": "modules trained in full (modules_to_save)",
    "use_dora": "DoRA (use_dora)",
    "lora_bias": "biases of B (lora_bias)",
    "use_qalora": "QALoRA (use_qalora)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "layer_replication": "repeated layers (layer_replication)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "rank_pattern": "ranks per layer (rank_pattern): versions before 2026 scale them wrongly",
    "alpha_pattern": "alphas per layer (alpha_pattern): versions before 2026 scale them wrongly",
}


def check_adapter_folder(folder: str | Path, max_lora_rank: int = _MAX_RANKS[-1]) -> list[str]:
    """Why vLLM would refuse this adapter, or use it wrongly; empty if it takes it.

    max_lora_rank: what the server is started with. Raises ValueError if it is no adapter at all.
    """
    config = read_adapter_config(Path(folder))
    problems = [what for name, what in _NOT_TAKEN.items() if config.get(name)]
    if config["bias"] != "none":
        problems.append(f"trained biases (bias {config['bias']})")
    if config["init_lora_weights"] not in _INITS_TAKEN:
        problems.append(f"init_lora_weights {config['init_lora_weights']}, which changes the base")
    rank = max(config["r"], *(config["rank_pattern"] or {0: 0}).values())
    if rank > max_lora_rank:
        problems.append(f"rank {rank}, above --max-lora-rank {max_lora_rank}")
    return problems + _tensor_problems(Path(folder))


def _tensor_problems(folder: Path) -> list[str]:
    """What is wrong with the adapter's file and the names in it."""
    if not (folder / WEIGHTS_FILE).is_file():
        return [f"no {WEIGHTS_FILE}"]
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            names = sorted(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
    except (OSError, SafetensorError) as error:
        return [f"{WEIGHTS_FILE} can't be read ({first_line(error)})"]
    unknown = [name for name in names if not _TENSOR.fullmatch(name)]
    if unknown:
        return [
            f"a tensor that is not part of a LoRA: {unknown[0]} ({len(unknown)} of {len(names)})"
        ]
    return _expert_problems(shapes)


def _expert_problems(shapes: dict[str, list[int]]) -> list[str]:
    """What is wrong with adapters of experts: vLLM wants both stacks', and halves gate_up_proj's B."""
    problems: dict[str, None] = {}
    for name in shapes:
        place, _, part = name.partition(".experts.")
        if not part:
            continue
        down_a = shapes.get(f"{place}.experts.lora_A.weight")
        first_b = shapes.get(f"{place}.experts.base_layer.lora_B.weight")
        if down_a is None or first_b is None:
            problems["adapters of only one of the experts' two weights (target_parameters)"] = None
        elif first_b[0] != 2 * down_a[1]:
            problems["adapters of experts without a gate (target_parameters)"] = None
    return list(problems)


def _has_adapted_experts(folder: Path) -> bool:
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return any(".experts." in name for name in file.keys())


def serve_command(folder: str | Path, base: str | None = None) -> str:
    """The command that serves an adapter that vLLM takes; `base` where it is another than its own."""
    config = read_adapter_config(Path(folder))
    if base is None:
        with suppress(ValueError):  # it names none, or one that is elsewhere now
            base = base_of(folder)[0]
    rank = next(r for r in _MAX_RANKS if r >= config["r"])
    module = f"tuned={shlex.quote(str(folder))}"
    if _has_adapted_experts(Path(folder)):  # in PEFT's layout, A and B of all experts in a tensor
        given = dict(name="tuned", path=str(folder), is_3d_lora_weight=True)
        module = f"{shlex.quote(json.dumps(given))} --enable-mixed-moe-lora-format"
    return (
        f"vllm serve {shlex.quote(base or 'BASE')} --enable-lora "
        f"--max-lora-rank {rank} --lora-modules {module}"
    )
