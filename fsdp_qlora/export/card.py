"""The README.md of a trained folder: what it is, made from what, on what, with which figures.

A model card as the Hugging Face hub reads it (https://huggingface.co/docs/hub/model-cards). It is for
others, so it names no folder of this machine and no secret.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from huggingface_hub import ModelCard, ModelCardData

from ..choices import FORMATS
from ..config import RunConfig
from ..config.settings import default_of, shown
from ..json_input import from_json, read_object
from ..lora_init import LoraInit
from ..redact import redact_all, without_folders

CARD_FILE = "README.md"
PACKAGES = ("fsdp_qlora", "torch", "transformers", "peft", "bitsandbytes")
_NOT_SHOWN = {
    "model_name",
    "revision",
    "dataset",
    "dataset_split",
    "output_dir",
    "data_cache",
    "resume",
    "log_to",
    "verbose",
    "device",
    "name",
    "group",
    "entity",
    "project_name",
    "master_addr",
    "master_port",
    "world_size",
    "loading_workers",
    "preview",
    "quantized_cache",
    "log_every",
    "price_per_hour",
}


def run_record(config: RunConfig, data_digest: str, device_name: str, ranks: int) -> dict:
    """What is kept beside trained weights: the settings, and where they came from. No secrets."""
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    about = dict(
        data_sha256=data_digest,
        hardware=f"{ranks} x {device_name}",
        packages=packages,
        date=datetime.now(UTC).date().isoformat(),
    )
    return redact_all(asdict(config) | {"about": about})


def write_card(
    folder: Path, run: dict, metrics: Path | None = None, *, merged: tuple[Path, str] | None = None
):
    """README.md of `folder`, from the settings of its run and the figures in a metrics.jsonl.

    merged: the adapter's folder and the base in words, if `folder` is what a merge made of them.
    """
    adapter = _read_adapter(merged[0] if merged else folder)
    text = _card_text(run, adapter, _read_metrics(metrics), merged and merged[1])
    (folder / CARD_FILE).write_text(ModelCard(text).content, encoding="utf-8")


def _card_text(run: dict, adapter: dict, lines: list[dict], merged_base: str | None = None) -> str:
    """The card as text: its metadata, a table of facts and one of settings, and how it is used."""
    base = without_folders(run["model_name"])
    is_hub_name = base == run["model_name"] and base.count("/") == 1
    kind = f"{_adapter_kind(adapter)} of" if adapter else "All weights of"
    is_adapter = bool(adapter) and not merged_base
    data = ModelCardData(
        base_model=base if is_hub_name else None,
        library_name="peft" if is_adapter else "transformers",
        tags=["fsdp_qlora", *(["lora"] if adapter else [])],
        pipeline_tag="text-generation",
    )
    rows = facts(run, base) | figures(lines) | ({"merged into": merged_base} if merged_base else {})
    return "\n".join(
        [
            "---",
            data.to_yaml(),
            "---",
            "",
            f"# {base}, fine-tuned",
            "",
            f"{kind} {base}, trained with fsdp_qlora{' and merged' if merged_base else ''}.",
            "",
            *_markdown_table(rows),
            "",
            "## Settings that differ from the defaults",
            "",
            *_markdown_table(changed(run)),
            "",
            "## Use",
            "",
            "```python",
            *_usage(base, is_adapter, run.get("quant")),
            "```",
            "",
        ]
    )


def _adapter_kind(adapter: dict) -> str:
    """The adapter in words."""
    kind = "DoRA" if adapter.get("use_dora") else "rsLoRA" if adapter.get("use_rslora") else "LoRA"
    targets = adapter.get("target_modules") or []
    names = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    return f"{kind} adapter (rank {adapter['r']}, alpha {adapter['lora_alpha']}; {names})"


def facts(run: dict, base: str) -> dict:
    """Where the weights come from."""
    about = run.get("about", {})
    packages = ", ".join(f"{name} {number}" for name, number in about.get("packages", {}).items())
    rows = {
        "base": base,
        "revision": run.get("revision"),
        "base weights in training": run.get("quant"),
        "the adapter is for": fits(run),
        "data": without_folders(run["dataset"]),
        "sha256 of the tokenized rows": about.get("data_sha256"),
        "hardware": about.get("hardware"),
        "software": packages,
        "date": about.get("date"),
    }
    return {name: value for name, value in rows.items() if value}


def fits(run: dict) -> str | None:
    """Which form of the base an adapter goes with, where that is not plain from its kind."""
    kind, quant = run.get("init_lora_weights", "default"), run.get("quant")
    if kind == "default" or run.get("adapter") == "none":
        return None
    if not LoraInit(kind, run.get("loftq_iter", 1)).changes_base:
        return f"the base rounded to {quant}"
    if quant == "none":
        return "the original weights"
    return (
        "the original weights; in training all of them but what the adapter began as were rounded "
        f"to {quant}, and `fsdp-qlora merge` repeats that"
    )


def figures(lines: list[dict]) -> dict:
    """What was measured, from the lines of metrics.jsonl."""
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    evaluations = [line for line in lines if line.get("kind") == "eval"]
    if not steps:
        return {}
    speeds = [line["tokens_per_second"] for line in steps]
    found = {
        "optimizer steps": steps[-1]["step"],
        "trained tokens": f"{sum(line['trained_tokens'] for line in steps):,}",
        "training loss, first and last step": f"{steps[0]['loss']:.4f}, {steps[-1]['loss']:.4f}",
        "tokens per second, median": f"{median(speeds):,.0f}",
    }
    if evaluations:
        best = min(evaluations, key=lambda line: line["eval_loss"])
        found["lowest held-out loss"] = f"{best['eval_loss']:.4f} after step {best['step']}"
    peak = max(line.get("peak_allocated_gib", 0) for line in steps)
    return found | ({"peak memory of a GPU": f"{peak:.1f} GiB"} if peak else {})


def changed(run: dict) -> dict:
    """Settings that differ from their defaults, without those of this machine alone."""
    return {
        f.name: without_folders(shown(run[f.name]))
        for f in fields(RunConfig)
        if f.name in run and f.name not in _NOT_SHOWN and run[f.name] != default_of(f)
    }


def _markdown_table(rows: dict) -> list[str]:
    """Two columns of Markdown."""
    return [
        "| | |",
        "|---|---|",
        *(f"| {name} | {str(value).replace('|', ' ')} |" for name, value in rows.items()),
    ]


_OF_4_BITS = 'load_in_4bit=True, bnb_4bit_quant_type="{}", bnb_4bit_compute_dtype=torch.bfloat16'


def _usage(base: str, is_adapter: bool, quant: str | None) -> list[str]:
    """How others load it: the base in the bits that the adapter learned on, where bitsandbytes has them."""
    known = FORMATS.get(quant or "")
    bits = _OF_4_BITS.format(quant) if is_adapter and known and known.is_bitsandbytes else None
    names = ["AutoModelForCausalLM", "AutoTokenizer", *(["BitsAndBytesConfig"] if bits else [])]
    imports = [f"from transformers import {', '.join(names)}", ""]
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")'
    if not is_adapter:
        load = 'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto")'
        return [*imports, load, tokenizer]
    rounded = [f"quantization = BitsAndBytesConfig({bits})"] if bits else []
    given = ", quantization_config=quantization" if bits else ""
    return [
        *(["import torch"] if bits else []),
        "from peft import PeftModel",
        *imports,
        *rounded,
        f'model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto"{given})',
        'model = PeftModel.from_pretrained(model, "THIS FOLDER")',
        tokenizer,
    ]


def _read_adapter(folder: Path) -> dict:
    """adapter_config.json of a folder; empty if it is a whole model."""
    path = folder / "adapter_config.json"
    return read_object(path) if path.is_file() else {}


def _read_metrics(path: Path | None) -> list[dict]:
    """Lines of a metrics.jsonl; none if there is no such file, or for a line that was cut off."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []:
        try:
            lines.append(from_json(text))
        except ValueError:
            continue
    return lines
