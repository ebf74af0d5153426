"""Where chat templates are read: in TRL's package and in checkouts of public repositories.

The repositories' texts are not copied here, only what they do (`chat_templates.json`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trl


def _whole(text: str, name: str) -> str:
    """A file that is a template."""
    return text


def _in_python_dict(text: str, name: str) -> str:
    """The `chat_template` of a model in the first dict of a Python file."""
    models = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict))
    return ast.literal_eval(models)[name]["chat_template"]


def _in_model_list(text: str, name: str) -> str:
    """The `chat_template` of a model in a JSON list."""
    return next(m["chat_template"] for m in json.loads(text) if m["model_name"] == name)


def _in_settings(text: str, name: str) -> str:
    """The `chat_template` of a tokenizer's settings."""
    return json.loads(text)["chat_template"]


def _in_history(text: str, name: str) -> str | None:
    """The latest of a hub repository's templates; None if it never had one."""
    history = json.loads(text)
    if history["status"] == "no_template_in_any_revision":
        return None
    return history["_templates"][-1]["template"]


@dataclass(frozen=True)
class Source:
    """A repository with chat templates."""

    address: str  # at the revision that was read
    path: str  # of a template's file; {} is the row's `template`
    read: Callable[[str, str], str | None] = _whole  # of the file's text and the row's `template`


_GITHUB = "https://github.com"
SOURCES = {
    "trl": Source(f"{_GITHUB}/huggingface/trl/blob/v1.16.0/trl", "chat_templates/{}.jinja"),
    "llama.cpp": Source(f"{_GITHUB}/ggml-org/llama.cpp/blob/master", "models/templates/{}.jinja"),
    "openvino.genai": Source(
        f"{_GITHUB}/openvinotoolkit/openvino.genai/blob/da1db864d2bc1a265e9a036f5b57ef13f0e86c2c",
        "tests/python_tests/data/tokenizer_configs.py",
        _in_python_dict,
    ),
    "xinference": Source(
        f"{_GITHUB}/xorbitsai/inference/blob/7ecec16b63383e18e4af790c4b522fb7d79f7e77",
        "xinference/model/llm/llm_family.json",
        _in_model_list,
    ),
    "axolotl": Source(
        f"{_GITHUB}/axolotl-ai-cloud/axolotl/blob/067b021c8b87a9e5e380b9173c704cf7340e30f5",
        "src/axolotl/utils/chat_templates/templates/{}.jinja",
    ),
    "chat-template-drift": Source(
        f"{_GITHUB}/s1mar/chat-template-drift/blob/6dee80f6ffd401d97cb431f12d03940139c76de1",
        "data/history/{}.json",
        _in_history,
    ),
    "MiniMax-M1": Source(
        f"{_GITHUB}/MiniMax-AI/MiniMax-M1/blob/a2328261e3faf6b1262a6dea55442bc1083b46da",
        "{}.json",
        _in_settings,
    ),
}


def text_of(row: dict, checkout: Path | None = None) -> str | None:
    """A row's template, from TRL's package or a checkout; None if its model has none."""
    source = SOURCES[row["from"]]
    root = checkout or Path(trl.__file__).parent
    file = root / source.path.format(row["template"])
    return source.read(file.read_text(encoding="utf-8"), row["template"])


def source_of(row: dict) -> str:
    """Where to read a row's template."""
    source = SOURCES[row["from"]]
    return f"{source.address}/{source.path.format(row['template'])}"
