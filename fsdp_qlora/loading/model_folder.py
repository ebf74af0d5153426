"""The model that --model_name names, in a folder or on the hub: its config.json and its files."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from ..catalog.known_models import why_no_model
from ..hub import asked_hub
from .weight_files import first_line, reason_of


def read_config(
    model_name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config.json of a local folder or a hub name.

    Raises ValueError naming --model_name if it is not there.
    """
    folder = Path(model_name)
    if looks_local(model_name) and not (folder / "config.json").is_file():
        if folder.is_dir():
            raise ValueError(f"--model_name {model_name}: {why_no_model(folder)}")
        what = "it is a file" if folder.exists() else "the folder does not exist"
        raise ValueError(
            f"--model_name {model_name}: {what}; give a folder in transformers' format or "
            "a hub name such as org/model"
        )
    with asked_hub(not looks_local(model_name)) as unreachable:
        try:
            return AutoConfig.from_pretrained(model_name, **pinned(revision, trust_remote_code))
        except Exception as error:  # of what the file says, as much as of a file that can't be had
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"--model_name {model_name}: it needs Python code of its own, which is "
                    "not run unasked; read that code, then give its commit: --revision "
                    "COMMIT --trust_remote_code true"
                ) from error
            if unreachable:
                raise not_at_hand(model_name, unreachable) from error
            if looks_local(model_name):
                raise ValueError(
                    f"--model_name {model_name}: config.json: {reason_of(error)}; look at "
                    "that file, or install the transformers that it was written by"
                ) from error
            raise ValueError(
                f"--model_name {model_name}: {first_line(error)}; check the name and the "
                "network, or give a folder; gated models need `hf auth login`"
            ) from error


def check_no_adapter(folder: str | Path):
    """Refuse a model's folder that has an adapter in it, which transformers would load on top of the model
    that the adapter names.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(
            f"--model_name {folder}: it contains an adapter_config.json, so transformers would load "
            "the adapter and the model named there instead; merge the adapter first, or move that file out"
        )


def pinned(revision: str | None, trust_remote_code: bool) -> dict:
    """Arguments of transformers' loaders; code comes from that same revision or not at all."""
    return dict(revision=revision or "main", **pinned_code(revision, trust_remote_code))


def pinned_code(revision: str | None, trust_remote_code: bool) -> dict:
    """The part of `pinned` that is about code."""
    if not trust_remote_code:
        return dict(trust_remote_code=False)
    return dict(trust_remote_code=True, code_revision=revision)


def looks_local(model_name: str) -> bool:
    """True for a path; a hub name has at most one slash and does not exist as a folder."""
    return (
        Path(model_name).exists()
        or model_name.startswith((".", "/", "~"))
        or model_name.count("/") != 1
    )


def not_at_hand(model_name: str, why: str) -> ValueError:
    """What to say of a model that is not in the cache, where no hub can be reached."""
    return ValueError(
        f"--model_name {model_name}: {why}, and it is not in the cache; give a local "
        f"folder, or fetch it with `hf download {model_name}` where there is a network"
    )


def checkpoint_folder(model_name: str, revision: str | None = None) -> Path:
    """The local folder of a model; a hub name is fetched into the cache first.

    Raises ValueError naming --model_name if it can't be fetched.
    """
    if looks_local(model_name):
        return Path(model_name)
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    # Some repositories hold the weights twice: `model*` is what transformers would read.
    wanted = ["model*.safetensors", "*.json", "*.model", "*.jinja"]
    with asked_hub() as unreachable:
        try:
            return Path(snapshot_download(model_name, revision=revision, allow_patterns=wanted))
        except (OSError, HTTPError) as error:
            if unreachable:
                raise not_at_hand(model_name, unreachable) from error
            raise ValueError(
                f"--model_name {model_name}: {first_line(error)}; start the same command again"
            ) from error
