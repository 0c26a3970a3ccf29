"""One rank of a distributed test; run as a script, with a working directory."""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.leaving import leave
from tests.training.toys import FIELDS
from vitrail.training import Event, train


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    photos = str(folder / "photos")
    output: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == "note":
            output.append(event.text)

    def run(name: str, **fields: Any) -> None:
        train(data=photos, out=str(folder / name), on_event=on_event, **{**FIELDS, **fields})

    run("ddp", mixup=0.2, cutmix=1.0, augment="medium", ema=0.9, validation=0.25, epochs=2)
    run("fsdp", shard="fsdp", ema=0.9, validation=0.25, epochs=2, save_every="2 steps", accumulate=2)
    trained = {
        "model": str(folder / "ddp" / "last"),
        "options": {},
        "tokens": None,
        "image_size": None,
        "patch_size": None,
    }
    run("added", add_tokens="register=2", epochs=1, **trained)
    # Runs of one process go on with two, to the end.
    train(out=str(folder / "alone"), resume=True, on_event=on_event)
    train(out=str(folder / "alone-fsdp"), resume=True, shard="fsdp")
    if dist.get_rank() == 0:
        (folder / "said.txt").write_text("\n".join(output))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
