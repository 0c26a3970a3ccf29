"""Merged models as files that run without Vitrail: ONNX, and programs of ``torch.export``.

Nothing is left behind that was not read back, compared with the model it came from, and seen to have as many tokens in
each block as that model.
"""

from vitrail.errors import ExportError
from vitrail.export.api import export
from vitrail.export.base import Comparison, ExportResult

__all__ = ["Comparison", "ExportError", "ExportResult", "export"]
