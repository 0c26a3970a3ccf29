"""``vitrail.load`` and ``vitrail.from_pretrained``: a changed model back from its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail._arguments import checked
from vitrail.adapters import load_model
from vitrail.adapters.saved import read_config, saved_library
from vitrail.errors import ModelLoadError
from vitrail.models.saving import CONFIG, find_file
from vitrail.surgery.saving.base import Check, check_kind
from vitrail.surgery.saving.changes import apply
from vitrail.surgery.saving.settings import FILE, TOKENS, Settings
from vitrail.surgery.saving.text import read_settings


@checked
def load(path: str | Path, model: nn.Module | None = None, *, check: Check | None = "structure") -> nn.Module:
    """Return a model with the changes that were saved, in place: merging, added tokens, test-time registers.

    >>> merging.save("settings")                        # doctest: +SKIP
    >>> model = vitrail.load("settings", other)         # doctest: +SKIP
    >>> vitrail.Merging.of(model).r                     # doctest: +SKIP

    Args:
        path: directory of ``merging.save`` or of another handle, its ``vitrail.json``, or the JSON of ``vitrail.tune``.
        model: the model to change. By default the one in the same directory, or else the one that
            `vitrail.load_model` loaded before, by its name; then its weights must be those that the settings were saved
            with.
        check: what must be as it was: ``"structure"`` (blocks, tokens, parameters' names and shapes, config),
            ``"weights"`` as well, or None.

    Raises:
        ModelLoadError: the files are missing or damaged, or the model is another one; it is unchanged then.
    """
    check_kind(check)
    settings = read_settings(Path(path))
    if model is not None:
        apply(settings, model, check=check)
        return model
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if (folder / CONFIG).is_file():
        return from_pretrained(folder)
    if settings.base is None or settings.base.name is None:
        raise ModelLoadError(f"{path} does not say which model it is for; pass it: vitrail.load({str(path)!r}, model)")
    made = load_model(settings.base.name)
    apply(settings, made, check="weights")
    return made


def add_saved_tokens(model: nn.Module, folder: Path) -> None:
    """Add the tokens that a model was trained with, from the settings beside it; a merging there is not applied.

    Added tokens are a part of what was trained; merging is chosen for each use of a model.
    """
    if not (folder / FILE).is_file():
        return
    settings = Settings.read(folder)
    if TOKENS in settings.changes:
        apply(replace(settings, changes={TOKENS: settings.changes[TOKENS]}), model)


@checked
def from_pretrained(name: str | Path, **options: Any) -> nn.Module:
    """Load a model that was saved while it was changed, by the library's own ``save_pretrained``, and change it again.

    >>> vitrail.merge(model, r=8)                       # doctest: +SKIP
    >>> model.save_pretrained("merged")                 # doctest: +SKIP
    >>> model = vitrail.from_pretrained("merged")       # doctest: +SKIP

    Args:
        name: directory with the model's files and ``vitrail.json``, or a repository of the Hugging Face Hub.
        options: for the library's own loader, such as ``dtype``. Without any, weights must be those that the settings
            were saved with: a model written over them later is refused.
    """
    settings = Settings.read(find_file(name, FILE, {}))
    folder = find_file(name, CONFIG, {}).parent
    library = saved_library(folder)
    if Path(name).is_dir() and not options:
        model = library.restore(folder, read_config(folder))
    else:
        model = load_model(f"{library.prefix}:{str(name).removeprefix('hf:')}", **options)
    apply(settings, model, check="structure" if options else "weights")
    return model
