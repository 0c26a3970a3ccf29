"""The process of a server: its socket, its signals, and how it starts and stops."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vitrail.errors import InvalidOption, ServingError
from vitrail.serve.limits import Limits
from vitrail.serve.model import ServedModel

PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")

BACKLOG = 256
"""Connections that the system keeps until the server accepts them."""

SPARE_CONNECTIONS = 64
"""Connections beyond twice the requests inside; more are refused before their head is read."""

LAST_BATCH_SECONDS = 10.0
"""Time for the batch that runs when everything else has ended."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def check_installed() -> None:
    """Raise if a package of the extra ``serve`` is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ServingError(f"vitrail serve needs {', '.join(missing)}; install with `pip install vitrail[serve]`")


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket at an address, not listening yet; raise ``ServingError`` if that is taken or does not exist."""
    if not 0 <= port <= 65535:
        raise InvalidOption(f"port={port}: expected 0 (any free port) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServingError(f"{host!r} is not an address of this machine ({error.strerror}); try 127.0.0.1") from error
    with socket.socket(family, kind, protocol) as opened:
        if os.name == "posix":
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _explained(host, port):
            opened.bind(address)
        yield opened


@contextmanager
def _explained(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            todo = "another program uses it; choose another port, or 0 for a free one"
        elif error.errno == errno.EACCES:
            todo = "it needs more rights; choose a port from 1024 on"
        else:
            todo = f"{error.strerror}; use an address of this machine, like 127.0.0.1"
        raise ServingError(f"port {port} of {host} cannot be opened: {todo}") from error


def run(
    model: ServedModel,
    opened: socket.socket,
    limits: Limits,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    access_log: bool = False,
) -> int:
    """Serve a model at a socket until a signal stops it; return how many requests it could not answer in time.

    The first SIGTERM or Ctrl-C finishes what is inside within the grace period, a second one ends at once.
    """
    check_installed()
    host, port = opened.getsockname()[:2]
    with _explained(host, port):
        opened.listen(BACKLOG)
    shown = f"[{host}]" if ":" in host else host
    return asyncio.run(_serve(model, opened, limits, lambda: on_ready(f"http://{shown}:{port}"), access_log))


async def _serve(
    model: ServedModel, opened: socket.socket, limits: Limits, on_ready: Callable[[], None], access_log: bool
) -> int:
    import uvicorn

    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # damaged forms are the client's problem
    from vitrail.serve.app import create_app

    class Server(uvicorn.Server):
        """A server that leaves signals to us, and says when it takes connections."""

        def capture_signals(self) -> Any:
            return _signals(self, stop)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

    app = create_app(model, limits)
    service = app.state.service
    server = Server(
        uvicorn.Config(
            app,
            access_log=access_log,
            log_level="info" if access_log else "warning",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=10,
            limit_concurrency=2 * limits.queue + SPARE_CONNECTIONS,
            timeout_graceful_shutdown=2,
        )
    )
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        """Finish what is inside first: new requests are answered by 503 meanwhile, and then the socket is closed."""
        if stopping:
            server.force_exit = server.should_exit = True
            return

        async def finish() -> None:
            await service.stop()
            server.should_exit = True

        stopping.append(asyncio.ensure_future(finish()))

    await server.serve([opened])
    for task in stopping:
        task.cancel()
    await service.close()
    if not await asyncio.to_thread(service.batcher.ended, LAST_BATCH_SECONDS):
        logging.getLogger("vitrail.serve").error("the model has not ended its last batch; exiting without it")
        logging.shutdown()
        os._exit(1)  # Python's teardown crashes under a thread that computes
    return int(service.lost)


@contextmanager
def _signals(server: Any, stop: Callable[[], None]) -> Iterator[None]:
    """Call a function on SIGTERM and SIGINT inside a ``with`` block, in the event loop."""
    loop = asyncio.get_running_loop()
    try:
        for one in SIGNALS:
            loop.add_signal_handler(one, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        yield
        return
    try:
        yield
    finally:
        for one in SIGNALS:
            loop.remove_signal_handler(one)
