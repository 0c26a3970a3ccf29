"""One rank of an inspection; run as a script."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import vitrail
from tests.leaving import leave
from tests.report.models import planted

if __name__ == "__main__":
    rank, world, meeting, *places = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for directory, out in zip(places[::2], places[1::2], strict=True):
        try:
            report = vitrail.inspect(planted(), directory, batch_size=4, name="planted")
        except vitrail.errors.VitrailError as error:
            Path(f"{out}.{rank}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        else:
            assert (report is None) == (rank > 0)
            if report is not None:
                Path(out).write_text(report.to_json(), encoding="utf-8")
    leave(0)
