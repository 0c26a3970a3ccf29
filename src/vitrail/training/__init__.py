"""Training and evaluating: one command or one call, from labelled pictures or arrays to a model folder.

train, Config, PRESETS          a run, what it is asked for, and what one word stands for
Run, load_trained, Labels       a finished run, and a trained model with the names of its classes
evaluate, Evaluation            how good a model is, head by head and fused
Arrays                          labeled tensors as data: spectrograms, videos, anything
Event, read_log                 what a run says while it goes on, and what it said
"""

import warnings
from typing import Any

from vitrail._deprecation import renamed_attributes
from vitrail.data import Arrays, Dataset, open_dataset
from vitrail.training.config.config import Config
from vitrail.training.config.presets import PRESETS
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
    "Labels",
    "Run",
    "evaluate",
    "load_trained",
    "read_log",
    "train",
]

__getattr__ = renamed_attributes(__name__, {"Examples": "vitrail.data:Dataset"})


def open_examples(source: Any, **options: Any) -> Dataset:
    """Deprecated: use ``vitrail.data.open_dataset(source, labeled=True)``."""
    text = "vitrail.training.open_examples is deprecated; use vitrail.data.open_dataset(source, labeled=True)"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return open_dataset(source, labeled=True, **options)
