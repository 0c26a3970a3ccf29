"""The example of docs/adapters.md runs unchanged."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from vitrail.adapters import ADAPTERS, LIBRARIES, TrunkAdapter
from vitrail.adapters.named_block import BlockNames

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    adapters, libraries = dict(ADAPTERS), dict(LIBRARIES)
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/adapters.md", "exec"), module.__dict__)
    finally:
        for table, before in ((ADAPTERS, adapters), (LIBRARIES, libraries)):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "[57, 49, 41, 33]"
    assert printed[-1] == "3"


def test_the_tables_list_all_entries() -> None:
    names, methods = (re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in PAGE.split("\n## ")[2:4])
    entries = set(re.findall(r"`(\w+)`", " ".join(names)))
    assert entries == set(BlockNames.__dataclass_fields__) - {"among_special", "post_norm"}
    assert all(hasattr(TrunkAdapter, name) for name in re.findall(r"`(\w+)`", " ".join(methods)))
