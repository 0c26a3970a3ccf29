"""Token specs: defaults, invalid options, and their layout."""

import json
from typing import Any

import pytest

from vitrail.errors import InvalidOption
from vitrail.tokens import Role, TokenLayout, TokenSpec, check_specs


def test_defaults_are_those_of_a_class_token() -> None:
    spec = TokenSpec("cls", Role.CLASS)
    assert (spec.count, spec.std, spec.position, spec.enters, spec.visible) == (1, 0.02, None, 0, True)
    assert (spec.classes, spec.kind, spec.decay) == (None, "classification", False)


def test_role_as_a_string() -> None:
    assert TokenSpec("color", "task", classes=3).role is Role.TASK  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    spec = TokenSpec("r", Role.REGISTER, count=4, std=0.1, position=True, enters=-1, visible=False, decay=True)
    assert TokenSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert TokenSpec.from_dict({"name": "c", "role": "class"}) == TokenSpec("c", Role.CLASS)


@pytest.mark.parametrize(
    ("spec", "outputs"),
    [
        (TokenSpec("c", Role.CLASS), 10),
        (TokenSpec("c", Role.CLASS, classes=0), 0),
        (TokenSpec("d", Role.DISTILLATION, classes=7), 7),
        (TokenSpec("r", Role.REGISTER), 0),
        (TokenSpec("t", Role.TASK, classes=3), 3),
    ],
)
def test_outputs_of_a_head(spec: TokenSpec, outputs: int) -> None:
    assert spec.outputs(10) == outputs


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"role": "patch"}, "class, distillation, register, task; got 'patch'"),
        ({"role": ["class"]}, "got .*class"),
        ({"name": "class", "role": Role.CLASS}, "a Python identifier"),
        ({"name": "a.b"}, "a Python identifier"),
        ({"name": ""}, "a Python identifier"),
        ({"name": 3}, "a Python identifier"),
        ({"name": "_hidden"}, "a Python identifier"),
        ({"name": "keys"}, "try 'keys_token'"),
        ({"name": "type"}, "try 'type_token'"),
        ({"name": "patch"}, "cannot name a token"),
        ({"count": 0}, "count=0; expected an integer from 1"),
        ({"count": True}, "count=True"),
        ({"std": -1}, "std=-1"),
        ({"std": float("nan")}, "std=nan"),
        ({"enters": -2}, "enters=-2; expected an integer, -1 or more"),
        ({"visible": 1}, "visible=1"),
        ({"position": "yes"}, "position='yes'"),
        ({"decay": None}, "decay=None"),
        ({"kind": "dense"}, "kind='dense'"),
        ({"classes": -1}, "classes=-1"),
        ({"role": "register", "classes": 3}, "registers have no head"),
        ({"role": "register", "kind": "regression"}, "registers have no head"),
        ({"role": "distillation", "count": 2}, "count=2; expected 1"),
        ({"role": "task"}, "the number of outputs of the task"),
        ({"role": "task", "classes": 0}, "the number of outputs of the task"),
    ],
)
def test_invalid_options(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        TokenSpec(**{"name": "a", "role": Role.CLASS, **values})


def test_unknown_and_missing_values_are_named() -> None:
    with pytest.raises(InvalidOption, match="missing: role; unknown: color"):
        TokenSpec.from_dict({"name": "a", "color": 3})
    with pytest.raises(InvalidOption, match="is a dict"):
        TokenSpec.from_dict("class")  # type: ignore[arg-type]


def test_names_differ() -> None:
    with pytest.raises(InvalidOption, match="more than once: color"):
        check_specs([TokenSpec("color", Role.TASK, classes=3), TokenSpec("color", Role.CLASS)])


def test_one_distillation_token_at_most() -> None:
    with pytest.raises(InvalidOption, match="at most one distillation token; got 2"):
        check_specs([TokenSpec("d", Role.DISTILLATION), TokenSpec("e", Role.DISTILLATION)])


def test_specs_are_specs() -> None:
    with pytest.raises(InvalidOption, match="TokenSpec objects; got 'class'"):
        check_specs(["class"])  # type: ignore[list-item]
    assert check_specs([{"name": "c", "role": "class"}]) == (TokenSpec("c", Role.CLASS),)


def test_layout_has_the_order_of_the_specs_and_their_names() -> None:
    specs = check_specs(
        [TokenSpec("r", Role.REGISTER, count=2), TokenSpec("c", Role.CLASS), TokenSpec("t", Role.TASK, classes=2)]
    )
    found = TokenLayout.from_specs(specs, (1, 2, 3))
    assert [(span.role, span.count, span.name) for span in found.special] == [
        (Role.REGISTER, 2, "r"), (Role.CLASS, 1, "c"), (Role.TASK, 1, "t"),
    ]  # fmt: skip
    assert found.indices(Role.TASK, "t") == range(3, 4)
    assert found.patches == slice(4, 10)
