"""The routes of a server. Every error is JSON that says what was given and what to do."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import vitrail
from vitrail.serve.batcher import Overloaded, Stopped
from vitrail.serve.limits import Limits
from vitrail.serve.model import Answer, ServedModel
from vitrail.serve.service import STATUS_OF_GONE, Gone, Service
from vitrail.serve.uploads import BadRequest, Upload, check_count, read_encoded, read_json, read_uploads

TOP = 5
"""Classes in an answer, unless ``?top=`` says otherwise."""

RETRY_STOPPED = 5
"""Seconds after which to try again while a server stops: another one takes its place."""

log = logging.getLogger("vitrail.serve")

_BINARY = {"type": "string", "format": "binary"}
_ENCODED = {"type": "array", "items": {"type": "string", "description": "base64, or a data: URL"}}
IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": _BINARY},
            "multipart/form-data": {"schema": {"type": "object", "properties": {"file": _BINARY}}},
            "application/json": {"schema": {"type": "object", "properties": {"images": _ENCODED}}},
        },
    }
}
OPENAI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["input"],
                    "properties": {
                        "input": _ENCODED,
                        "model": {"type": "string"},
                        "encoding_format": {"enum": ["float", "base64"]},
                        "dimensions": {"type": "integer"},
                    },
                }
            }
        },
    }
}

Handler = Callable[[Request], Awaitable[Response]]


def create_app(model: ServedModel, limits: Limits | None = None) -> FastAPI:
    """Return the application for a model; its `Service` is ``app.state.service``.

    Whoever runs it awaits ``app.state.service.stop()`` at the end: `vitrail.serve.server` does so on a signal.
    """
    service = Service(model, limits or Limits())
    app = FastAPI(title=f"Vitrail: {model.name}", version=vitrail.__version__, redoc_url=None)
    app.state.service = service

    def route(path: str, extra: dict[str, Any] | None = None) -> Callable[[Handler], Handler]:
        method = app.get if extra is None else app.post
        return lambda handler: method(path, openapi_extra=extra)(_counted(service, path, handler))

    @route("/predict", IMAGES)
    async def predict(request: Request) -> Response:
        """Return the most likely classes of each image."""
        if not model.classes:
            raise BadRequest(404, "no_classes", f"{model.name} has no classes, so it cannot predict; use /embed")
        top = _whole(request, "top", TOP)
        names, answers = await _answers(service, request, _read(request, service.limits))
        results = [
            {"name": name, "predictions": _classes(model, answer, top)}
            for name, answer in zip(names, answers, strict=True)
        ]
        return _json({"model": model.name, "results": results})

    @route("/embed", IMAGES)
    async def embed(request: Request) -> Response:
        """Return the embedding of each image."""
        names, answers = await _answers(service, request, _read(request, service.limits))
        results = [
            {"name": name, "embedding": answer.embedding.tolist()} for name, answer in zip(names, answers, strict=True)
        ]
        return _json({"model": model.name, "dimensions": model.width, "results": results})

    @route("/v1/embeddings", OPENAI)
    async def embeddings(request: Request) -> Response:
        """Return the embedding of each image, as the OpenAI API does for texts."""
        asked: dict[str, Any] = {}

        def read(body: bytes) -> list[Upload]:
            asked.update(read_json(body))
            _check_asked(asked, model)
            return check_count(read_encoded(asked["input"], "input"), service.limits)

        _, answers = await _answers(service, request, read)
        packed = asked.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _embedding(answer, packed)}
            for index, answer in enumerate(answers)
        ]
        tokens = len(answers) * model.layout.num_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "data": data, "model": model.name, "usage": usage})

    @route("/healthz")
    async def healthz(request: Request) -> Response:
        """Return the model and its settings; status 503 while the server stops."""
        stopping = service.is_stopping
        values = {
            "status": "stopping" if stopping else "ok",
            "model": model.name,
            "merge": model.merging,
            "waiting_images": len(service.batcher),
            "vitrail": vitrail.__version__,
        }
        return _json(values, 503 if stopping else 200)

    @route("/metrics")
    async def metrics(request: Request) -> Response:
        """Return what the server counted, in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        routes = "POST /predict, /embed and /v1/embeddings; GET /healthz, /metrics and /docs"
        message = f"{request.method} {request.url.path}: {error.detail}. This server has {routes}"
        service.metrics.count_request("other", error.status_code, 0.0)
        return _error(error.status_code, "no_route", message, dict(error.headers or {}))

    return app


def _counted(service: Service, path: str, handler: Handler) -> Handler:
    """Return a handler whose errors are JSON, and that counts its requests."""

    async def counted(request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await handler(request)
        except BadRequest as error:
            response = _error(error.status, error.kind, str(error))
        except Overloaded as error:
            response = _error(503, "overloaded", str(error), {"retry-after": str(error.retry_after)})
        except Stopped as error:
            response = _error(503, "stopping", str(error), {"retry-after": str(RETRY_STOPPED)})
        except (Gone, ClientDisconnect):
            response = Response(status_code=STATUS_OF_GONE)
        except Exception:
            log.exception("%s failed", path)
            response = _error(500, "internal", "the model failed on this request; the server's log has the reason")
        service.metrics.count_request(path, response.status_code, time.perf_counter() - start)
        return response

    counted.__name__, counted.__doc__ = handler.__name__, handler.__doc__
    return counted


async def _answers(
    service: Service, request: Request, read: Callable[[bytes], list[Upload]]
) -> tuple[list[str], list[Answer]]:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return await service.answer(request.stream(), request.headers.get("content-length"), read, gone)


def _read(request: Request, limits: Limits) -> Callable[[bytes], list[Upload]]:
    content_type = request.headers.get("content-type", "")
    return lambda body: read_uploads(content_type, body, limits)


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise BadRequest(400, "bad_request", f"{name}={text[:50]!r}: expected a whole number, 1 or more")
    return int(text[:9])


def _check_asked(asked: dict[str, Any], model: ServedModel) -> None:
    """Raise if a request in OpenAI's form asks for what this model does not have."""
    if "input" not in asked:
        raise BadRequest(400, "bad_request", "JSON needs the key input, a list of images as data:image/...;base64,...")
    form, width = asked.get("encoding_format", "float"), asked.get("dimensions")
    if form not in ("float", "base64"):
        raise BadRequest(400, "bad_request", f"encoding_format={form!r}: expected float or base64")
    if width is not None and width != model.width:
        raise BadRequest(400, "bad_request", f"dimensions={width!r}: {model.name} has {model.width}; leave it out")


def _classes(model: ServedModel, answer: Answer, top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the most likely classes by label column."""
    found = {}
    for column, scores in answer.scores.items():
        likely, places = scores.topk(min(top, len(scores)))
        found[column] = [
            {"class": model.classes[column][index], "index": index, "probability": probability}
            for probability, index in zip(likely.tolist(), places.tolist(), strict=True)
        ]
    return found


def _embedding(answer: Answer, packed: bool) -> list[float] | str:
    if packed:
        return base64.b64encode(answer.embedding.numpy().astype("<f4").tobytes()).decode()
    values: list[float] = answer.embedding.tolist()
    return values


def _json(values: Any, status: int = 200) -> Response:
    return Response(json.dumps(values, ensure_ascii=False, allow_nan=False), status, media_type="application/json")


def _error(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)
