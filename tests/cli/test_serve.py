"""``vitrail serve``: many clients at once, the end by a signal, and errors before a model is loaded."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("uvicorn", reason="serving needs the extra serve")

from benchmarks.serving import Connection, Load, ServerProcess, alone, drive, random_images

import vitrail
from tests.cli.words import one_line
from vitrail.cli import app

CLIENTS = 64


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


async def under_load(model: str, merge: str | None, requests: int, *options: str) -> tuple[Load, int, str]:
    """Run a load test, then stop the server by SIGTERM while requests are inside; all of these must be answered."""
    images = random_images(32, side=48)
    wanted = alone(model, merge, images)
    async with ServerProcess(model, merge, *options) as server:
        load = await drive(server.port, images, wanted, CLIENTS, requests, merge)
        async with AsyncExitStack() as stack:
            last = [await stack.enter_async_context(Connection(server.port)) for _ in range(9)]
            probe = last.pop()
            asking = [asyncio.ensure_future(one.send("POST", "/embed", images[i])) for i, one in enumerate(last)]
            while b"vitrail_requests_inside 0.0" in (await probe.send("GET", "/metrics"))[2]:
                pass
            code = await server.stop()
            statuses = {status for status, _, _ in await asyncio.gather(*asking)}
    assert statuses == {200}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    return load, code, server.output


def test_many_clients_and_a_stop_in_the_middle(tmp_path: Path) -> None:
    """A queue that is smaller than the number of clients: some are refused, come again, and nothing is lost."""
    config = vitrail.ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=3)
    vitrail.ViT(config).save_pretrained(tmp_path)
    options = ("--queue", "32", "--batch", "16", "--wait", "5")
    load, code, output = asyncio.run(under_load(f"vitrail:{tmp_path}", "r=2", 2 * CLIENTS, *options))
    assert (load.lost, load.mixed_up, code) == (0, 0, 0)
    assert load.refused > 0
    assert 1 < load.mean_batch <= 16
    assert 0 < load.p50_ms <= load.p99_ms
    assert "Stopped; all requests were answered" in output


@pytest.mark.slow
@pytest.mark.parametrize("merge", [None, "r=8"])
def test_the_embedded_model_under_load(merge: str | None) -> None:
    load, code, _ = asyncio.run(under_load("vitrail:tiny", merge, 4 * CLIENTS))
    assert (load.lost, load.mixed_up, load.refused, code) == (0, 0, 0, 0)
    assert load.mean_batch > 8


def test_errors_before_anything_is_loaded(saved_vit: Path, tmp_path: Path) -> None:
    model = f"hf:{saved_vit}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(model, "--port", port)
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be opened: another program uses it" in one_line(result.stderr)
    for options, says in (
        (["--merge", "r=-1"], "-1"),
        (["--merge", "q=1"], "'q'"),
        (["--merge", tmp_path / "none.json"], "none.json"),
        (["--queue", 2], "queue"),
        (["--max-mb", 0], "--max-mb"),
        (["--host", "no such host.invalid"], "not an address"),
    ):
        result = run(model, "--port", 0, *options)
        assert result.exit_code == 2, options
        assert says in one_line(result.stderr).replace(" ", "") or says in one_line(result.stderr), options
