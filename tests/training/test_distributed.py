"""Distributed training: equal weights, checkpoints for any world size, and exit when a rank is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.toys import FIELDS, ROOT, difference, finish, make_photos, start, weights
from vitrail._distributed import World
from vitrail.errors import TrainingError
from vitrail.models import create_model
from vitrail.surgery.saving import Settings
from vitrail.training import Event, train
from vitrail.training.distributed import explain_failures, find_blocks

ALONE = World(0, 1, torch.device("cpu"))
MIXED = {"mixup": 0.2, "cutmix": 1.0, "augment": "medium", "ema": 0.9, "validation": 0.25, "epochs": 2}


class Cut(Exception):
    """A run that ends in the middle."""


def cut_at(step: int) -> Any:
    def on_event(event: Event) -> None:
        if event.kind == "train" and event.done == step:
            raise Cut

    return on_event


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return runs with two ranks; see together.py."""
    folder = tmp_path_factory.mktemp("together")
    photos = make_photos(folder / "photos")
    with pytest.raises(Cut):
        train(data=str(photos), out=str(folder / "alone"), save_every="2 steps", on_event=cut_at(5), **FIELDS)
    shutil.copytree(folder / "alone", folder / "alone-fsdp")
    for code, _, errors in finish(start(2, "-m", "tests.training.together", str(folder))):
        assert code == 0, errors
    return folder


def trained(folder: Path, name: str, **fields: Any) -> dict[str, torch.Tensor]:
    """The weights of a single rank."""
    run = train(data=str(folder / "photos"), out=str(folder / name), **{**FIELDS, **fields})
    return weights(run.last)


def test_ddp_gives_the_weights_of_one_rank(together: Path) -> None:
    assert difference(weights(together / "ddp" / "last"), trained(together, "one", **MIXED)) < 1e-5


def test_added_tokens_learn_the_same_with_two_ranks(together: Path) -> None:
    trained_fields = {"model": str(together / "ddp" / "last"), "options": {}, "image_size": None, "patch_size": None}
    fields = {**FIELDS, **trained_fields, "tokens": None, "add_tokens": "register=2", "epochs": 1}
    train(data=str(together / "photos"), out=str(together / "added-alone"), **fields)
    ranks, alone = (Settings.read(together / name / "last").tensors for name in ("added", "added-alone"))
    assert difference(dict(ranks), dict(alone)) < 1e-5
    assert float(ranks["tokens.gates"].abs().max()) > 0.05


def test_fsdp_gives_the_weights_of_one_rank(together: Path) -> None:
    alone = trained(together, "one-plain", ema=0.9, validation=0.25, epochs=2)
    assert difference(weights(together / "fsdp" / "last"), alone) < 1e-5


def test_fsdp_checkpoint_resumes_with_one_rank(together: Path) -> None:
    folder = together / "fsdp"
    expected = weights(folder / "last")
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "step-00000002" / "shards" / ".metadata").is_file()
    shutil.rmtree(checkpoints / "step-00000004")
    output: list[str] = []
    run = train(out=str(folder), resume=True, on_event=lambda event: output.append(event.text))
    assert difference(weights(run.last), expected) < 1e-5
    assert any("world size changed from 2 (4 images per rank) to 1 (8)" in text for text in output)


@pytest.mark.parametrize("name", ["alone", "alone-fsdp"])
def test_run_of_one_rank_resumes_with_two_and_reports_it(together: Path, name: str) -> None:
    assert difference(weights(together / name / "last"), trained(together, f"whole-{name}")) < 1e-5
    output = (together / "said.txt").read_text()
    assert "world size changed from 1 (8 images per rank) to 2 (4)" in output


def test_killed_process_ends_the_others_with_a_message(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    out = tmp_path / "run"
    options = ("--preset", "tiny", "--image-size", "32", "--batch-size", "8", "--epochs", "2000", "--device", "cpu")
    options += (
        "--set",
        "options={width: 32, depth: 2, heads: 2}",
        "--validation",
        "none",
        "--set",
        "save_every=1 epoch",
    )
    processes = start(2, "-m", "vitrail", "train", "--data", str(photos), "-o", str(out), *options)
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
        assert processes[0].poll() is None, processes[0].communicate()
    processes[1].send_signal(signal.SIGKILL)
    (code, _, errors), (killed, _, _) = finish(processes)
    assert killed == -signal.SIGKILL
    assert code == 2, errors
    text = " ".join(errors.split())
    assert "rank 0 of 2 lost the connection" in text
    assert "Resume with resume=True (--resume) from" in text


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_a_job_of_torchrun_with_one_message(killed: int, tmp_path: Path) -> None:
    photos, out = make_photos(tmp_path / "photos"), tmp_path / "run"
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in FIELDS.items() if name not in ("options", "validation")
    ]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("-m", "vitrail", "train", "--data", str(photos), "-o", str(out), *options, "--epochs", "5000"),
        *("--options", str(FIELDS["options"]), "--validation", "none", "--save-every", "1"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
            assert job.poll() is None, job.communicate()
        os.kill(ranks_of(job.pid)[killed], signal.SIGKILL)
        killed_at = time.monotonic()
        output, _ = job.communicate(timeout=60)
        assert time.monotonic() - killed_at < 30
    finally:
        for process in (*ranks_of(job.pid).values(), job.pid) if job.poll() is None else ():
            os.kill(process, signal.SIGKILL)
    assert job.returncode
    assert len(re.findall("^Error: ", output, re.MULTILINE)) == 1, output
    assert "torchrun ends every rank" in output or "lost the connection" in output


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of the ranks that torchrun started, by rank (Linux)."""
    threads = Path(f"/proc/{launcher}/task").iterdir()
    found = {}
    for process in " ".join((each / "children").read_text() for each in threads).split():
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        found.update({int(one[5:]): int(process) for one in variables if one.startswith(b"RANK=")})
    return found


def test_lost_link_and_full_device_are_explained() -> None:
    pair = World(1, 2, torch.device("cpu"))
    lost = pytest.raises(TrainingError, match=r"lost the connection.*Connection closed by peer.*Go on")
    with lost, explain_failures(pair, lambda: "Go on."):
        raise RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(RuntimeError, match="a bug"), explain_failures(pair, str):
        raise RuntimeError("a bug")
    with pytest.raises(TrainingError, match="Increase accumulate"), explain_failures(ALONE, str):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_blocks_are_found() -> None:
    model = create_model("vit_tiny_patch16", width=32, heads=2, depth=3)
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
