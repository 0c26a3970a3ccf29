"""From the body of a request to the answers of the model, within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from vitrail.errors import ImageError, ImageTooLarge
from vitrail.serve.batcher import Batcher, Overloaded, Stopped
from vitrail.serve.limits import Admission, Limits, Ticket
from vitrail.serve.metrics import Metrics
from vitrail.serve.model import Answer, ServedModel
from vitrail.serve.uploads import BadRequest, Upload, drain, read_body

POLL_SECONDS = 0.02
"""How often a stopping server looks whether requests are left."""

STATUS_OF_GONE = 499
"""Status in the metrics for requests whose client went away, as nginx has it; nobody receives it."""


class Gone(Exception):
    """The client closed the connection before its answer was ready."""


class Service:
    """A model with its batcher, decoding threads, limits and metrics: everything of a server but its routes."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.admission = Admission(limits, lambda: self.batcher.retry_after)
        self.metrics = Metrics(lambda: len(self.batcher), lambda: self.admission.requests, lambda: self.admission.bytes)
        self.batcher: Batcher[Tensor, Answer] = Batcher(
            model,
            max_batch=limits.batch,
            max_wait=limits.wait_ms / 1e3,
            limit=limits.queue,
            on_batch=self.metrics.count_batch,
        )
        self.decoders = ThreadPoolExecutor(limits.decoders, "vitrail-decoder")
        self.is_stopping = False
        self.lost = 0
        """Requests that came in before the server stopped, and were not answered within the grace period."""

    async def answer(
        self,
        stream: AsyncIterator[bytes],
        announced: str | None,
        read: Callable[[bytes], list[Upload]],
        gone: Callable[[], Awaitable[Any]],
    ) -> tuple[list[str], list[Answer]]:
        """Return the names of a request's images, and an answer for each, in their order.

        Args:
            stream: the parts of the body.
            announced: its length as the request's head says.
            read: finds the images in it.
            gone: returns once the client has closed the connection; called after the body was read.
        """
        try:
            if self.is_stopping:
                raise Stopped("the server is stopping and takes no more requests; send it to another one")
            with self.admission.enter() as ticket:
                body = await read_body(stream, announced, self.limits, ticket)
                try:
                    async with asyncio.timeout(self.limits.seconds):
                        uploads = await asyncio.to_thread(read, body)  # not behind images that are decoded
                        del body
                        ticket.hold_images(len(uploads))
                        names = [upload.name for upload in uploads]
                        return names, await self._run(uploads, ticket, gone)
                except TimeoutError as error:
                    raise BadRequest(
                        504,
                        "timeout",
                        f"the answer was not ready within {self.limits.seconds:g} s; the server is busy. Try again "
                        "later",
                    ) from error
        except (BadRequest, Overloaded, Stopped):
            await drain(stream)
            raise

    async def _run(self, uploads: list[Upload], ticket: Ticket, gone: Callable[[], Awaitable[Any]]) -> list[Answer]:
        """Decode images, forget their files, and wait for their answers unless the client goes away."""
        watch = asyncio.ensure_future(gone())
        futures: list[Future[Answer]] = []
        try:
            tensors = await _first(asyncio.gather(*(self._in_thread(self._decode, one) for one in uploads)), watch)
            uploads.clear()
            ticket.release_bytes()
            futures = self.batcher.submit(tensors, self.limits.seconds)
            found: list[Answer] = await _first(asyncio.gather(*map(asyncio.wrap_future, futures)), watch)
            return found
        finally:
            watch.cancel()
            for future in futures:
                future.cancel()

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return the result of a function that runs in a decoding thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.decoders, function, argument)
        except (asyncio.CancelledError, RuntimeError) as error:  # the threads have ended, unless we were cancelled
            task = asyncio.current_task()
            if self.is_stopping and task is not None and not task.cancelling():
                raise Stopped("the server stopped before this request ran; send it again") from error
            raise

    def _decode(self, upload: Upload) -> Tensor:
        try:
            return self.model.prepare(upload.data, upload.name, self.limits.max_pixels)
        except ImageTooLarge as error:
            raise BadRequest(413, "too_many_pixels", str(error)) from error
        except ImageError as error:
            raise BadRequest(400, "bad_image", str(error)) from error

    async def stop(self) -> None:
        """Take no more requests, and wait until those inside are answered or the grace period is over."""
        self.is_stopping = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.limits.grace_seconds
        while self.admission.requests and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.lost = self.admission.requests
        await self.close()

    async def close(self) -> None:
        """Fail what waits still, and end the threads; a batch that runs is not waited for."""
        self.is_stopping = True
        self.batcher.close()
        self.decoders.shutdown(wait=False, cancel_futures=True)


async def _first(work: asyncio.Future[Any], watch: asyncio.Future[Any]) -> Any:
    """Return the result of some work; raise ``Gone``, and cancel it, if the client goes away before."""
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Gone
        return work.result()
    finally:
        work.cancel()
