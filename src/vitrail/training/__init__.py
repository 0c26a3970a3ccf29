"""Training and evaluation: from labeled images or arrays to a model directory.

train, Config, PRESETS          train a model; its options; default values by name
Run, load_trained, Labels       a finished run; a trained model with its class names
evaluate, Evaluation            accuracy of a model, head by head and fused
Arrays                          labeled tensors as data: spectrograms, videos, anything
Event, read_log                 progress of a run, and its log
Stability, read_stability       gradients and residual branches by layer, spikes of the loss

Modules, in the order of a run:

config/                         options, declared once; presets; checks
trainer                         `train`: checks everything before it writes anything; resumes a run
data, model                     data of a run; its model, teacher, objective and merging
loop, step                      the training loop; one step, captured as a CUDA graph where possible
objective/                      targets, losses, teachers, self-distillation
optim/                          optimizers, learning rate schedule, EMA
evaluation/                     outputs, metrics, token diagnostics, `evaluate`
stability/                      gradient and residual norms by layer over training
run_directory, log              files of a run
checkpoint, interrupt           how a run stops and continues
distributed                     DDP and FSDP
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from vitrail._deprecation import renamed_attributes

if TYPE_CHECKING:
    from vitrail.data import Arrays, Dataset
    from vitrail.training.config import PRESETS, Config
    from vitrail.training.evaluation.evaluator import evaluate
    from vitrail.training.evaluation.result import Evaluation
    from vitrail.training.log import Event, read_log
    from vitrail.training.run_directory import Labels, Run, load_trained
    from vitrail.training.stability.result import Stability, read_stability
    from vitrail.training.trainer import train

__all__ = [
    "PRESETS",
    "Arrays",
    "Config",
    "Evaluation",
    "Event",
    "Labels",
    "Run",
    "Stability",
    "evaluate",
    "load_trained",
    "read_log",
    "read_stability",
    "train",
]

_HOMES = {
    "Arrays": "vitrail.data",
    **dict.fromkeys(("PRESETS", "Config"), "vitrail.training.config"),
    "evaluate": "vitrail.training.evaluation.evaluator",
    "Evaluation": "vitrail.training.evaluation.result",
    **dict.fromkeys(("Event", "read_log"), "vitrail.training.log"),
    **dict.fromkeys(("Labels", "Run", "load_trained"), "vitrail.training.run_directory"),
    **dict.fromkeys(("Stability", "read_stability"), "vitrail.training.stability.result"),
    "train": "vitrail.training.trainer",
}


_renamed = renamed_attributes(__name__, {"Examples": "vitrail.data:Dataset"})


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that the command line starts fast."""
    return getattr(importlib.import_module(_HOMES[name]), name) if name in _HOMES else _renamed(name)


def open_examples(source: Any, **options: Any) -> Dataset:
    """Deprecated: use ``vitrail.data.open_dataset(source, labeled=True)``."""
    from vitrail.data import open_dataset

    text = "vitrail.training.open_examples is deprecated; use vitrail.data.open_dataset(source, labeled=True)"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return open_dataset(source, labeled=True, **options)
