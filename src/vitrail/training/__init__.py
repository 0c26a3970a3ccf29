"""Training and evaluating: one command or one call, from labelled pictures or arrays to a model folder.

train, Config, PRESETS          a run, what it is asked for, and what one word stands for
Run, load_trained, Labels       a finished run, and a trained model with the names of its classes
evaluate, Evaluation            how good a model is, head by head and fused
open_examples, Examples         labelled pictures, wherever they come from
Arrays                          labelled tensors: sounds, videos, anything
Event, read_log                 what a run says while it goes on, and what it said
"""

from vitrail.data.dataset import Examples, open_examples
from vitrail.data.sources.arrays import Arrays
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
    "Examples",
    "Labels",
    "Run",
    "evaluate",
    "load_trained",
    "open_examples",
    "read_log",
    "train",
]
