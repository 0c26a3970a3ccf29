"""transformers: the library, and one file per family of its models."""

from vitrail.adapters.transformers.library import LIBRARY

__all__ = ["LIBRARY"]
