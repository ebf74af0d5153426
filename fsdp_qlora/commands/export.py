"""Commands that take a trained adapter further: merge it, convert it, check it, push it.

Each has settings of its own and none of RunConfig's. Pure: no torch before a command runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from ..catalog.known_models import hub_name
from ..choices import FORMATS
from ..config.flags import parse_alone, with_named_words
from ..config.settings import opt


@dataclass
class _MergeOptions:
    """Merge"""

    model_name: str | None = opt(
        None,
        "base model: folder or hub name; default: the adapter's own",
        example="./SmolLM2-135M-Instruct",
    )
    revision: str | None = opt(
        None,
        "branch, tag or commit of the base on the hub; default: the adapter's own, without "
        "--model_name",
    )
    adapter_folder: str | None = opt(
        None, "trained adapter folder, also as the first argument", example="output/adapter"
    )
    output_dir: str = opt("merged", "new folder for the merged model")
    merge_base: str = opt(
        "auto",
        "original = the weights of --model_name; dequantized = the same, quantized to 4 bits "
        "and back, as in QLoRA training; auto = as the adapter was trained",
        choices=("auto", "original", "dequantized"),
    )
    base_quant: str = opt(
        "auto",
        "format of a dequantized base; auto = from the adapter folder",
        choices=("auto", *FORMATS),
    )
    merge_format: str = opt(
        "safetensors",
        "bnb4 = linear weights in NF4, for transformers and bitsandbytes; without an adapter, "
        "quantizes the base",
        choices=("safetensors", "bnb4"),
    )
    dtype: str = opt("bf16", "dtype of the merged weights", choices=("bf16", "fp16", "fp32"))
    verbose: bool = opt(False, "after an error, print the traceback")


def _merge_command(argv: list[str]):
    """Merge an adapter into its base model."""
    options = parse_alone(
        with_named_words(argv, "adapter_folder"),
        _MergeOptions,
        "fsdp-qlora merge",
        about=_merge_command.__doc__,
    )
    from ..export.adapter_folder import base_of
    from ..export.merge import merge_adapter

    name, revision = options.model_name and hub_name(options.model_name), options.revision
    if name is None:
        name, trained_on = base_of(options.adapter_folder)
        revision = revision or trained_on
    merge_adapter(
        name,
        options.adapter_folder,
        options.output_dir,
        revision=revision,
        merge_base=options.merge_base,
        base_quant=options.base_quant,
        merge_format=options.merge_format,
        dtype=options.dtype,
    )


@dataclass
class _ConvertOptions:
    """Convert"""

    weights: str = opt(
        "model_state_dict.safetensors",
        "file that the original script saved, or its folder; also as the first argument",
    )
    model_name: str = opt("meta-llama/Llama-2-7b-hf", "base model it was trained on")
    output_dir: str = opt("adapter", "new folder for the PEFT adapter")
    lora_alpha: int = opt(16, "--lora_alpha of that run; its DoRA had none")
    train_type: str = opt(
        "", "--train_type of that run, so that a merge knows the base", example="custom_qlora"
    )
    verbose: bool = opt(False, "after an error, print the traceback")


def _convert_command(argv: list[str]):
    """Make a PEFT adapter of what the original script saved."""
    options = parse_alone(
        with_named_words(argv, "weights"),
        _ConvertOptions,
        "fsdp-qlora convert",
        about=_convert_command.__doc__,
    )
    from ..export.convert import convert_adapter

    convert_adapter(
        options.weights,
        options.output_dir,
        hub_name(options.model_name),
        lora_alpha=options.lora_alpha,
        train_type=options.train_type,
    )


@dataclass
class _CheckOptions:
    """Check"""

    adapter_folder: str = opt(
        "output/adapter", "trained adapter folder, also as the first argument"
    )
    model_name: str | None = opt(
        None,
        "base model: say what of it works here, from its config.json alone, instead of checking "
        "an adapter",
        example="Qwen/Qwen3-Next-80B-A3B-Instruct",
    )
    revision: str | None = opt(None, "branch, tag or commit of --model_name on the hub")
    trust_remote_code: bool = opt(False, "run Python code of --model_name")
    max_lora_rank: int = opt(512, "--max-lora-rank of vLLM")
    verbose: bool = opt(False, "after an error, print the traceback")


def _check_command(argv: list[str]):
    """Say what of a model works here, or whether vLLM takes an adapter folder as it is."""
    options = parse_alone(
        with_named_words(argv, "adapter_folder"),
        _CheckOptions,
        "fsdp-qlora check",
        about=_check_command.__doc__,
    )
    if options.model_name:
        from .check import print_answers

        return print_answers(options.model_name, options.revision, options.trust_remote_code)
    from ..export.serving import check_adapter_folder, serve_command

    problems = check_adapter_folder(options.adapter_folder, options.max_lora_rank)
    if problems:
        raise ValueError(
            f"--adapter_folder {options.adapter_folder}: vLLM does not support "
            f"{'; nor '.join(problems)}. Serve the merged model instead: fsdp-qlora merge "
            f"--adapter_folder {quote(options.adapter_folder)}"
        )
    print(f"vLLM can serve this adapter:\n  {serve_command(options.adapter_folder)}")


@dataclass
class _ExportOptions:
    """Export"""

    folder: str = opt("output/adapter", "adapter or model folder, also as the first argument")
    to: str = opt(
        "vllm",
        "program that runs it: vllm and gguf (llama.cpp) print their commands, ollama writes a "
        "Modelfile too",
        choices=("vllm", "ollama", "gguf"),
    )
    model_name: str | None = opt(
        None, "base of an adapter: folder or hub name; default: the adapter's own"
    )
    output_dir: str = opt("exported", "folder for what is written, and the name in Ollama")
    verbose: bool = opt(False, "after an error, print the traceback")


def _export_command(argv: list[str]):
    """Print what vLLM, Ollama or llama.cpp need to run what was trained."""
    options = parse_alone(
        with_named_words(argv, "folder"),
        _ExportOptions,
        "fsdp-qlora export",
        about=_export_command.__doc__,
    )
    from ..export.elsewhere import export_to

    name = options.model_name and hub_name(options.model_name)
    print(export_to(options.to, options.folder, options.output_dir, name))


@dataclass
class _PushOptions:
    """Push"""

    folder: str = opt("output/adapter", "adapter or model folder, also as the first argument")
    repo: str = opt("", "name on the hub, also as the second argument", example="me/my-adapter")
    private: bool = opt(True, "false makes it public")
    revision: str | None = opt(None, "branch to push to")
    verbose: bool = opt(False, "after an error, print the traceback")


def _push_command(argv: list[str]):
    """Push an adapter or model folder to a hub, private by default."""
    options = parse_alone(
        with_named_words(argv, "folder", "repo"),
        _PushOptions,
        "fsdp-qlora push",
        about=_push_command.__doc__,
    )
    if not options.repo:
        raise ValueError("--repo is missing; give a name such as me/my-adapter")
    from ..export.hub import push_folder

    push_folder(options.folder, options.repo, options.private, options.revision)


DELIVERY = {
    "merge": _merge_command,
    "convert": _convert_command,
    "check": _check_command,
    "export": _export_command,
    "push": _push_command,
}
