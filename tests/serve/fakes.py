"""A model that needs no weights, images, and a client that calls an application without a network."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import decode_image
from vitrail.serve import Answer, Limits
from vitrail.tokens import Role, TokenLayout, TokenSpec


class FakeModel:
    """A model whose embedding is the image's mean color, so that an answer shows whose it is."""

    name, merging, width = "fake", {"r": 2}, 3
    layout = TokenLayout.from_specs([TokenSpec("cls", Role.CLASS)], (1, 2, 2))

    def __init__(self) -> None:
        self.classes = {"label": ("red", "green", "blue")}
        self.batches: list[int] = []
        self.free = threading.Event()  # cleared, the model blocks
        self.free.set()
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None

    def prepare(self, data: bytes, name: str, max_pixels: int) -> Tensor:
        image = decode_image(data, name, max_pixels)
        pixel = image.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
        return torch.tensor(pixel, dtype=torch.float32)

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        self.entered.release()
        assert self.free.wait(30)
        self.batches.append(len(images))
        if self.error is not None:
            raise self.error
        return [Answer({"label": image / image.sum().clamp(min=1)}, image) for image in images]


def png(color: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (8, 8)) -> bytes:
    """Return an image of one color."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The kind of an error; its message must be a sentence of some length."""
        assert len(self.json["error"]["message"]) > 20
        kind: str = self.json["error"]["type"]
        return kind


@dataclass
class Client:
    """Calls an ASGI application as a server would; ``hang_up`` closes the connection of a request."""

    app: Callable[..., Awaitable[None]]
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        kind: str | None = None,
        *,
        announce: bool = True,
        finish: bool = True,
    ) -> Reply:
        """Send a request in parts; without ``finish`` the last one never comes."""
        parts = [body] if isinstance(body, bytes) else list(body)
        headers = [] if kind is None else [(b"content-type", kind.encode())]
        if announce:
            headers.append((b"content-length", str(sum(map(len, parts))).encode()))
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": headers,
            "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        coming = [
            {"type": "http.request", "body": part, "more_body": not finish or i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if coming:
                await asyncio.sleep(0)
                return coming.pop(0)
            await self.hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start = next(one for one in sent if one["type"] == "http.response.start")
        content = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
        return Reply(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, content)

    async def post(self, path: str, body: bytes | Sequence[bytes] = b"", kind: str | None = None, **more: Any) -> Reply:
        return await self.send("POST", path, body, kind, **more)

    async def get(self, path: str) -> Reply:
        return await self.send("GET", path)


def serving(check: Callable[[Client, FakeModel], Awaitable[None]], model: Any = None, **limits: Any) -> None:
    """Run a check against an application with a fake model."""
    from vitrail.serve.app import create_app

    async def run() -> None:
        chosen = FakeModel() if model is None else model
        app = create_app(chosen, Limits(**{"wait_ms": 0, "decoders": 2, **limits}))
        try:
            await asyncio.wait_for(check(Client(app), chosen), 60)
        finally:
            chosen.free.set()
            await app.state.service.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
