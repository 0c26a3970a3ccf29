"""What a measurement ran on: device, versions, date."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "timm", "transformers")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Name the device, the processor, the versions and the date."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"vitrail": _own_version(), **_versions()},
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


def in_words(machine: dict[str, Any]) -> str:
    """Say it in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cuda = f", CUDA {machine['cuda']}" if machine.get("cuda") else f", {machine['threads']} of {machine['cores']} cores"
    return f"{machine['device']}{cuda}; Python {machine['python']}, {versions}; {machine['date']}"


def _own_version() -> str:
    from vitrail import __version__

    return __version__


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
