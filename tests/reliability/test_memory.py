"""Memory stays flat over many passes, merges and threads; slow, as it takes minutes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vitrail

GROWTH = 8.0
"""Megabytes that the second half of a test may add: the allocator keeps some pages."""

pytestmark = pytest.mark.slow


def resident() -> float:
    """The memory of this process in megabytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def model() -> vitrail.ViT:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "num_classes": 5}
    return vitrail.create_model("vit_tiny_patch16", **sizes).eval()


def growth(work: Callable[[], object], times: int) -> float:
    """Megabytes that the second half of many calls adds."""
    for _ in range(times // 2):
        work()
    before = resident()
    for _ in range(times - times // 2):
        work()
    found = resident() - before
    sys.stdout.write(f"{times} times: {found:+.2f} MB in the second half, {resident():.0f} MB in all\n")
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("tracked", [False, True])
def test_passes(tracked: bool) -> None:
    merged, images = model(), torch.randn(1, 3, 32, 32)
    merging = vitrail.merge(merged, r=3)

    def work() -> None:
        if tracked:
            with merging.track():
                merged(images)
        else:
            merged(images)

    assert growth(work, 10_000) < GROWTH


def test_merging_and_removing() -> None:
    plain, images = model(), torch.randn(1, 3, 32, 32)
    expected = plain(images)

    def work() -> None:
        with vitrail.merge(plain, r=3):
            plain(images)

    assert growth(work, 1000) < GROWTH
    assert torch.equal(plain(images), expected)


def test_eight_threads_on_one_model() -> None:
    merged = model()
    vitrail.merge(merged, r=3)
    inputs = [torch.randn(1 + number % 3, 3, 32, 32) for number in range(8)]
    expected, wrong = [merged(one) for one in inputs], []

    def run(number: int) -> None:
        with torch.inference_mode():
            for _ in range(100):
                if not torch.equal(merged(inputs[number]), expected[number]):
                    wrong.append(number)

    def work() -> None:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    assert growth(work, 10) < GROWTH
    assert wrong == []
