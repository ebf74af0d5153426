"""A hub that can't be reached is not tried again and again, and what is in the cache is used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_qlora.hub import _address_of, _fault_of_connection
from tests.fakehub import fake_hub
from tests.parts import rest, slow
from tests.tokenizers import save_chat_model

ROOT = Path(__file__).parents[1]
READ = """
from fsdp_qlora.loading import checkpoint_folder, read_config
from fsdp_qlora.loading.tokenizer import load_tokenizer
for look in (read_config, load_tokenizer, checkpoint_folder):
    try: look("org/model"); print("found")
    except ValueError as error: print(error)
"""
DATA = """
from fsdp_qlora.data.sources import open_source
try: open_source("org/rows")
except ValueError as error: print(error)
"""
PUSH = """
from pathlib import Path
from fsdp_qlora.export.hub import push_folder
Path("{folder}/config.json").touch()
try: push_folder("{folder}", "me/tuned")
except ValueError as error: print(error)
"""


@pytest.fixture(scope="module")
def closed_port():
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def run(program: str, endpoint: str, cache: Path, **others) -> tuple[list[str], str]:
    """What a program says with this hub, line by line, and what is on stderr."""
    env = (
        os.environ
        | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "*",
        }
        | others
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


MODEL, ROWS = "--model_name org/model", "--dataset org/rows"


@pytest.mark.parametrize(
    "program, flags, others, why",
    [
        rest(READ + DATA, [MODEL, MODEL, MODEL, ROWS], {}, "can't be reached (Connection refused)"),
        slow(DATA, [ROWS], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_name_that_is_not_in_the_cache_is_one_line_with_the_remedy(
    closed_port, tmp_path, program, flags, others, why
):
    said, warned = run(program, f"http://127.0.0.1:{closed_port}", tmp_path, **others)
    assert len(said) == len(flags) and "etry" not in warned
    for line, flag in zip(said, flags, strict=True):
        assert line.startswith(flag) and why in line and "not in the cache" in line
        assert "; give a " in line and "folder" in line and f"hf download {flag.split()[1]}" in line


@pytest.mark.slow
def test_a_model_in_the_cache_is_found_without_a_network(closed_port, tmp_path):
    save_chat_model(tmp_path / "model", num_hidden_layers=1)
    with fake_hub() as hub:
        hub.served["org/model"] = tmp_path / "model"
        assert run(READ, hub.url, tmp_path / "cache")[0] == ["found"] * 3
    said, warned = run(READ, f"http://127.0.0.1:{closed_port}", tmp_path / "cache")
    assert said == ["found"] * 3 and "etry" not in warned


@pytest.mark.slow
def test_nothing_is_pushed_without_a_network(closed_port, tmp_path):
    said, _ = run(PUSH.format(folder=tmp_path), f"http://127.0.0.1:{closed_port}", tmp_path)
    assert (
        len(said) == 1 and said[0].startswith("--repo me/tuned") and "can't be reached" in said[0]
    )


@pytest.mark.parametrize(
    "endpoint, env, address",
    [
        ("https://huggingface.co", {}, ("huggingface.co", 443)),
        ("http://mirror:8080/hf", {}, ("mirror", 8080)),
        ("https://huggingface.co", {"https_proxy": "http://me:secret@proxy:3128"}, ("proxy", 3128)),
        ("https://huggingface.co", {"all_proxy": "proxy:1080"}, ("proxy", 1080)),
        (
            "https://hub.lab",
            {"https_proxy": "http://proxy:3128", "no_proxy": ".lab"},
            ("hub.lab", 443),
        ),
    ],
)
def test_the_proxy_is_tried_where_there_is_one(monkeypatch, endpoint, env, address):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert _address_of(endpoint) == address


def test_a_host_that_says_nothing_is_given_up(monkeypatch):
    """A full queue of connections: the address is there, and no handshake ever ends."""
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        assert _fault_of_connection(*server.getsockname(), 0) == "no answer in 0.2 seconds"
