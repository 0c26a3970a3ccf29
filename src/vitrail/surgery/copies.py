"""Copies of models, merged or not, that may share their weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail.runtime.checks import merged_trunk


@checked
def copy_model(module: nn.Module, share: bool) -> nn.Module:
    """Copy a model, merged or not; with ``share`` the copy uses the same parameter and buffer tensors."""
    shared: Sequence[Tensor] = (*module.parameters(), *module.buffers()) if share else ()
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def copy_unmerged(module: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its weights, without its merging."""
    from vitrail.surgery.merging import Merging

    own = copy_model(module, share=True)
    if merged_trunk(own) is not None:
        Merging.of(own).remove()
    return own
