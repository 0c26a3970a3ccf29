"""Limits of a server, and the admission of requests: memory stays bounded, whatever comes in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitrail._checks import check, check_int, check_positive, is_number
from vitrail.serve.batcher import Overloaded

MEGA = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    The memory for requests is at most ``upload_megabytes`` for bodies, ``decoders`` decoded images of
    ``megapixels``, and ``queue`` model inputs.

    Attributes:
        batch: most images in one batch.
        wait_ms: milliseconds that the first image of a batch waits for others.
        queue: most requests inside the server, and most images inside it.
        images: most images in one request.
        megabytes: most megabytes in the body of one request.
        upload_megabytes: most megabytes in the bodies of all requests together.
        megapixels: most pixels of an image, read from its header before anything is decoded.
        read_seconds: time for a body to arrive.
        seconds: time for a request to be answered, once it has arrived.
        grace_seconds: time for accepted requests to finish when the server stops.
        decoders: threads that decode images.
    """

    batch: int = 32
    wait_ms: float = 2.0
    queue: int = 256
    images: int = 32
    megabytes: float = 20.0
    upload_megabytes: float = 256.0
    megapixels: float = 50.0
    read_seconds: float = 10.0
    seconds: float = 30.0
    grace_seconds: float = 20.0
    decoders: int = min(8, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "images", "decoders"):
            check_int(name, getattr(self, name))
        for name in ("megabytes", "upload_megabytes", "megapixels", "read_seconds", "seconds"):
            check_positive(name, getattr(self, name))
        for name in ("wait_ms", "grace_seconds"):
            value = getattr(self, name)
            check(name, value, is_number(value) and value >= 0, "a number, 0 or more")
        enough = self.upload_megabytes >= self.megabytes
        check("upload_megabytes", self.upload_megabytes, enough, f"at least megabytes={self.megabytes:g}")
        check("queue", self.queue, self.queue >= self.images, f"at least images={self.images}")

    @property
    def body_bytes(self) -> int:
        """Most bytes in the body of one request."""
        return int(self.megabytes * MEGA)

    @property
    def max_pixels(self) -> int:
        """Most pixels of one image."""
        return int(self.megapixels * MEGA)


class Ticket:
    """A request inside the server, and what it holds: bytes of its body, and images."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.bytes, self.images = admission, 0, 0

    def hold(self, count: int) -> None:
        """Count further bytes of the body; raise ``Overloaded`` where all requests together hold too many."""
        self._admission.hold(count)
        self.bytes += count

    def release_bytes(self) -> None:
        """Count the body no longer: its images are decoded."""
        self._admission.bytes -= self.bytes
        self.bytes = 0

    def hold_images(self, count: int) -> None:
        """Count the images; raise ``Overloaded`` where all requests together hold too many."""
        self._admission.hold_images(count)
        self.images += count


class Admission:
    """Counts of the requests inside a server, of the bytes of their bodies, and of their images.

    Used from one event loop. ``retry_after`` returns the seconds after which a refused request should come again.
    """

    def __init__(self, limits: Limits, retry_after: Callable[[], int] = lambda: 1) -> None:
        self.limits, self.requests, self.bytes, self.images = limits, 0, 0, 0
        self._retry_after = retry_after

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Count a request inside a ``with`` block; raise ``Overloaded`` where the server has too many."""
        if self.requests >= self.limits.queue:
            raise self._overloaded(f"{self.requests} requests are inside, the most that it takes")
        self.requests += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            self.requests -= 1
            self.bytes -= ticket.bytes
            self.images -= ticket.images

    def hold(self, count: int) -> None:
        """Count further bytes."""
        if self.bytes + count > self.limits.upload_megabytes * MEGA:
            raise self._overloaded(f"uploads hold {self.bytes / MEGA:.0f} of {self.limits.upload_megabytes:g} MB")
        self.bytes += count

    def hold_images(self, count: int) -> None:
        """Count further images."""
        if self.images + count > self.limits.queue:
            raise self._overloaded(f"{self.images} images are inside, and {self.limits.queue} may be")
        self.images += count

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(f"the server is busy: {why}. Try again later", self._retry_after())
