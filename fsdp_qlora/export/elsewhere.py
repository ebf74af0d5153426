"""What other programs need to run what was trained: vLLM, Ollama, llama.cpp.

https://docs.vllm.ai/en/latest/features/lora.html, https://docs.ollama.com/modelfile and
https://github.com/ggml-org/llama.cpp (convert_lora_to_gguf.py, convert_hf_to_gguf.py). Ollama and
llama.cpp take what vLLM takes of an adapter, but for another scale than alpha / R. Whatever they do not
take is merged first.
"""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote

from transformers import AutoTokenizer

from ..atomic_files import write_text
from ..data import stop_token_ids
from ..writable import check_folder
from .adapter_folder import base_of, read_adapter_config
from .serving import check_adapter_folder, serve_command


def export_to(program: str, folder: str, output_dir: str, model_name: str | None = None) -> str:
    """Commands that run a trained folder in a program; for Ollama its Modelfile is written too.

    folder: an adapter, or a whole model. model_name: the adapter's base, where it is elsewhere now.
    Raises ValueError, with what to do first, for an adapter that the program does not take.
    """
    path = Path(folder)
    if not (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(
            f"--folder {folder}: no adapter_config.json and no config.json there; give an adapter or model "
            "folder, such as output/adapter"
        )
    if program == "ollama":
        check_folder("output_dir", output_dir)
    base = None
    if (path / "adapter_config.json").is_file():
        _check(program, folder)
        base = model_name or base_of(folder)[0]
    return {"vllm": _vllm, "ollama": _ollama, "gguf": _gguf}[program](path, base, Path(output_dir))


def _check(program: str, folder: str):
    """Refuse an adapter that the program can't apply, or would apply wrongly."""
    problems = check_adapter_folder(folder)
    if program != "vllm" and read_adapter_config(Path(folder)).get("use_rslora"):
        problems.append("a scale by the root of the rank (use_rslora)")
    if program != "vllm" and read_adapter_config(Path(folder)).get("target_parameters"):
        problems.append("adapters of experts (target_parameters)")
    if problems:
        raise ValueError(
            f"--folder {folder}: {program} does not support {'; nor '.join(problems)}. Merge it first, "
            f"and export the result: fsdp-qlora merge {quote(folder)} --output_dir merged"
        )


def _vllm(folder: Path, base: str | None, output: Path) -> str:
    if base is None:
        return f"vllm serve {quote(str(folder))}"
    return serve_command(folder, base)


def _ollama(folder: Path, base: str | None, output: Path) -> str:
    """Ollama reads safetensors; it finds the chat template of the models that it knows."""
    whole = str(folder.resolve()) if base is None else base
    if Path(whole).exists():
        whole = str(Path(whole).resolve())
    lines = [f"FROM {whole}"]
    if base is not None:
        lines.append(f"ADAPTER {folder.resolve()}")
    lines += [f'PARAMETER stop "{token}"' for token in _stops(folder)]
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "Modelfile", "\n".join(lines) + "\n")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output.resolve().name).strip("-.") or "tuned"
    said = f"ollama create {name} -f {quote(str(output / 'Modelfile'))}\nollama run {name}"
    if not Path(whole).exists():
        said = (
            f"# FROM names {whole} on the hub: put the folder of its weights, or Ollama's name of the "
            f"same model, into {output / 'Modelfile'}\n{said}"
        )
    return said


def _stops(folder: Path) -> list[str]:
    """The tokens that end an answer, where the folder has a tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        return []
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer))


def _gguf(folder: Path, base: str | None, output: Path) -> str:
    """llama.cpp's own scripts have the map of each architecture's weights."""
    file = quote(str(output / f"{folder.resolve().name}.gguf"))
    given = quote(str(folder))
    make = f"mkdir -p {quote(str(output))}\n"  # the scripts make no folder
    if base is None:
        return (
            f"{make}python llama.cpp/convert_hf_to_gguf.py {given} --outfile {file} --outtype bf16"
        )
    fetch, whole = "", quote(str(output / "base.gguf"))
    if not Path(base).exists():
        kept = str(output / "base")
        fetch, base = f"hf download {quote(base)} --local-dir {quote(kept)}\n", kept
    return (
        f"{make}{fetch}"
        f"python llama.cpp/convert_hf_to_gguf.py {quote(base)} --outfile {whole} --outtype bf16\n"
        f"python llama.cpp/convert_lora_to_gguf.py {given} --base {quote(base)} --outfile {file} "
        "--outtype f16\n"
        f"llama.cpp/build/bin/llama-cli -m {whole} --lora {file}"
    )
