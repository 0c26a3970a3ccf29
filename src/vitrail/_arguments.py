"""`checked`: arguments of public functions, checked against their annotations before anything is done.

One place for mistakes of type: a path, device or function of the wrong kind, a set where a list is expected, NaN as a
number. What only the function knows (ranges, contradictions) it checks itself, by `vitrail._checks`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from itertools import islice
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor, nn

from vitrail._checks import MAX_INT, as_device, as_path, shown
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel, VitrailError

P = ParamSpec("P")
R = TypeVar("R")

_TEXTS = {
    bool: "True or False", int: "a whole number", float: "a number", str: "text", bytes: "bytes", type(None): "None",
    Tensor: "a tensor", nn.Module: "a model, a torch.nn.Module", torch.dtype: "a dtype such as torch.float16",
    torch.device: "a device", dict: "a mapping", abc.Mapping: "a mapping", abc.Callable: "a function",
    abc.Iterable: "values to iterate over",
}  # fmt: skip
_SEQUENCES = (abc.Sequence, abc.Collection, list, tuple)
_MAX_ELEMENTS = 1000
"""Elements of a sequence that are looked at."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function by its annotations: raise `InvalidOption` with what was given and expected.

    Arguments annotated with ``Any``, or with types that are not known here, are left to the function. So is what a
    wrong call raises: too many arguments, or unknown names.
    """
    signature = inspect.signature(function)
    kinds: dict[str, Any] = {}

    @functools.wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own error
        for name, value in given.items():
            parameter = signature.parameters[name]
            if name not in kinds:
                kinds[name] = _resolved(parameter.annotation, function)
            if parameter.kind is not parameter.VAR_KEYWORD and value is not parameter.default:
                values = value if parameter.kind is parameter.VAR_POSITIONAL else (value,)
                for one in values:
                    _check(name, one, kinds[name])
        return function(*args, **kwargs)

    return checking


def fitting(function: Callable[P, R]) -> Callable[P, R]:
    """Check as `checked` does, and turn what torch raises for tensors that do not fit together into one clear error.

    For functions that compute with their tensors at once and change nothing.
    """
    signature, inner = inspect.signature(function), checked(function)

    @functools.wraps(function)
    def computing(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return inner(*args, **kwargs)
        except (torch.OutOfMemoryError, VitrailError):
            raise
        except (
            RuntimeError,
            IndexError,
            ValueError,
            TypeError,
            AssertionError,
            ArithmeticError,
            KeyError,
            AttributeError,
        ) as error:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                raise error from None
            listed = ", ".join(f"{name}={_described(value)}" for name, value in given.items())
            why = " ".join(str(error).split())[:200]
            raise UnsupportedInput(
                f"{function.__name__}: these arguments do not fit together ({why}); got {listed}"
            ) from error

    return computing


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    return shown(value, 60)


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """Return an annotation as a type; ``Any`` if it cannot be evaluated here (names for type checkers alone)."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        scope = vars(sys.modules[function.__module__])
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"x": annotation}), scope)["x"]
    except Exception:
        return Any


def _check(name: str, value: Any, kind: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_INT:  # also where anything is allowed: no option takes it
        raise InvalidOption(f"{name}={shown(value)}: expected no larger number than {MAX_INT}")
    if _fits(name, value, kind):
        return
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        name = (
            "model, a torch.nn.Module" if kind is nn.Module else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        )
        raise UnsupportedModel(f"expected a {name}; got {type(value).__name__}")
    raise InvalidOption(f"{name}={shown(value)}: expected {_text(kind)}")


def _fits(name: str, value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        parts = get_args(kind)
        if isinstance(value, str) and torch.device in parts:
            as_device(name, value)
        if isinstance(value, str | os.PathLike) and str(value) and any(_is_path(part) for part in parts):
            as_path(name, value)
        return any(_fits(name, value, part) for part in parts)
    if kind is None or kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if isinstance(value, Tensor) and kind in (int, float):  # a single number
        return value.ndim == 0 and _fits(name, value.item(), kind)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= MAX_INT
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and value == value and _in_float(value)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if origin is abc.Callable or kind is abc.Callable:
        return callable(value)
    if kind in _SEQUENCES or origin in _SEQUENCES:
        return _is_sequence(name, value, origin or kind, get_args(kind))
    if kind is abc.Mapping or origin in (abc.Mapping, dict):
        keys = get_args(kind)[:1]
        return isinstance(value, Mapping) and (keys != (str,) or all(isinstance(key, str) for key in value))
    if origin is abc.Iterable:
        if isinstance(value, abc.Sequence) and not isinstance(value, str):
            return _is_sequence(name, value, abc.Sequence, get_args(kind))
        if isinstance(value, Tensor) or type(value).__name__ == "ndarray" or isinstance(value, Mapping):
            return getattr(value, "ndim", 0) > 0 and get_args(kind)[:1] in ((Tensor,), (Any,))
        return isinstance(value, abc.Iterable) and (not isinstance(value, str) or get_args(kind) == (str,))
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    return True


def _is_sequence(name: str, value: Any, kind: Any, elements: tuple[Any, ...]) -> bool:
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return False
    array = type(value).__name__ == "ndarray" or isinstance(value, Tensor)
    if array and not value.ndim:
        return False
    if not array and not isinstance(value, abc.Collection if kind is abc.Collection else abc.Sequence):
        return False
    if kind is tuple and elements and Ellipsis not in elements:
        pairs = zip(value, elements, strict=True) if len(value) == len(elements) else [(None, int)]
        return not array and all(_fits(name, one, expected) for one, expected in pairs)
    if not elements:
        return True
    if array and (getattr(value, "ndim", 1) != 1 or elements[0] not in (int, float, bool, Any)):
        return elements[0] in (Any, Tensor)
    some = value[:_MAX_ELEMENTS].tolist() if array else islice(value, _MAX_ELEMENTS)
    return all(_fits(name, one, elements[0]) for one in some)


def _in_float(value: Any) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_path(kind: Any) -> bool:
    return isinstance(get_origin(kind) or kind, type) and issubclass(get_origin(kind) or kind, os.PathLike)


def _text(kind: Any) -> str:
    """Return what an annotation allows, in words."""
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(dict.fromkeys(map(_text, get_args(kind))))
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is None:
        return "None"
    if _is_path(kind):
        return "a path"
    if kind in _SEQUENCES or origin in _SEQUENCES:
        inside = [one for one in get_args(kind) if one not in (Ellipsis, Any)]
        several = {int: "whole numbers", float: "numbers", str: "texts"}.get(inside[0] if inside else Any, "values")
        return f"a list of {several}"
    return _TEXTS.get(origin or kind, f"a {getattr(kind, '__name__', kind)}")
