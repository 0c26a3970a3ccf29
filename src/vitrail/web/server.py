"""The page of `vitrail web` as a FastAPI application: it serves its own files, and what views show of uploads.

Only this file imports FastAPI, which must find the types of its handlers at the top of a module.

Nothing is written. An upload is known by the hash of its bytes and kept only while the cache has room; the page uploads
it again when it is gone. Requests of other sites are refused: a page open in the same browser can reach localhost, too.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from torch import Tensor

from vitrail._checks import is_int
from vitrail.errors import ImageError, InvalidOption, VitrailError
from vitrail.web.cache import Cache
from vitrail.web.files import TYPES, page_files, sample_list
from vitrail.web.media import preview
from vitrail.web.model_views import ModelViews, Setting

MAX_UPLOAD = 20 * 2**20
"""Bytes of an upload; more are refused before they are read."""

MAX_REQUEST = 10_000
"""Bytes of any other request."""

LOCAL = ("localhost", "127.0.0.1", "[::1]")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "media-src 'self' blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(models: Sequence[ModelViews], cache: Cache, hosts: Sequence[str] = LOCAL) -> FastAPI:
    """Return the application for some models, the first of which the page starts with.

    Args:
        models: the models; all keep their tensors in ``cache``.
        cache: holds what is kept of uploads as well.
        hosts: names by which this server may be called; requests to others are refused, since a foreign name that
            resolves to this machine would pass for the same site.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    by_name = {one.name: one for one in models}
    modalities = list(dict.fromkeys(one.spec.modality for one in models))
    files = page_files(modalities)
    decoding = threading.Lock()  # one upload at a time: a large image takes hundreds of megabytes while it is decoded
    about: dict[str, Any] = {}

    @app.middleware("http")
    async def guard(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        if host not in hosts and host.rsplit(":", 1)[0] not in hosts:
            response: Response = JSONResponse({"error": "this server answers only under its own name"}, 403)
        elif origin is not None and origin.partition("://")[2] != host:
            response = JSONResponse({"error": "requests of other sites are refused"}, 403)
        else:
            response = await follow(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(VitrailError)
    def explain(_: Request, error: VitrailError) -> Response:
        return JSONResponse({"error": str(error), "kind": type(error).__name__}, 400)

    async def body(request: Request, limit: int) -> bytes:
        read = bytearray()
        async for part in request.stream():
            read += part
            if len(read) > limit:
                raise ImageError(f"the upload has more than {limit // 2**20} MiB; scale it down")
        return bytes(read)

    def model_of(name: Any) -> ModelViews:
        if name not in by_name:
            raise InvalidOption(f"this server has {', '.join(by_name)}; got {str(name)[:100]!r}")
        return by_name[name]

    @app.get("/api/models", response_model=None)
    def list_models() -> dict[str, Any]:
        named = [{"name": one.name, "modality": one.spec.modality} for one in models]
        return {"models": named, "samples": sample_list(modalities), "upload_bytes": MAX_UPLOAD}

    @app.post("/api/model")
    async def describe(request: Request) -> dict[str, Any]:
        views = model_of((await _json(request))["model"])

        def compute() -> dict[str, Any]:
            if views.name not in about:
                about[views.name] = views.info()
            return about[views.name]

        found: dict[str, Any] = await run_in_threadpool(compute)
        return found

    @app.post("/api/image")
    async def upload(request: Request, model: str = "") -> dict[str, Any]:
        modality = model_of(model).spec.modality
        data = await body(request, MAX_UPLOAD)

        def decode() -> dict[str, Any]:
            digest = hashlib.sha256(data).hexdigest()
            if cache.find(("image", modality, digest)) is None:
                with decoding:
                    kept = _keep(data, [one for one in models if one.spec.modality == modality])
                cache.put(("image", modality, digest), kept)
            return {"image": digest}

        return await run_in_threadpool(decode)

    @app.post("/api/preview")
    async def show_preview(request: Request) -> dict[str, Any]:
        given = await _json(request)
        found: dict[str, Any] = _find(cache, given, model_of(given["model"])).preview
        return found

    @app.post("/api/view/{view}")
    async def show(view: str, request: Request) -> Response:
        given = await _json(request)
        views = model_of(given["model"])
        batch = _find(cache, given, views).batch
        arguments = _arguments(view, given, views)
        compute = getattr(views, view)
        return JSONResponse(await run_in_threadpool(lambda: compute(str(given["image"]), batch, **arguments)))

    @app.get("/")
    def start() -> Response:
        return Response(files["index.html"], media_type=TYPES[".html"])

    @app.get("/{name:path}")
    def file(name: str) -> Response:
        if name not in files:  # names are compared, never opened
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response(files[name], media_type=TYPES[name[name.rfind(".") :]])

    async def _json(request: Request) -> dict[str, Any]:
        try:
            given = json.loads(await body(request, MAX_REQUEST))
        except (ValueError, ImageError, RecursionError):
            given = None
        if not isinstance(given, dict) or not isinstance(given.get("model"), str):
            raise InvalidOption("expected a JSON object with the name of a model")
        return given

    return app


class _Kept(NamedTuple):
    """What is kept of an upload for one model: its input, and what the page paints on."""

    batch: Tensor
    preview: dict[str, Any]


def _keep(data: bytes, models: Sequence[ModelViews]) -> dict[str, _Kept]:
    """Return what is kept of an upload for each model of its modality."""
    sample = models[0].medium.read(data)
    return {one.name: _Kept(one.batch(sample), preview(sample, one.spec, one.layout)) for one in models}


def _find(cache: Cache, given: Mapping[str, Any], views: ModelViews) -> _Kept:
    image = given.get("image")
    kept = cache.find(("image", views.spec.modality, image)) if isinstance(image, str) else None
    if kept is None:
        raise ImageError("gone: this image is no longer kept; upload it again")
    found: _Kept = kept[views.name]
    return found


VIEWS: dict[str, Sequence[str]] = {
    "result": ("setting",),
    "attention": ("setting", "layer", "query"),
    "tokens": ("setting", "layer"),
    "similar": ("setting", "layer", "query"),
    "step": ("setting", "layer"),
    "registers": ("layer",),
}
"""What each view needs besides the model and the image."""


def _arguments(view: str, given: Mapping[str, Any], views: ModelViews) -> dict[str, Any]:
    """Return the checked arguments of a view."""
    if view not in VIEWS:
        raise InvalidOption(f"views are {', '.join(VIEWS)}; got {view[:100]!r}")
    limits = {"layer": len(views.found.blocks), "query": views.layout.num_tokens}
    arguments: dict[str, Any] = {}
    for name in VIEWS[view]:
        value = given.get(name)
        if name == "setting":
            arguments[name] = Setting.parse(value)
        elif is_int(value, 0) and value < limits[name]:
            arguments[name] = value
        else:
            raise InvalidOption(f"{name} is a whole number from 0 to {limits[name] - 1}; got {str(value)[:100]!r}")
    return arguments
