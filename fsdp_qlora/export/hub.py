"""Push a trained folder to a hub: private by default, and only what belongs there.

The token is the one that huggingface_hub finds (`hf auth login`, or HF_TOKEN); it is never a flag, so
it is in no shell history and no log. JSON files go up without folders of this machine.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..hub import why_offline
from ..json_input import read_object
from ..loading import first_line
from ..redact import redact, without_folders
from .card import CARD_FILE
from .merged_files import OTHER_FILES, TOKENIZER_FILES

_PUSHED_FILES = (
    "*.safetensors",
    "adapter_config.json",
    "config.json",
    "fsdp_qlora.json",
    "model.safetensors.index.json",
    CARD_FILE,
    *TOKENIZER_FILES,
    *OTHER_FILES,
)


def push_folder(
    folder: str | Path, repo: str, private: bool = True, revision: str | None = None
) -> str:
    """Upload an adapter or model folder in one commit; returns the address of the repository.

    Raises ValueError, naming the argument, for a folder without weights, a name or token that is not
    accepted, or a public repository where a private one was asked for.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
        raise ValueError(
            f"--folder {folder}: no adapter or model there; give a folder that training or merge "
            "saved, such as output/adapter"
        )
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and _is_pushed(path, folder)
    ]
    left = sorted(p.name for p in folder.iterdir() if p.is_file() and p not in files)
    if why := why_offline():
        raise ValueError(f"--repo {repo}: {why}; push from a machine with a network")
    api = HfApi(library_name="fsdp_qlora")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ValueError(
                f"--repo {repo} is already public; add --private false to publish there"
            )
        operations = [
            CommitOperationAdd(str(path.relative_to(folder)), content(path)) for path in files
        ]
        api.create_commit(
            repo, operations, commit_message="Upload from fsdp_qlora", revision=revision
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"--repo {repo}: {first_line(error)}") from error
    print(
        f"pushed {len(files)} files to {redact(str(url))} ({'private' if private else 'public'})"
        + (f"; not pushed: {', '.join(left)}" if left else "")
    )
    return str(url)


def _is_pushed(path: Path, folder: Path) -> bool:
    """Whether a file is part of an adapter or model: by name, so nothing else goes up by accident."""
    top = path.relative_to(folder).parts[0]
    return any(fnmatch(top, pattern) for pattern in _PUSHED_FILES)


def content(path: Path) -> str | bytes:
    """A file as it is pushed: weights as they are, JSON and text without this machine's folders."""
    if path.suffix == ".json" and path.name in (
        "adapter_config.json",
        "config.json",
        "fsdp_qlora.json",
    ):
        return json.dumps(_for_others(read_object(path)), indent=2).encode()
    if path.name == CARD_FILE:
        return redact(path.read_text(encoding="utf-8")).replace(str(Path.home()), "~").encode()
    return str(path)


def _for_others(value):
    """JSON whose texts name no folder and hold no secret."""
    if isinstance(value, str):
        return without_folders(value) if "\n" not in value else redact(value)
    if isinstance(value, dict):
        return {key: _for_others(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_for_others(part) for part in value]
    return value
