"""Distributed runs: a single process, the choice of the device, and the backend."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from vitrail._distributed import choose_device, distributed
from vitrail.errors import InvalidOption, TrainingError


def test_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with distributed("cpu") as world:
        assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
        assert world.all_gather(3) == [3]
        assert world.broadcast("x") == "x"
        world.barrier()
        with pytest.raises(TrainingError, match="so"):
            world.run(lambda: world.fail(TrainingError("so")))


def test_cuda_must_be_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == torch.device("cpu")
    with pytest.raises(InvalidOption, match="device='cuda'"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("tensors", "backend", "device"), [(True, "cpu:gloo,cuda:nccl", torch.device("cuda", 0)), (False, "gloo", None)]
)
def test_ranks_share_a_device_if_they_exchange_no_tensors(
    tensors: bool, backend: str, device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not support two ranks on one device."""
    made: list[tuple[str, Any]] = []
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **given: made.append((kind, given["device_id"])))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with distributed(None, tensors=tensors) as world:
        assert world.device == torch.device("cuda", 0)
    assert made == [(backend, device)]
