"""The routes: answers belong to their images, bad input is a clear 4xx, and load above the limits is refused."""

import asyncio
import base64
import json
import re
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="serving needs the extra serve")

from tests.serve.fakes import Client, FakeModel, png, serving, until

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def form(*files: tuple[str, bytes], boundary: str = "xyz") -> tuple[bytes, str]:
    """Return a form with a text field and some files, and its content type."""
    parts = [b'--%s\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n' % boundary.encode()]
    for name, data in files:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        parts.append(head.encode() + b"Content-Type: image/png\r\n\r\n" + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def encoded(data: bytes, url: bool = True) -> str:
    return ("data:image/png;base64," if url else "") + base64.b64encode(data).decode()


def test_image_as_body() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        for kind in (None, "image/png", "application/x-www-form-urlencoded", "text/plain"):
            reply = await client.post("/predict?top=2", png(GREEN), kind)
            assert reply.status == 200
            assert reply.json == {
                "model": "fake",
                "results": [
                    {
                        "name": "image",
                        "predictions": {
                            "label": [
                                {"class": "green", "index": 1, "probability": 1.0},
                                {"class": "red", "index": 0, "probability": 0.0},
                            ]
                        },
                    }
                ],
            }

    serving(check)


def test_files_of_a_form() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        body, kind = form(("a.png", png(BLUE)), ("b.png", png(RED)))
        parts = [body[place : place + 17] for place in range(0, len(body), 17)]
        for sent in (body, parts):
            reply = await client.post("/embed", sent, kind)
            assert reply.json["results"] == [
                {"name": "a.png", "embedding": [0.0, 0.0, 255.0]},
                {"name": "b.png", "embedding": [255.0, 0.0, 0.0]},
            ]
            assert reply.json["dimensions"] == 3

    serving(check)


def test_json_with_base64() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        body = json.dumps({"images": [encoded(png(RED)), encoded(png(GREEN), url=False)]}).encode()
        reply = await client.post("/embed", body, "application/json; charset=utf-8")
        assert [one["embedding"] for one in reply.json["results"]] == [[255.0, 0.0, 0.0], [0.0, 255.0, 0.0]]

    serving(check)


def test_openai_style() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        body = {"model": "any", "input": [encoded(png(RED)), encoded(png(BLUE))]}
        reply = (await client.post("/v1/embeddings", json.dumps(body).encode())).json
        assert reply["object"] == "list"
        assert reply["data"] == [
            {"object": "embedding", "index": 0, "embedding": [255.0, 0.0, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 0.0, 255.0]},
        ]
        assert reply["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
        packed = {"input": encoded(png(BLUE)), "encoding_format": "base64", "dimensions": 3}
        reply = (await client.post("/v1/embeddings", json.dumps(packed).encode())).json
        values = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
        assert values.tolist() == [0.0, 0.0, 255.0]
        for wrong in ({}, {**packed, "dimensions": 2}, {**packed, "encoding_format": "int8"}):
            assert (await client.post("/v1/embeddings", json.dumps(wrong).encode())).error == "bad_request"

    serving(check)


JSON, FORM = "application/json", "multipart/form-data; boundary=xyz"


@pytest.mark.parametrize(
    ("body", "kind", "status", "error", "says"),
    [
        (b"", None, 400, "no_image", "empty"),
        (b"hello", "image/jpeg", 400, "bad_image", "not an image"),
        (png()[:45], "image/png", 400, "bad_image", "damaged"),
        (b"x" * 2_000_001, "image/png", 413, "too_large", "2 MB"),
        (png(size=(1001, 1000)), None, 413, "too_many_pixels", "at most 1 megapixels"),
        (b"{", JSON, 400, "bad_json", "not JSON"),
        (b"[1]", JSON, 400, "bad_json", "list"),
        (b"[" * 100_000, JSON, 400, "bad_json", "not JSON"),
        (b'{"image": "x"}', JSON, 400, "bad_request", "got image"),
        (b'{"images": []}', JSON, 400, "no_image", "one or more"),
        (b'{"images": [1]}', JSON, 400, "bad_image", r"images\[0\] is int"),
        (b'{"images": ["a b!"]}', JSON, 400, "bad_image", "not base64"),
        (b'{"images": ["data:image/png,abc"]}', JSON, 400, "bad_image", "without base64"),
        (b'{"images": ["http://host/cat.png"]}', JSON, 400, "bad_image", "fetches nothing"),
        (b'{"images": "aGVsbG8="}', JSON, 400, "bad_image", "not an image"),
        (json.dumps({"images": [encoded(png())] * 3}).encode(), JSON, 413, "too_many_images", "takes 2"),
        (b"", FORM, 400, "bad_form", "cut off"),
        (png(), FORM, 400, "bad_form", "damaged"),
        (form(("a.png", png()))[0][:-20], FORM, 400, "bad_form", "cut off"),
        (form()[0], FORM, 400, "no_image", "no file"),
        (form(("a.png", b""))[0], FORM, 400, "no_image|bad_image", "a.png.*empty"),
        (form(("a.png", png()))[0], "multipart/form-data", 400, "bad_form", "boundary"),
    ],
)
def test_bad_input(body: bytes, kind: str | None, status: int, error: str, says: str) -> None:
    async def check(client: Client, model: FakeModel) -> None:
        for announce in (True, False):
            reply = await client.post("/embed", body, kind, announce=announce)
            assert reply.status == status
            assert re.fullmatch(error, reply.error)
            assert re.search(says, reply.json["error"]["message"])
        assert model.batches == []
        assert (await client.post("/embed", png())).status == 200

    serving(check, images=2, megabytes=2, megapixels=1)


def test_other_routes_methods_and_options() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        for method, path, status in (("GET", "/nowhere", 404), ("GET", "/predict", 405), ("POST", "/healthz", 405)):
            reply = await client.send(method, path)
            assert (reply.status, reply.error) == (status, "no_route")
            assert "/v1/embeddings" in reply.json["error"]["message"]
        for top in ("0", "-1", "many", "²", ""):
            assert (await client.post(f"/predict?top={top}", png())).error == "bad_request"
        reply = await client.post("/predict?top=99999999999", png())
        assert len(reply.json["results"][0]["predictions"]["label"]) == 3
        paths = (await client.get("/openapi.json")).json["paths"]
        assert set(paths) == {"/predict", "/embed", "/v1/embeddings", "/healthz", "/metrics"}

    serving(check)


def test_model_without_classes_does_not_predict() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        model.classes = {}
        reply = await client.post("/predict", png())
        assert (reply.status, reply.error) == (404, "no_classes")
        assert (await client.post("/embed", png())).status == 200

    serving(check)


def test_many_at_once_share_batches_and_get_their_own_answers() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        colors = [(red, 255 - red, 7) for red in range(200)]
        model.free.clear()
        asking = asyncio.gather(*(client.post("/embed", png(color)) for color in colors))
        await until(lambda: client.app.state.service.admission.requests == 200)
        await until(lambda: len(client.app.state.service.batcher) + 16 >= 200 - 16)
        model.free.set()
        replies = await asking
        found = [tuple(reply.json["results"][0]["embedding"]) for reply in replies]
        assert found == colors
        assert max(model.batches) == 16
        assert sum(model.batches) == 200
        assert len(model.batches) < 30

    serving(check, batch=16, queue=200)


def test_requests_above_the_limit_are_refused_at_once() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        model.free.clear()
        waiting = [asyncio.ensure_future(client.post("/embed", png())) for _ in range(4)]
        await until(lambda: service.admission.requests == 4)
        refused = await client.post("/embed", png())
        assert (refused.status, refused.error) == (503, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await client.get("/healthz")).status == 200
        model.free.set()
        assert [reply.status for reply in await asyncio.gather(*waiting)] == [200] * 4
        assert (await client.post("/embed", png())).status == 200
        assert (service.admission.requests, service.admission.bytes, len(service.batcher)) == (0, 0, 0)

    serving(check, queue=4, images=2, batch=1)


def test_images_inside_are_limited_before_they_are_decoded() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        hold, decoded = threading.Event(), []
        prepare = model.prepare

        def slow(data: bytes, name: str, max_pixels: int) -> torch.Tensor:
            decoded.append(name)
            assert hold.wait(20)
            return prepare(data, name, max_pixels)

        model.prepare = slow
        two, kind = form(("a.png", png()), ("b.png", png(BLUE)))
        waiting = [asyncio.ensure_future(client.post("/embed", two, kind)) for _ in range(3)]
        await until(lambda: service.admission.images == 6)
        refused = await client.post("/embed", png())
        assert (refused.status, refused.error) == (503, "overloaded")
        assert len(decoded) <= 4
        hold.set()
        for reply in await asyncio.gather(*waiting):
            assert [one["embedding"][2] for one in reply.json["results"]] == [0.0, 255.0]
        assert (service.admission.images, service.admission.bytes) == (0, 0)

    serving(check, queue=6, images=2, decoders=4)


def test_stopping_while_images_are_decoded() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        hold, prepare, started = threading.Event(), model.prepare, []
        model.prepare = lambda *args: started.append(1) or (hold.wait(20) and prepare(*args))
        inside = [asyncio.ensure_future(client.post("/embed", png())) for _ in range(5)]
        await until(lambda: len(started) == 2)
        await service.stop()
        hold.set()
        replies = await asyncio.gather(*inside)
        assert {(reply.status, reply.error) for reply in replies} == {(503, "stopping")}
        assert service.lost == 5

    serving(check, grace_seconds=0.05, decoders=2)


def test_images_above_the_limit_are_refused_together() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        model.free.clear()
        two, kind = form(("a.png", png()), ("b.png", png()))
        first = asyncio.ensure_future(client.post("/embed", png()))
        await until(lambda: model.entered.acquire(blocking=False))
        second = asyncio.ensure_future(client.post("/embed", two, kind))
        await until(lambda: len(service.batcher) == 2)
        reply = await client.post("/embed", two, kind)
        assert (reply.status, reply.error) == (503, "overloaded")
        assert len(service.batcher) == 2
        model.free.set()
        assert [(await one).status for one in (first, second)] == [200, 200]

    serving(check, queue=3, images=2, batch=1)


def test_bytes_of_all_uploads_are_limited() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        other = Client(client.app)
        slow = asyncio.ensure_future(other.post("/embed", b"x" * 900_000, announce=False, finish=False))
        await until(lambda: service.admission.bytes == 900_000)
        reply = await client.post("/embed", b"x" * 200_000)
        assert (reply.status, reply.error) == (503, "overloaded")
        assert (await client.post("/embed", png())).status == 200
        other.hang_up.set()
        assert (await slow).status == 499
        assert service.admission.bytes == 0

    serving(check, megabytes=1, upload_megabytes=1)


def test_bodies_that_do_not_arrive_time_out() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        reply = await client.post("/embed", png()[:50], finish=False)
        assert (reply.status, reply.error) == (408, "timeout")
        assert client.app.state.service.admission.requests == 0

    serving(check, read_seconds=0.05)


def test_answers_that_take_too_long_time_out_and_do_not_run_later() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        model.free.clear()
        running = asyncio.ensure_future(client.post("/embed", png()))
        await until(lambda: model.entered.acquire(blocking=False))
        late = await client.post("/embed", png())
        assert (late.status, late.error) == (504, "timeout")
        assert (await running).status == 504
        model.free.set()
        assert (await client.post("/embed", png(BLUE))).json["results"][0]["embedding"] == [0.0, 0.0, 255.0]
        assert sum(model.batches) == 2

    serving(check, seconds=1.5, batch=1)


def test_work_for_clients_that_went_away_is_dropped() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        model.free.clear()
        running = asyncio.ensure_future(client.post("/embed", png()))
        await until(lambda: model.entered.acquire(blocking=False))
        other = Client(client.app)
        leaving = asyncio.ensure_future(other.post("/embed", png()))
        await until(lambda: len(service.batcher) == 1)
        other.hang_up.set()
        assert (await leaving).status == 499
        assert service.admission.requests == 1
        model.free.set()
        assert (await running).status == 200
        await until(lambda: len(service.batcher) == 0)
        assert (await client.post("/embed", png())).status == 200
        assert sum(model.batches) == 2

    serving(check, batch=1)


def test_model_that_fails_answers_500_and_goes_on() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        model.error = RuntimeError("secret detail")
        reply = await client.post("/embed", png())
        assert (reply.status, reply.error) == (500, "internal")
        assert "secret" not in reply.body.decode()
        model.error = None
        assert (await client.post("/embed", png())).status == 200

    serving(check)


def test_stopping_finishes_what_is_inside_and_refuses_the_rest() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        model.free.clear()
        inside = [asyncio.ensure_future(client.post("/embed", png((red, 0, 0)))) for red in range(8)]
        await until(lambda: service.admission.requests == 8)
        stopping = asyncio.ensure_future(service.stop())
        await until(lambda: service.is_stopping)
        health, refused = await client.get("/healthz"), await client.post("/embed", png())
        assert (health.status, health.json["status"]) == (503, "stopping")
        assert (refused.status, refused.error) == (503, "stopping")
        assert int(refused.headers["retry-after"]) >= 1
        model.free.set()
        replies = await asyncio.gather(*inside)
        assert [reply.json["results"][0]["embedding"][0] for reply in replies] == list(range(8))
        await stopping
        assert service.lost == 0

    serving(check, batch=2)


def test_stopping_ends_after_the_grace_period() -> None:
    async def check(client: Client, model: FakeModel) -> None:
        service = client.app.state.service
        model.free.clear()
        inside = [asyncio.ensure_future(client.post("/embed", png())) for _ in range(3)]
        await until(lambda: model.entered.acquire(blocking=False))
        await until(lambda: len(service.batcher) == 2)
        await service.stop()
        assert service.lost == 3
        model.free.set()
        assert sorted(reply.status for reply in await asyncio.gather(*inside)) == [200, 503, 503]

    serving(check, batch=1, grace_seconds=0.05)


def test_metrics_in_the_text_format_of_prometheus() -> None:
    parser = pytest.importorskip("prometheus_client.parser")

    async def check(client: Client, model: FakeModel) -> None:
        for body in (png(), png(), b"no image"):
            await client.post("/embed", body)
        await client.get("/nowhere")
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = list(parser.text_string_to_metric_families(reply.body.decode()))
        values = {
            (one.name, *one.labels.values()): one.value
            for family in families
            for one in family.samples
            if not one.name.endswith(("_bucket", "_created"))
        }
        assert values["vitrail_requests_total", "/embed", "200"] == 2
        assert values["vitrail_requests_total", "/embed", "400"] == 1
        assert values["vitrail_requests_total", "other", "404"] == 1
        assert values["vitrail_images_total",] == values["vitrail_batch_images_sum",] == 2
        assert values["vitrail_request_seconds_count", "/embed"] == 3
        assert values["vitrail_waiting_images",] == values["vitrail_requests_inside",] == 0

    serving(check)
