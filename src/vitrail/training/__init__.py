"""Training and evaluation: from labeled images or arrays to a model directory.

train, Config, PRESETS          train a model; its options; default values by name
Run, load_trained, Labels       a finished run; a trained model with its class names
evaluate, Evaluation            accuracy of a model, head by head and fused
open_examples, Examples         labeled images from any source
Arrays                          labeled tensors: spectrograms, videos, anything
Event, read_log                 progress of a run, and its log

Modules, in the order of a run:

config/                         options, declared once; presets; checks
trainer                         `train`: checks everything before it writes anything
setup                           data, model, teacher, objective and optimizer of a run
loop, step                      the training loop; one step, captured as a CUDA graph where possible
objective/                      targets, losses, teachers, self-distillation
optim/                          optimizers, learning rate schedule, EMA
evaluation/                     outputs, metrics, token diagnostics, `evaluate`
run_directory, log              files of a run
checkpoint, resume, interrupt   how a run stops and continues
distributed                     DDP and FSDP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.data.dataset import Examples, open_examples
    from vitrail.data.sources.arrays import Arrays
    from vitrail.training.config import PRESETS, Config
    from vitrail.training.evaluation.evaluator import evaluate
    from vitrail.training.evaluation.result import Evaluation
    from vitrail.training.log import Event, read_log
    from vitrail.training.run_directory import Labels, Run, load_trained
    from vitrail.training.trainer import train

__all__ = [
    "PRESETS",
    "Arrays",
    "Config",
    "Evaluation",
    "Event",
    "Examples",
    "Labels",
    "Run",
    "evaluate",
    "load_trained",
    "open_examples",
    "read_log",
    "train",
]

_HOMES = {
    "Arrays": "vitrail.data.sources.arrays",
    **dict.fromkeys(("Examples", "open_examples"), "vitrail.data.dataset"),
    **dict.fromkeys(("PRESETS", "Config"), "vitrail.training.config"),
    "evaluate": "vitrail.training.evaluation.evaluator",
    "Evaluation": "vitrail.training.evaluation.result",
    **dict.fromkeys(("Event", "read_log"), "vitrail.training.log"),
    **dict.fromkeys(("Labels", "Run", "load_trained"), "vitrail.training.run_directory"),
    "train": "vitrail.training.trainer",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
