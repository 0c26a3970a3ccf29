"""Processes that work together: alone, on which device, and by which link."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from vitrail._distributed import joined, place
from vitrail.errors import InvalidOption, TrainingError


def test_one_process_is_a_crew_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with joined("cpu") as crew:
        assert (crew.rank, crew.world, crew.first) == (0, 1, True)
        assert crew.gather(3) == [3]
        assert crew.share("x") == "x"
        crew.barrier()
        with pytest.raises(TrainingError, match="so"):
            crew.together(lambda: crew.fail(TrainingError("so")))


def test_cuda_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place(None) == torch.device("cpu")
    with pytest.raises(InvalidOption, match="device='cuda'"):
        place("cuda")


@pytest.mark.parametrize(
    ("tensors", "link", "device"), [(True, "cpu:gloo,cuda:nccl", torch.device("cuda", 0)), (False, "gloo", None)]
)
def test_processes_share_a_device_where_they_exchange_no_tensors(
    tensors: bool, link: str, device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two processes on one device."""
    made: list[tuple[str, Any]] = []
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, said in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=said: said)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **given: made.append((kind, given["device_id"])))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined(None, tensors=tensors) as crew:
        assert crew.device == torch.device("cuda", 0)
    assert made == [(link, device)]
