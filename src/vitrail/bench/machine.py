"""The machine a result comes from: device, versions, date."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton", "timm", "transformers")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device, the processor, the versions and the date."""
    from vitrail import __version__

    versions = {"vitrail": __version__, "torch": torch.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "processor": _processor(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def machine_line(machine: dict[str, Any]) -> str:
    """Return a description of a machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cuda = f", CUDA {machine['cuda']}" if machine.get("cuda") else f", {machine['threads']} of {machine['cores']} cores"
    return f"{machine['device']}{cuda}; Python {machine['python']}, {versions}; {machine['date']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
