"""Everything that Vitrail raises or warns about.

    VitrailError
    ├── UnsupportedModel     the model, or one of its blocks, is not one that Vitrail knows
    ├── UnsupportedInput     the model is fine, this call is not (a mask over merged tokens, attention maps, ...)
    ├── InvalidOption        an argument is out of range or contradicts another one
    ├── AlreadyMerged        the model carries a merging already
    ├── NotMerged            the model carries no merging (any more)
    ├── BrokenPass           tokens reached a block without the state of their forward pass
    ├── ImageError         a file is not a picture that can be used
    ├── ModelLoadError       a model name could not be turned into a model
    ├── TrainingError        training cannot go on, or what it wrote cannot be read
    │   └── Diverged         the loss is no longer a finite number
    ├── ExportError          a model could not be exported, or its file does not do what the model does
    └── ReportError          a report could not be written or read

    VitrailWarning
    └── SaturatedWarning     fewer tokens merge than were asked for

Each message says what was given, what is expected, and what to do about it. An error raised while a model is
being changed leaves the model as it was.
"""

from __future__ import annotations


class VitrailError(Exception):
    """Root of all errors raised by Vitrail."""


class UnsupportedModel(VitrailError):
    """The model, or one of its blocks, is not one that Vitrail knows how to reach into."""


class UnsupportedInput(VitrailError):
    """The model is supported, but not called like this while it is merged."""


class InvalidOption(VitrailError, ValueError):
    """An option is out of range, of the wrong type, or contradicts another one."""


class AlreadyMerged(VitrailError):
    """The model carries a merging already."""


class NotMerged(VitrailError):
    """The model carries no merging, or its merging was removed."""


class BrokenPass(VitrailError):
    """Tokens reached a merged block without the state of their forward pass."""


class ImageError(VitrailError):
    """A file is missing, broken, or not a picture."""


class ModelLoadError(VitrailError):
    """A model name could not be turned into a model."""


class TrainingError(VitrailError):
    """Training cannot go on as asked, or what it wrote cannot be read."""


class Diverged(TrainingError):
    """The loss is no longer a finite number."""


class ExportError(VitrailError):
    """A model could not be exported, or its file does not do what the model does."""


class ReportError(VitrailError):
    """A report could not be written or read."""


class VitrailWarning(UserWarning):
    """Root of all warnings of Vitrail."""


class SaturatedWarning(VitrailWarning):
    """Fewer tokens merge than were asked for, or none at all."""
