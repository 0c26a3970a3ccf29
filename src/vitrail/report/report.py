"""The report of an inspection: plain values, a verdict, JSON and an HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail._atomic_files import temporary_files
from vitrail._checks import as_path, shown
from vitrail._deprecation import renamed_property
from vitrail._reading import read_text
from vitrail.analysis.result import Result
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import ReportError
from vitrail.report import verdict

FORMAT = 2
"""Version of the JSON format; increased when a key changes its meaning."""

PAGES = (".html", ".htm")


class Saved(Result):
    """Mixin of results that are saved as an HTML page and as JSON."""

    def to_html(self) -> str:
        """Return one self-contained page: no network access, no scripts."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the values as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write a page with its JSON beside it (``report.html``), or the JSON alone (``report.json``).

        Files are written completely or not at all; existing ones are overwritten. Pages need jinja2.

        Returns:
            The paths of the page and of its JSON, or of the JSON alone.
        """
        file = as_path("path", path)
        if file.suffix.lower() not in (*PAGES, ".json"):
            raise ReportError(f"cannot save a report as {file}; use the name of a page, like report.html, or a .json")
        texts = {file.with_suffix(".json"): self.to_json()}
        if file.suffix.lower() in PAGES:
            texts[file] = self.to_html()
        try:
            with temporary_files(*texts) as hidden:
                for draft, text in zip(hidden, texts.values(), strict=True):
                    draft.write_bytes(text.encode())
        except OSError as error:
            raise ReportError(
                f"{error.filename or file} could not be written ({error.strerror or error}); use an existing, writable "
                "directory with free space. Existing files are unchanged"
            ) from error
        return tuple(reversed(texts))


class ShownImage(Result, frozen=False, eq=False):
    """An image that the report shows. ``pixels`` and ``maps`` are not in the JSON.

    Attributes:
        index, name, label: which image it is; the label is the name or the number of the class.
        boxes: box found by each method of object discovery, in pixels.
        pixels: (C, H, W) from 0 to 255; None in a report loaded from JSON.
        maps: what sections draw beside the image, by name; each section knows its own.
    """

    index: int
    name: str
    label: str | None
    grid: tuple[int, int]  # height and width in patches
    size: tuple[int, int]  # height and width in pixels, as the model sees the image
    norms: list[float]  # norms after the last layer, row by row
    outliers: list[int]  # indices of the norms above the threshold
    boxes: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    truth: list[list[float]] = field(default_factory=list)  # true boxes, in pixels
    cured: list[float] | None = None  # norms with test-time registers, row by row; None if these were not tried
    pixels: Tensor | None = field(default=None, repr=False, metadata={"json": False})
    maps: dict[str, Any] = field(default_factory=dict, repr=False, metadata={"json": False})

    @property
    def title(self) -> str:
        """Name and label."""
        return self.name if self.label is None else f"{self.name} ({self.label})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShownImage:
        """Create an image from the values of :meth:`to_dict`."""
        known = {one.name: values[one.name] for one in fields(cls) if one.metadata.get("json", True)}
        boxes = {name: tuple(box) for name, box in known["boxes"].items()}
        return cls(**{**known, "boxes": boxes, "grid": tuple(known["grid"]), "size": tuple(known["size"])})


def _upgraded(values: Any) -> Any:
    """Return the values of a report of format 1, whose keys said "picture", in the present format; others unchanged."""
    if not isinstance(values, Mapping) or values.get("format") != 1:
        return values
    return {**_with_images(values), "format": FORMAT}


def _with_images(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key.replace("picture", "image"): _with_images(item) for key, item in value.items()}
    return [_with_images(item) for item in value] if isinstance(value, list) else value


class Report(Saved, eq=False):
    """The result of :func:`vitrail.inspect`. ``docs/report.md`` explains every value.

    All values are plain. The values of a section are an attribute of its name as well, such as ``report.attention``; a
    section that could not be computed has a ``note`` with the reason.

    Attributes:
        sections: values of ``redundancy``, ``attention``, ``pca``, ``probes``, ``registers``, ``discovery``, ``cure``.
    """

    model: dict[str, Any]  # name, class, size and dtype of the model
    data: dict[str, Any]  # the images that were used
    layout: dict[str, Any]  # the tokens of the model
    norms: dict[str, Any]  # norms of patch tokens by layer, threshold, verdict and onset
    sections: dict[str, dict[str, Any]]
    problems: dict[str, Any]  # unreadable images, non-finite values, notes
    settings: dict[str, Any]  # options and seed
    versions: dict[str, Any]  # machine and versions of libraries
    images: list[ShownImage] = field(default_factory=list, repr=False)  # the images that are shown

    pictures = renamed_property("pictures", "images")

    def __getattr__(self, name: str) -> dict[str, Any]:
        sections = self.__dict__.get("sections", {})
        if name not in sections:
            raise AttributeError(f"{type(self).__name__!r} has no attribute or section {name!r}")
        values: dict[str, Any] = sections[name]
        return values

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        return verdict.verdict_sentence(self.norms)

    @property
    def next_step(self) -> str:
        """What to do next, in one line; code is between backticks."""
        return verdict.recommendations(self.norms, self.registers, self.cure, self.noun)[0]

    @property
    def noun(self) -> str:
        """What one input of the model is called: image, video clip, or sound."""
        return MODALITIES[self.data.get("medium", "image")].noun

    def to_dict(self) -> dict[str, Any]:
        """Return everything but pixels and maps as plain values."""
        values = super().to_dict()
        return {"format": FORMAT, "verdict": self.verdict, **values.pop("sections"), **values}

    def to_html(self) -> str:
        """Return the report as one page."""
        from vitrail.report.page.images import photos
        from vitrail.report.page.render import render
        from vitrail.report.sections import page_sections
        from vitrail.report.sections.summary import header

        return render("report.html", photos=photos(self.images), sections=page_sections(self), **header(self))

    def _repr_html_(self) -> str:
        from vitrail.report.card import report_card

        return report_card(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Load a report from its JSON, or from the JSON beside its page. Pixels and maps are not in it."""
        file = as_path("path", path)
        if file.suffix.lower() in PAGES:
            file = file.with_suffix(".json")
        try:
            values = json.loads(read_text(file))
        except OSError as error:
            raise ReportError(f"{file} could not be read ({error.strerror or error}); give a report's JSON") from error
        except (ValueError, RecursionError) as error:
            raise ReportError(f"{file} is not JSON ({error}); give the JSON beside a report's page") from error
        found = cls.from_dict(values, str(file))
        found._check_values(str(file))
        return found

    def _check_values(self, where: str) -> None:
        """Raise if the values are not those of a report: everything that is derived from them is computed once."""
        from vitrail.report.comparison import compare
        from vitrail.report.sections import page_sections
        from vitrail.report.sections.summary import header

        try:
            self.to_json()
            header(self)
            page_sections(self)
            both = compare(self, self)
            both.to_json()
            both.page_sections()
        except Exception as error:  # whatever wrong values lead to
            raise ReportError(
                f"{where} is damaged ({type(error).__name__}: {shown(error)}). Inspect the model again"
            ) from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the values") -> Report:
        """Create a report from the values of :meth:`to_dict`."""
        from vitrail.report.sections import section_keys

        values = _upgraded(values)
        names = [name for name in cls.__dataclass_fields__ if name not in ("sections", "images")]
        missing = [name for name in names if not isinstance(values, Mapping) or not isinstance(values.get(name), dict)]
        if missing or values.get("format") != FORMAT:
            problem = f"{', '.join(missing)} missing" if missing else f"its format is {values.get('format')!r}"
            raise ReportError(f"{where} is not a report of format {FORMAT}: {problem}. Inspect the model again")
        try:
            shown = [ShownImage.from_dict(one) for one in values.get("images", [])]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(f"{where} has damaged images ({error}). Inspect the model again") from error
        sections = {key: values.get(key, {"note": "not part of this report"}) for key in section_keys()}
        return cls(**{name: values[name] for name in names}, sections=sections, images=shown)
