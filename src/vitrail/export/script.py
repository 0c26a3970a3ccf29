"""A short script beside an ONNX file that shows how to use it without Vitrail."""

from __future__ import annotations

from pathlib import Path

from vitrail._atomic_files import write_bytes
from vitrail.export._export import ExportResult

FIRST = "# Written by vitrail export, "
"""How such scripts begin; no other file is overwritten."""

SCRIPT = (
    FIRST
    + """for NAME: python NAME.py cat.jpg ... (needs onnxruntime, numpy, pillow)
import json, sys
import numpy as np, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(__file__.removesuffix(".py"), providers=["CPUExecutionProvider"])
model = json.loads(session.get_modelmeta().custom_metadata_map["vitrail"])
batch, _, height, width = model["shape"]
for path in sys.argv[1:]:
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    pixels = (np.asarray(image, np.float32) / 255 - np.float32(model["mean"])) / np.float32(model["std"])
    images = np.stack([pixels.transpose(2, 0, 1)] * (batch if isinstance(batch, int) else 1)).astype(model["dtype"])
    for output, values in zip(session.get_outputs(), session.run(None, {model["input"]: images})):
        names, scores = model["classes"].get(output.name), values[0].ravel().astype(np.float64)
        scores = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() if names else scores
        best = [f"{names[i] if names else i}: {scores[i]:.6g}" for i in scores.argsort()[::-1][:5]]
        print(path, output.name, values.shape[1:], *best, sep="\\t")  # class names or numbers, the largest first
"""
)


def write_script(result: ExportResult) -> Path | None:
    """Write a script beside an ONNX file for images; return its path, or None where there is none.

    There is none for other formats and inputs, and where a file of that name (``vit.onnx.py``) is someone else's.
    """
    if result.format != "onnx" or len(result.input) != 4 or result.input[1] != 3:
        return None
    path = result.path.with_name(f"{result.path.name}.py")
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(FIRST.encode())):
        return None
    write_bytes(path, SCRIPT.replace("NAME", result.path.name).encode())
    return path
