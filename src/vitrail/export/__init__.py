"""Export models to files that run without Vitrail: ONNX, and ``torch.export`` programs.

A file is kept only after it was loaded, its outputs were compared with the model's, and its number of tokens per block
was found equal.
"""

from vitrail.errors import ExportError
from vitrail.export._export import ExportResult, export
from vitrail.export._verify import Comparison

__all__ = ["Comparison", "ExportError", "ExportResult", "export"]
