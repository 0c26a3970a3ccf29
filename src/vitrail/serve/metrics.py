"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server, in a registry of its own; several servers in one process do not mix.

    Args:
        waiting: returns the number of images that wait for the model.
        inside: returns the number of requests inside the server.
        uploads: returns the bytes that their bodies hold.
    """

    content_type = CONTENT_TYPE

    def __init__(self, waiting: Callable[[], int], inside: Callable[[], int], uploads: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        on = self.registry
        self.requests = Counter("vitrail_requests", "Requests by route and status.", ["route", "status"], registry=on)
        self.seconds = Histogram(
            "vitrail_request_seconds",
            "Seconds from a request's head to its answer.",
            ["route"],
            buckets=SECONDS,
            registry=on,
        )
        self.images = Counter("vitrail_images", "Images that the model saw.", registry=on)
        self.batches = Histogram("vitrail_batch_images", "Images in one batch.", buckets=BATCHES, registry=on)
        self.model_seconds = Histogram("vitrail_model_seconds", "Seconds of one batch.", buckets=SECONDS, registry=on)
        gauges = {
            "vitrail_waiting_images": ("Images that wait for the model.", waiting),
            "vitrail_requests_inside": ("Requests inside the server.", inside),
            "vitrail_upload_bytes": ("Bytes of the bodies of requests inside the server.", uploads),
        }
        for name, (help_, read) in gauges.items():
            Gauge(name, help_, registry=on).set_function(read)
        ProcessCollector(registry=on)

    def count_batch(self, images: int, seconds: float) -> None:
        """Count a batch that ran."""
        self.images.inc(images)
        self.batches.observe(images)
        self.model_seconds.observe(seconds)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        return generate_latest(self.registry)
