"""Tuning: the chosen setting, how good it is on held-out images, and all settings that were tried."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vitrail._atomic_files import temporary_files
from vitrail.drawing.notebook import card, dots
from vitrail.errors import InvalidOption
from vitrail.surgery import Merging, merge

FORMAT = 1


@dataclass(frozen=True)
class Candidate:
    """A setting that was evaluated on the tuning images.

    Attributes:
        family: where its schedule comes from: ``"constant"``, or the name of a search.
        method: the merging method as plain data.
        r: merges per layer.
        flops: multiply-adds of one image.
        value: the quality, mean over the tuning images.
    """

    family: str
    method: Any
    r: tuple[int, ...]
    flops: int
    value: float


@dataclass(frozen=True)
class Tuning:
    """The result of ``vitrail.tune``.

    Attributes:
        config: ``vitrail.merge(model, **config)`` applies the chosen setting.
        family: where its schedule comes from.
        quality: name of the quality.
        bound: the tolerance; None where a budget was given.
        value: the quality of the chosen setting, mean over the held-out images; None where an interrupt kept it from
            being measured. The curve has its value on the tuning images.
        interval: 95 % confidence interval of the value; None for too few images.
        flops: multiply-adds of one image.
        flops_unmerged: the same without merging.
        speedup: measured throughput over the unmerged model's, interleaved on this machine; None if interrupted.
        latency_ms: median time of one batch of the tuned model; None if interrupted.
        batch: images in that batch.
        tuned_on: number of images that the search used.
        held_out: number of images that decided.
        curve: all settings that were compared on the tuning images.
        seconds: time that it took.
        interrupted: whether it was stopped early.
        device: where it ran.
        speedup_interval: 95 % confidence interval of the speed-up, over rounds of timing; None if it was not measured.
    """

    config: dict[str, Any]
    family: str
    quality: str
    bound: float | None
    value: float | None
    interval: tuple[float, float] | None
    flops: int
    flops_unmerged: int
    speedup: float | None
    latency_ms: float | None
    batch: int
    tuned_on: int
    held_out: int
    curve: tuple[Candidate, ...] = field(repr=False)
    seconds: float
    interrupted: bool
    device: str
    speedup_interval: tuple[float, float] | None = None

    @property
    def is_faster(self) -> bool | None:
        """Whether the measured speed-up is above the noise of timing; None if it was not measured."""
        return None if self.speedup_interval is None else self.speedup_interval[0] > 1

    @property
    def is_slower(self) -> bool | None:
        """Whether the measured slow-down is above the noise of timing; None if it was not measured."""
        return None if self.speedup_interval is None else self.speedup_interval[1] < 1

    def _repr_html_(self) -> str:
        points = [(one.flops / 1e9, one.value) for one in self.curve]
        chosen = next((point for point, one in zip(points, self.curve, strict=True) if self._is_chosen(one)), None)
        between = "" if self.interval is None else f" ({self.interval[0]:.4g} to {self.interval[1]:.4g})"
        figures = {
            "merged per layer": " ".join(map(str, self.config.get("r", []))) or str(self.config),
            f"{self.quality}, {self.held_out} held-out images": "–"
            if self.value is None
            else f"{self.value:.4g}{between}",
            "GFLOPs of an image": f"{self.flops / 1e9:.3g} of {self.flops_unmerged / 1e9:.3g}",
            "measured speed-up": "–"
            if self.speedup is None
            else f"{self.speedup:.2f}, batch {self.batch}, {self.device}",
        }
        caption = f"{self.quality} over GFLOPs, {self.tuned_on} tuning images"
        return card(
            "Tuned merging", figures, [dots(points, chosen, caption)], "Interrupted." if self.interrupted else ""
        )

    def _is_chosen(self, one: Candidate) -> bool:
        return (one.family, list(one.r)) == (self.family, list(self.config.get("r", [])))

    def apply(self, model: nn.Module) -> Merging:
        """Merge a model with the chosen setting; return the handle."""
        return merge(model, **self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, atomically."""
        try:
            with temporary_files(Path(path)) as (file,):
                file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidOption(
                f"{path} could not be written ({error.strerror or error}); name a file in an existing directory"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read a result from JSON."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError("another format")
            found["curve"] = tuple(Candidate(**{**one, "r": tuple(one["r"])}) for one in found["curve"])
            for name in ("interval", "speedup_interval"):
                found[name] = None if found.get(name) is None else tuple(found[name])
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidOption(f"{path} is not a result of vitrail.tune: {error}") from error
