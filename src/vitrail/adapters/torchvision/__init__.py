"""torchvision: the library, and one file per family of its models."""

from vitrail.adapters.torchvision.library import LIBRARY

__all__ = ["LIBRARY"]
