"""``vitrail web``: a page in the browser on which a model's tokens merge under a slider."""

from __future__ import annotations

import socket
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli._shared import console, options
from vitrail.cli._shared.model import Loaded, load
from vitrail.cli._shared.ranks import command
from vitrail.errors import InvalidOption

EXAMPLES = (
    "vitrail web",
    "vitrail web timm:vit_small_patch14_dinov2 --image-size 518",
    "vitrail web vitrail:tiny runs/student",
    "vitrail web --static site",
)


def web(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models to show; the page compares several.", show_default=False),
    ] = None,
    static: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write plain files for any web space instead; the model runs in the browser."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 for any free one.")] = 8765,
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the browser.")] = False,
    size: options.Size = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
) -> None:
    """Open a page for one model, by default vitrail:tiny, or several: upload an image and move the slider.

    The page shows groups, predictions, cost, attention, norms and features. Nothing is stored, and only this machine
    can reach it. With --static, write the page of one model as plain files.
    """
    names = models or ["vitrail:tiny"]
    with command():
        if static is not None and len(names) > 1:
            raise InvalidOption(f"--static writes the page of one model; got {', '.join(names)}")
        if len(set(names)) < len(names):
            raise InvalidOption(f"each model may be named once; got {', '.join(names)}")
        place = "cpu" if static is not None else device
        loaded = []
        for name in names:
            with console.status(f"Loading {name}"):
                loaded.append(load(name, "web", random=random_weights, size=size, device=place))
        if random_weights:
            console.note("These models have random weights: what the page shows says nothing about trained ones.")
        if static is None:
            _serve(loaded, host, port, not no_open)
        else:
            _write(loaded[0], static)


def _write(loaded: Loaded, folder: Path) -> None:
    from vitrail.web.static import write_static

    with console.status("Writing the page"):
        written = write_static(_views(loaded), folder)
    size = sum(path.stat().st_size for path in written) / 2**20
    console.say(f"{len(written)} files, {size:.1f} MiB, are in {folder}", style="bold")
    console.answer({"files": [str(path) for path in written]})
    console.say(f"Copy them to any web space, or look at them here: python -m http.server -d {folder}")


def _serve(loaded: list[Loaded], host: str, port: int, opens: bool) -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise InvalidOption(
            f"vitrail web needs fastapi and uvicorn ({error}); install them with pip install 'vitrail[web]', or write "
            "plain files with --static DIR"
        ) from error
    from vitrail.web.cache import Cache
    from vitrail.web.server import LOCAL, create_app

    cache = Cache()
    views = [_views(one, cache=cache) for one in loaded]
    listening = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    if name not in LOCAL:
        console.note(f"Anyone who can reach {host} can use this page and this machine's time.")
    app = create_app(views, cache, (*LOCAL, name))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    console.say(f"The page is at {address} (Ctrl+C ends it)", style="bold")
    console.answer({"url": address})
    if opens:
        threading.Timer(0.5, webbrowser.open, (address,)).start()
    server.run(sockets=[listening])


def _views(loaded: Loaded, **more: Any) -> Any:
    from vitrail.web.model_views import ModelViews

    questions = tuple(one for one in loaded.questions if one.kind == "classification")
    return ModelViews(loaded.name, loaded.model.eval(), loaded.spec, loaded.layout, loaded.device, questions, **more)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise for a port that is in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InvalidOption(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); choose another with --port, or --port 0"
        ) from error
