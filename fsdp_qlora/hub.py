"""The Hugging Face hub: asked where it can be reached, and else left alone at once.

huggingface_hub tries six times for each file, which without a network is a minute of silence. So one
connection is tried before: where there is none, what is in the cache is used, and the rest is refused.
https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from urllib.parse import urlsplit

SECONDS = 5.0  # for an answer: three tries of TCP; HF_HUB_ETAG_TIMEOUT is for slower networks
_REMEMBERED = 300  # seconds, for a run asks for many files


@contextmanager
def asked_hub(is_asked: bool = True) -> Iterator[str | None]:
    """For the length of the block a hub that can't be reached is not tried, only the cache.

    Gives why it can't be reached; None if it answers, or is not asked.
    """
    why = why_offline() if is_asked else None
    with offline() if why else nullcontext():
        yield why


def why_offline() -> str | None:
    """Why only the cache can be read; None if the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    fault = _fault_of_connection(
        *_address_of(constants.ENDPOINT), int(time.monotonic() / _REMEMBERED)
    )
    return fault and f"{constants.ENDPOINT} can't be reached ({fault})"


def _address_of(endpoint: str) -> tuple[str, int]:
    """Host and port that a request goes to: the endpoint's, or those of the proxy before it."""
    url, proxies = urlsplit(endpoint), urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname, url.port or (443 if url.scheme == "https" else 80)


@lru_cache
def _fault_of_connection(host: str, port: int, _period: int) -> str | None:
    """Why nobody answers there; None if somebody does. In a thread, for a name may take long to find."""
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    said: list[str | None] = [f"no answer in {seconds:g} seconds"]

    def knock():
        try:
            asyncio.run(connect(host, port))
            said[0] = None
        except OSError as error:
            said[0] = (
                os.strerror(error.errno)
                if (error.errno or 0) > 0
                else (error.strerror or "no connection")
            )

    thread = threading.Thread(target=knock, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0]


async def connect(host: str, port: int):
    """Connect to any of a host's addresses, and leave."""
    _, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=0.25)
    writer.close()


@contextmanager
def offline() -> Iterator[None]:
    """What HF_HUB_OFFLINE=1 does, for the length of the block."""
    from huggingface_hub import constants

    places = [constants, *([sys.modules["datasets"].config] if "datasets" in sys.modules else [])]
    were = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, was in zip(places, were, strict=True):
            place.HF_HUB_OFFLINE = was
