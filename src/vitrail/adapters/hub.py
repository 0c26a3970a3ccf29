"""The Hugging Face Hub: whether it can be reached, and its library without retries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT_SECONDS = 3.0
"""How long to wait for the Hub."""


def unreachable() -> str | None:
    """Return the Hub's host if it cannot be reached; its own library would retry for most of a minute.

    Behind a proxy, only the proxy knows.
    """
    try:
        settings: Any = import_module("huggingface_hub.constants")
        url = urlsplit(settings.ENDPOINT)
        if not (settings.HF_HUB_OFFLINE or url.hostname is None or {"https", "http", "all"} & getproxies().keys()):
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname, port), CONNECT_SECONDS).close()
    except OSError:
        return url.hostname
    except (ImportError, AttributeError):  # no such library, or a much older or newer one: do as usual
        pass
    return None


@contextmanager
def quiet(offline: bool) -> Iterator[None]:
    """Silence the Hub library's retries; with ``offline``, do not let it connect."""
    try:
        settings: Any = import_module("huggingface_hub.constants")
        log: Any = import_module("huggingface_hub.utils.logging")  # sets its level when it is imported, so before us
        before = settings.HF_HUB_OFFLINE, log.get_verbosity()
    except (ImportError, AttributeError):
        yield
        return
    try:
        settings.HF_HUB_OFFLINE = before[0] or offline
        if "HF_HUB_VERBOSITY" not in os.environ:
            log.set_verbosity(log.ERROR)
        yield
    finally:
        settings.HF_HUB_OFFLINE = before[0]
        log.set_verbosity(before[1])
