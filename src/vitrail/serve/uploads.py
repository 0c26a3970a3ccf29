"""Images in the body of a request: raw bytes, a form with files, or JSON with base64. Nothing is fetched from URLs."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from vitrail.serve.limits import MEGA, Limits, Ticket

DRAIN_BYTES, DRAIN_SECONDS = 100 * MEGA, 5.0
"""How much of a refused body is read and thrown away: clients read the answer only once they have sent everything."""

NAME = 200
"""Characters of a file name that answers repeat."""


class BadRequest(Exception):
    """A request that cannot be answered: a status, a short name of the problem, and what to do."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Upload(NamedTuple):
    """An encoded image and what to call it in answers and errors."""

    name: str
    data: bytes


async def read_body(stream: AsyncIterator[bytes], announced: str | None, limits: Limits, ticket: Ticket) -> bytes:
    """Return the body of a request; raise as soon as it is known to be too large, or takes too long."""
    too_large = BadRequest(
        413,
        "too_large",
        f"the body has more than {limits.megabytes:g} MB, the most that this server takes. Send fewer images, or "
        "smaller ones",
    )
    if announced is not None and announced.isdigit() and int(announced) > limits.body_bytes:
        raise too_large
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for part in stream:
                if ticket.bytes + len(part) > limits.body_bytes:
                    raise too_large
                ticket.hold(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise BadRequest(
            408, "timeout", f"the body did not arrive within {limits.read_seconds:g} s. Send it again"
        ) from error
    return b"".join(parts)


async def drain(stream: AsyncIterator[bytes]) -> None:
    """Read the rest of a body and throw it away, up to a limit."""
    seen = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for part in stream:
                seen += len(part)
                if seen > DRAIN_BYTES:
                    return
    except TimeoutError:
        return


def read_uploads(content_type: str, body: bytes, limits: Limits) -> list[Upload]:
    """Return the images of a body, one or more.

    A form (``multipart/form-data``) has a file for each image, JSON ``{"images": ["BASE64", ...]}``. Any other body is
    the image itself, whatever its content type says.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads = _read_form(content_type, body)
    elif kind == "application/json":
        values = read_json(body)
        if "images" not in values:
            raise BadRequest(400, "bad_request", f"JSON needs the key images, a list of base64; got {_keys(values)}")
        uploads = read_encoded(values["images"], "images")
    else:
        uploads = [Upload("image", body)]
        if not body:
            raise BadRequest(
                400,
                "no_image",
                "the body is empty; send an image as the body (curl --data-binary @cat.jpg), files of a form "
                "(curl -F file=@cat.jpg), or JSON with base64",
            )
    return check_count(uploads, limits)


def check_count(uploads: list[Upload], limits: Limits) -> list[Upload]:
    """Raise if there are no images, or more than a request may have."""
    if not uploads:
        raise BadRequest(400, "no_image", "there is no image in the request; send one or more")
    if len(uploads) > limits.images:
        raise BadRequest(
            413,
            "too_many_images",
            f"{len(uploads)} images are in the request; this server takes {limits.images} at most. Send several "
            "requests",
        )
    return uploads


def read_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, "bad_json", f"the body is not JSON ({error}); check its quotes and commas") from error
    if not isinstance(values, dict):
        raise BadRequest(400, "bad_json", f"the body is a JSON {type(values).__name__}; expected an object")
    return values


def read_encoded(values: Any, where: str) -> list[Upload]:
    """Return images from base64 strings or ``data:`` URLs, one or a list."""
    several = values if isinstance(values, list) else [values]
    return [_decode(value, f"{where}[{index}]") for index, value in enumerate(several)]


def _decode(value: Any, name: str) -> Upload:
    expected = "expected an image as base64, or as data:image/jpeg;base64,..."
    if not isinstance(value, str):
        raise BadRequest(400, "bad_image", f"{name} is {type(value).__name__}; {expected}")
    if value.startswith(("http://", "https://", "file:")):
        raise BadRequest(400, "bad_image", f"{name} is an address, and this server fetches nothing; {expected}")
    header, comma, text = value.partition(",") if value.startswith("data:") else ("", "", value)
    if header and not (comma and header.endswith(";base64")):
        raise BadRequest(400, "bad_image", f"{name} is a data URL without base64; {expected}")
    try:
        return Upload(name, base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadRequest(400, "bad_image", f"{name} is not base64 ({error}); {expected}") from error


def _read_form(content_type: str, body: bytes) -> list[Upload]:
    """Return the files of a form; other fields are ignored."""
    from python_multipart import MultipartParser
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import parse_options_header

    _, options = parse_options_header(content_type.encode("latin-1"))
    if not options.get(b"boundary"):
        raise BadRequest(400, "bad_form", "the form's content type has no boundary; let your client set this header")
    parts: list[tuple[dict[bytes, bytes], bytearray]] = []
    header = [bytearray(), bytearray()]

    def end_header() -> None:
        parts[-1][0][bytes(header[0]).lower()] = bytes(header[1])
        header[:] = [bytearray(), bytearray()]

    callbacks: Mapping[str, Any] = {
        "on_part_begin": lambda: parts.append(({}, bytearray())),
        "on_header_field": lambda data, start, end: header[0].extend(data[start:end]),
        "on_header_value": lambda data, start, end: header[1].extend(data[start:end]),
        "on_header_end": end_header,
        "on_part_data": lambda data, start, end: parts[-1][1].extend(data[start:end]),
        "on_end": lambda: ended.append(True),
    }
    ended: list[bool] = []
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise BadRequest(400, "bad_form", f"the form is damaged ({error}); send it again") from error
    if not ended:
        raise BadRequest(400, "bad_form", "the form is cut off: its end is missing; send it again")
    uploads: list[Upload] = []
    for headers, data in parts:
        _, fields = parse_options_header(headers.get(b"content-disposition", b""))
        if b"filename" in fields:
            name = fields[b"filename"].decode("utf-8", "replace")[:NAME]
            uploads.append(Upload(name or f"file {len(uploads)}", bytes(data)))
    if not uploads:
        raise BadRequest(400, "no_image", "the form has no file; send one, as curl -F file=@cat.jpg does")
    return uploads


def _keys(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(values)[:10])[:NAME] or "no key"
