"""Load test of ``vitrail serve``: many clients at once, merged against unmerged; every answer is checked.

python benchmarks/serving.py --model vitrail:tiny --merge r=8 --clients 64 --requests 512

Each client sends one image after the other over its own connection; a refused one (503) is sent again after a pause.
Before, every image ran alone through the same model in this process: an answer that differs from its own image's, and
not only in rounding, is lost or mixed up. Latencies count from the first try to the answer, waiting included.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

TOLERANCE = 1e-3
"""Largest difference of an embedding from that of its image alone, relative to its norm: batches round differently."""


@dataclass(frozen=True)
class Load:
    """What a load test measured.

    Attributes:
        lost: requests without an answer, or with an error.
        mixed_up: answers that are not those of their own image.
        refused: times that a request was refused (503) and sent again.
        p50_ms, p99_ms: latency.
        images_per_s: throughput.
        mean_batch: mean number of images in a batch of the model.
    """

    merge: str | None
    clients: int
    requests: int
    lost: int
    mixed_up: int
    refused: int
    p50_ms: float
    p99_ms: float
    images_per_s: float
    mean_batch: float


def random_images(count: int, side: int = 96) -> list[bytes]:
    """Return different images as PNG: smooth random colors, each of its own."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
        files.append(file.getvalue())
    return files


class Connection:
    """A connection to a server that stays open from request to request."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: bytes = b"", kind: str = "image/png") -> tuple[int, dict, bytes]:
        """Send a request; return status, headers and body of the answer."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            await self.close()
        return int(status.split()[1]), headers, content

    async def close(self) -> None:
        """Close the connection."""
        streams, self.streams = self.streams, None
        if streams is not None:
            streams[1].close()
            with suppress(OSError):
                await streams[1].wait_closed()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def drive(
    port: int, images: Sequence[bytes], wanted: torch.Tensor, clients: int, requests: int, merge: str | None = None
) -> Load:
    """Send images by some clients at once, and compare each embedding with the wanted one of its image."""
    numbers = iter(range(requests))
    seconds: list[float] = []
    lost = mixed_up = refused = 0

    async def client() -> None:
        nonlocal lost, mixed_up, refused
        async with Connection(port) as connection:
            for number in numbers:
                index = number % len(images)
                start = time.perf_counter()
                try:
                    while (answer := await connection.send("POST", "/embed", images[index]))[0] == 503:
                        refused += 1
                        await asyncio.sleep(0.05)
                except (OSError, asyncio.IncompleteReadError):
                    lost += 1
                    await connection.close()
                    continue
                seconds.append(time.perf_counter() - start)
                if answer[0] != 200:
                    lost += 1
                    continue
                embedding = torch.tensor(json.loads(answer[2])["results"][0]["embedding"])
                mixed_up += int((embedding - wanted[index]).norm() > TOLERANCE * wanted[index].norm())

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - start
    async with Connection(port) as connection:
        metrics = (await connection.send("GET", "/metrics"))[2].decode()
    batches, total = (float(re.search(rf"vitrail_batch_images_{name} (\S+)", metrics)[1]) for name in ("count", "sum"))  # type: ignore[index]
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [float("nan")] * 99
    return Load(
        merge=merge,
        clients=clients,
        requests=requests,
        lost=lost,
        mixed_up=mixed_up,
        refused=refused,
        p50_ms=round(cuts[49] * 1e3, 1),
        p99_ms=round(cuts[98] * 1e3, 1),
        images_per_s=round(len(seconds) / took, 1),
        mean_batch=round(total / batches, 2),
    )


@torch.inference_mode()
def alone(model: str, merge: str | None, images: Sequence[bytes]) -> torch.Tensor:
    """Return the embedding of each image, run alone in this process."""
    import vitrail
    from vitrail.serve import ServedModel
    from vitrail.surgery.saving import apply, read_settings

    loaded = vitrail.load_model(model)
    if merge is not None:
        apply(read_settings(merge), loaded)
    served = ServedModel(loaded, model)
    return torch.stack([served([served.prepare(one, "image")])[0].embedding for one in images])


class ServerProcess:
    """``vitrail serve`` in a process of its own, on a free port."""

    def __init__(self, model: str, merge: str | None = None, *options: str) -> None:
        self.command = [sys.executable, "-m", "vitrail", "serve", model, "--port", "0", *options]
        self.command += [] if merge is None else ["--merge", merge]

    async def __aenter__(self) -> ServerProcess:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        assert self.process.stdout is not None
        self.output = ""
        while (found := re.search(r"Serving at http://\S+:(\d+)", self.output)) is None:
            line = await self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server did not start: {self.output}")
            self.output += line.decode()
        self.port = int(found[1])
        return self

    async def stop(self) -> int:
        """Stop the server by SIGTERM; return its exit code."""
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGTERM)
        self.output += (await self.process.stdout.read()).decode()
        return await self.process.wait()

    async def __aexit__(self, *exception: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the load test unmerged, merged, and both again in the opposite order."""
    images = random_images(arguments.images)
    settings = [None, arguments.merge]
    wanted = {merge: alone(arguments.model, merge, images) for merge in settings}
    results = []
    for merge in [*settings, *reversed(settings)]:
        async with ServerProcess(arguments.model, merge, "--batch", str(arguments.batch), "--timeout", "300") as server:
            await drive(server.port, images, wanted[merge], arguments.clients, arguments.clients)  # warm-up
            load = await drive(server.port, images, wanted[merge], arguments.clients, arguments.requests, merge)
            code = await server.stop()
        print(load, f"exit code {code}", flush=True)  # noqa: T201
        results.append(asdict(load))
    return results


def main() -> None:
    """Run the load test from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vitrail:tiny")
    parser.add_argument("--merge", default="r=8")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--images", type=int, default=64, help="different images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    for result in results:
        assert result["lost"] == result["mixed_up"] == 0, result
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
