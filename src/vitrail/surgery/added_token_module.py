"""What is added to a trunk: tokens and gates, a norm, and heads by name; and the file that holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models.saving import check_fit, write_whole
from vitrail.runtime.side_tokens import Beside
from vitrail.tokens import TokenSpec, check_specs

START = -10.0
"""First bias of the gates: an added token then counts as e⁻¹⁰, a twenty-thousandth, of another."""


class AddedModule(Beside):
    """Tokens that go beside a model's own, with a norm of their own and a linear head for each name that has one."""

    def __init__(self, specs: tuple[TokenSpec, ...], outputs: Mapping[str, int], width: int, depth: int) -> None:
        super().__init__(specs, width, depth)
        nn.init.constant_(self.gates, START)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.heads = nn.ModuleDict({name: nn.Linear(width, count) for name, count in outputs.items()})
        for head in self.heads.values():
            nn.init.trunc_normal_(head.weight, std=0.02)  # type: ignore[arg-type]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]

    def answer(self, beside: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Give the normed tokens (B, E, D), and what each head says; tokens that share one are averaged."""
        features = self.norm(beside)
        parts = features.split([spec.count for spec in self.specs], 1)
        by_name = {spec.name: part for spec, part in zip(self.specs, parts, strict=True)}
        return features, {name: head(by_name[name]).mean(1) for name, head in self.heads.items()}

    def groups(self) -> list[dict[str, Any]]:
        """Give the parameters by how they learn; the gates only where they are open, for else they have no gradient."""
        decayed = [self.values[spec.name] for spec in self.specs if spec.decay]
        tokens = [self.values[spec.name] for spec in self.specs if not spec.decay]
        heads = [head.weight for head in self.heads.values()]
        flat = [*self.norm.parameters(), *(head.bias for head in self.heads.values())]
        return [
            {"name": "tokens", "params": tokens, "weight_decay": 0.0},
            {"name": "tokens, decay", "params": decayed},
            {"name": "gates", "params": [self.gates] if self.is_open else [], "weight_decay": 0.0},
            {"name": "heads", "params": heads},
            {"name": "heads, no decay", "params": flat if self.heads else [], "weight_decay": 0.0},
        ]


def write_added(path: Path, added: AddedModule) -> None:
    """Write tokens, gates and heads into one file, whole or not at all."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in added.state_dict().items()}
    said = {"specs": [spec.to_dict() for spec in added.specs]}
    try:
        write_whole(path, save(tensors, metadata={"format": "pt", "vitrail": json.dumps(said)}))
    except OSError as error:
        raise ModelLoadError(f"{path} could not be written ({error.strerror or error})") from error


def read_added(path: Path, width: int, depth: int) -> tuple[tuple[TokenSpec, ...], dict[str, int], dict[str, Tensor]]:
    """Read specs, outputs of heads, and values; they must be for a model of this width and depth."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {}).get("vitrail", "null"))
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        specs = check_specs(TokenSpec.from_dict(spec) for spec in said["specs"])
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, InvalidOption) as error:
        raise ModelLoadError(
            f"{path} holds no added tokens ({error}); expected a file that AddedTokens.save wrote"
        ) from error
    outputs = {spec.name: len(states.get(f"heads.{spec.name}.bias", ())) for spec in specs}
    outputs = {name: count for name, count in outputs.items() if count}
    wanted = AddedModule(specs, outputs, width, depth).state_dict()
    check_fit(f"model of {depth} blocks and {width} channels", wanted, states)
    return specs, outputs, states
