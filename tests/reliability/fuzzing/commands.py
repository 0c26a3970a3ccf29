"""Commands with right and wrong arguments: exit codes of ours, and never a traceback."""

from __future__ import annotations

import random
import traceback
from typing import Any

from typer.testing import CliRunner

from tests.reliability.fuzzing.calls import PATIENCE, Found, Hanging, limited
from tests.reliability.fuzzing.values import World

ALLOWED = {0, 1, 2, 3, 130, 143}

_RIGHT: dict[str, list[Any]] = {
    "images": ["{}/photos"], "data": ["{}/photos"], "model": ["{}/model", "vitrail:tiny"], "checkpoint": ["{}/model"],
    "first": ["{}/model"], "second": ["{}/model"], "out": ["{}/out"], "r": ["1", "1,0"], "keep": ["0.5"],
    "limit": ["1"], "device": ["cpu"], "size": ["16"], "batch": ["1"], "method": ["tome"], "json_file": ["{}/o.json"],
    "merge": ["r=1"], "dtype": ["fp32"], "seed": ["1"], "gflops": ["0.001"], "epochs": ["1"], "batch_size": ["2"],
    "within": ["0.5"], "seconds": ["0.01"], "config": ["{}/text.txt"], "set_": ["clip=0.5"],
}  # fmt: skip

_WRONG = [
    "", "x", "-1", "0", "1e400", "nan", "inf", "1" * 5000, "a\0b", "[/red]", "\x1b[31m", "{{a: 1}}", "[", "*a",
    "cuda:7",
    "x" * 100_000, "{}/loop", "{}/nowhere/x", "{}/text.txt", "{}/broken.png", "{}/bad.yaml", "{}/bad.json", "{}/empty",
    "{}/[red]", "/dev/null", "/dev/zero", "/proc/self/mem", "/", "hf:", "timm:none", "vitrail:../..", "wds:x",
    "r=1,r=2", "r=", "=", "a=b=c", "options={{depth: 1000000000}}", "tokens=cls,register=-1", "tasks=5", "1" * 30,
    "seed=99999999999999999999999999", "lr=1e38", "patch_size=0x", "--", "-", "merge={{}}", "data=*", "é\ud800",
]  # fmt: skip


def arguments(command: Any, draw: random.Random, world: World) -> list[str]:
    """Return a command line with some wrong values."""
    given: list[str] = []
    spoiled = {one.name for one in draw.sample(command.params, min(len(command.params), draw.choice((0, 1, 1, 2))))}
    for one in command.params:
        is_option = one.param_type_name == "option"
        if is_option and one.name not in spoiled and not one.required and draw.random() < 0.85:
            continue
        if is_option and one.is_flag:
            given.append(draw.choice(one.opts))
            continue
        known = _RIGHT.get(one.name)
        pool = _WRONG if one.name in spoiled or known is None else known
        if known is None and one.name not in spoiled and is_option and not one.required:
            continue
        text = draw.choice(pool).replace("{{", "\1").replace("{}", str(world.folder))
        value = text.replace("\1", "{").replace("}}", "}")
        given += [draw.choice(one.opts), value] if is_option else [value]
    return given


def fuzz(commands: dict[str, Any], count: int, seed: int, world: World) -> Found:
    """Run ``count`` command lines."""
    from vitrail.cli import app

    draw, found, runner = random.Random(seed), Found(), CliRunner()
    for name in draw.choices(list(commands), k=count):
        given = arguments(commands[name], draw, world)
        endless, long = name in ("serve", "web"), name in ("train", "demo", "bench") and "--out" not in given
        if name == "bench" and "--batch-size" not in given:
            given += ["--batch-size", "1"]  # the model of this package at 64 images takes minutes on a busy machine
        if endless or (long and draw.random() < 0.8):
            given.append("--no-such-option")  # what succeeds takes long: parsed alone
        found.counts["command lines"] += 1
        shown = " ".join(f"{one!r:.60}" for one in given)
        try:
            with limited(PATIENCE):
                result = runner.invoke(app, [name, *given], catch_exceptions=True)
        except Hanging:
            found.fault("hangs", name, shown)
            continue
        error = result.exception
        if isinstance(error, Hanging):
            found.fault("hangs", name, shown)
        elif error is not None and not isinstance(error, SystemExit):
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{name} at {place.filename.rpartition('/')[2]}:{place.lineno}"
            found.fault(f"raw {type(error).__name__}", where, f"{shown}\n    {error!s:.200}")
        elif result.exit_code not in ALLOWED:
            found.fault(f"exit code {result.exit_code}", name, shown)
        elif len(result.stderr) > 20_000:
            found.fault("long output", name, shown)
        else:
            found.counts["refused" if result.exit_code else "done"] += 1
    return found
