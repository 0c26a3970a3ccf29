"""``save_pretrained`` of a changed model: the library's own files, and ``vitrail.json`` beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.errors import InvalidOption
from vitrail.runtime.install import OURS

NAME = "save_pretrained"


class SavePretrained:
    """Replaces ``save_pretrained`` on a model while it is changed; an attribute, so that copies have their own.

    The library writes the model's own weights alone, which it reads back without Vitrail.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Write the model's files and the settings; arguments are the library's own."""
        from vitrail.surgery.saving import FILE, collect

        if options.get("push_to_hub"):
            raise InvalidOption("push_to_hub=True would leave out vitrail.json; call model.push_to_hub(...) instead")
        given = options.pop("state_dict", None)
        states = own_states(self.owner) if given is None else {n: v for n, v in given.items() if not is_ours(n)}
        settings = collect(self.owner)
        save: Any = getattr(type(self.owner), NAME)
        result = save(self.owner, save_directory, *args, state_dict=states, **options)
        if settings.changes and options.get("is_main_process", True):
            settings.write(Path(save_directory))
        else:
            (Path(save_directory) / FILE).unlink(missing_ok=True)
        return result


def attach(model: nn.Module, found: Found) -> None:
    """Let the modules of a model that save themselves write their changes, too."""
    for owner in found.adapter.savers(model, found.trunk):
        owner.save_pretrained = SavePretrained(owner)  # type: ignore[assignment]


def detach(model: nn.Module) -> None:
    """Undo :func:`attach` once a model carries no change."""
    from vitrail.surgery.saving.changes import handles_of

    if not handles_of(model):
        for part in model.modules():
            if isinstance(vars(part).get(NAME), SavePretrained):
                del part.save_pretrained


def own_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of a model without what Vitrail added to it."""
    return {name: value for name, value in model.state_dict().items() if not is_ours(name)}


def is_ours(name: str) -> bool:
    """Return whether a key of a state_dict belongs to a part that Vitrail added."""
    return any(part in OURS for part in name.split("."))
