"""Errors and warnings of Vitrail.

    VitrailError
    ├── UnsupportedModel     the model, or one of its blocks, has no adapter
    ├── UnsupportedInput     the model is supported, but not with this input
    ├── UntrainedMethod      a learned method, restorer or predictor has no trained weights
    ├── InvalidOption        an argument is out of range or contradicts another one (also a ValueError)
    ├── AlreadyApplied       the model carries this change, or one that excludes it
    ├── NotApplied           the model does not carry this change, or no longer
    ├── BrokenPass           tokens reached a block outside a forward pass of the whole model
    ├── ImageError           a file is missing, broken, or not an image
    │   ├── MediaError       the same for a video clip or a sound
    │   └── ImageTooLarge    an image has more pixels than allowed
    ├── ModelLoadError       a model could not be built, read or written
    ├── TrainingError        training cannot continue, or a run directory cannot be read
    │   └── Diverged         the loss is no longer finite
    ├── EmbeddingError       embeddings or predictions could not be written, read or resumed
    ├── ExportError          a model could not be exported, or the exported file computes something else
    ├── ReportError          a report could not be written or read
    └── ServingError         a server could not start, or does not take a request

    VitrailWarning
    └── SaturatedWarning     fewer tokens merge than requested

Each message names what was given, what is allowed, and what to do. An error raised while a model is being changed
leaves the model unchanged.
"""

from __future__ import annotations

from vitrail._deprecation import renamed_attributes

MAX_MESSAGE = 2000
"""Longest message: values of any size may be given, and a message that repeats one must not fill the screen."""


class VitrailError(Exception):
    """Base class of all errors that Vitrail raises."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 500]} … {text[-450:]}"


class UnsupportedModel(VitrailError):
    """The model, or one of its blocks, has no adapter."""


class UnsupportedInput(VitrailError):
    """The model is supported, but not with this input in its current state."""


class UntrainedMethod(VitrailError):
    """A learned method, a restorer or a network of foresight was used or saved before it was trained."""


class InvalidOption(VitrailError, ValueError):
    """An option is out of range, of the wrong type, or contradicts another one."""


class AlreadyApplied(VitrailError):
    """The model already carries this change, or one that excludes it."""


class NotApplied(VitrailError):
    """The model does not carry this change, or the handle's change was removed."""


class BrokenPass(VitrailError):
    """Tokens reached a changed block outside a forward pass of the whole model."""


class ImageError(VitrailError):
    """A file is missing, broken, or not an image."""


class MediaError(ImageError):
    """A file is missing, broken, or not the video clip or sound that it should be."""


class ImageTooLarge(ImageError):
    """An image has more pixels than allowed."""


class ModelLoadError(VitrailError):
    """A model could not be built, read or written."""


class TrainingError(VitrailError):
    """Training cannot continue, or a run directory cannot be read."""


class Diverged(TrainingError):
    """The loss is no longer finite."""


class EmbeddingError(VitrailError):
    """Embeddings or predictions could not be written, read, resumed or mixed."""


class ExportError(VitrailError):
    """A model could not be exported, or the exported file computes something else."""


class ReportError(VitrailError):
    """A report could not be written or read."""


class ServingError(VitrailError):
    """A server could not start, or does not take a request."""


class VitrailWarning(UserWarning):
    """Base class of all warnings that Vitrail issues."""


class SaturatedWarning(VitrailWarning):
    """Fewer tokens merge than requested, or none."""


__getattr__ = renamed_attributes(
    __name__,
    {
        "AlreadyMerged": "vitrail.errors:AlreadyApplied",
        "NotMerged": "vitrail.errors:NotApplied",
        "PictureError": "vitrail.errors:ImageError",
    },
)
