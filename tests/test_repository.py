"""Promises of the repository itself: versions agree, the import is lean, the README is correct."""

import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import vitrail

ROOT = Path(__file__).resolve().parents[1]

# Packages that come with an extra, or that only some features need: `import vitrail` must not pay for them.
NOT_AT_IMPORT = {
    *(
        "PIL",
        "matplotlib",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "open_clip",
        "peft",
        "rich",
        "safetensors",
        "scipy",
        "sklearn",
    ),
    *("timm", "torchaudio", "torchvision", "transformers", "triton", "typer"),
}

# Spelt in halves, so that this file passes its own test.
FORBIDDEN = ["/wo" + "rk/", "/ro" + "ot/", "extra-index" + "-url"]

ELSEWHERE = {"docs/adapters.md", "docs/tokens.md", "docs/training.md"}
"""Pages whose examples run in tests of their own."""

SLOW = {"docs/export.md"}
"""Pages whose examples take minutes."""

PAGES = [
    pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page
    for page in ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
    if page not in ELSEWHERE and "```python" in (ROOT / page).read_text(encoding="utf-8")
]
"""Pages with Python examples."""

IMPORT_PROBE = """
import contextlib, io, json, runpy, sys
import torch

def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules})

before = set(sys.modules)
import vitrail
added = sorted(set(sys.modules) - before)
found = {"added": added, "loaded": loaded(), "cuda": torch.cuda.is_initialized()}
from vitrail.data import InputSpec
found["with preprocessing"] = loaded()
sys.argv, output = ["vitrail", "--help"], io.StringIO()
try:
    with contextlib.redirect_stdout(output):
        runpy.run_module("vitrail", run_name="__main__")
except SystemExit as leave:
    found["code"] = leave.code
print(json.dumps({**found, "help": output.getvalue(), "with help": loaded()}))
"""


def code_blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Line number and text of a page's code blocks in one language, less those after `<!-- no-test -->`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fence = re.compile(
        rf"^(?P<skip><!-- no-test -->\s*\n)?^```{language}\n(?P<code>.*?)^```\s*$", re.DOTALL | re.MULTILINE
    )
    return [
        (text.count("\n", 0, block.start("code")) + 1, block["code"])
        for block in fence.finditer(text)
        if block["skip"] is None
    ]


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """Return the effects of `import vitrail`, of preprocessing and of ``--help`` on a new interpreter."""
    run = subprocess.run([sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|js|css|md))\b", text))
    assert len(named) > 60
    assert not [name for name in named if not (ROOT / "src/vitrail" / name).exists() and not (ROOT / name).exists()]


def test_folders_hold_about_twelve_modules() -> None:
    package = ROOT / "src" / "vitrail"
    modules = Counter(path.parent.relative_to(package).as_posix() for path in package.rglob("*.py"))
    del modules["cli"]  # one file per command
    assert {folder: count for folder, count in modules.items() if count > 13} == {}


def test_newest_changelog_entry_is_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+[^\]\s]*)\]?", text, re.MULTILINE)
    assert released[0] == vitrail.__version__
    assert f"version: {vitrail.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_import_loads_nothing_optional(fresh_import: dict[str, Any]) -> None:
    assert NOT_AT_IMPORT.isdisjoint(fresh_import["loaded"])


def test_import_adds_only_our_own_modules_to_torch(fresh_import: dict[str, Any]) -> None:
    top = {name.partition(".")[0] for name in fresh_import["added"]}
    assert top - set(sys.stdlib_module_names) - {"torch"} == {"vitrail"}


def test_import_stays_fast(fresh_import: dict[str, Any]) -> None:
    """The compiler takes seconds to load, so it is loaded on first use."""
    slow = re.compile(r"torch\._(dynamo|inductor)\b|torch\.(onnx|distributed\.fsdp)\b|sympy\b")
    assert [name for name in fresh_import["added"] if slow.match(name)] == []


def test_import_leaves_cuda_alone(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["cuda"] is False


def test_preprocessing_alone_does_not_load_pillow(fresh_import: dict[str, Any]) -> None:
    assert "PIL" not in fresh_import["with preprocessing"]


def test_module_runs_and_loads_nothing_heavy_for_its_help(fresh_import: dict[str, Any]) -> None:
    assert not fresh_import["code"]
    assert "Usage: vitrail " in fresh_import["help"]
    assert {"PIL", "timm", "transformers", "torchvision"}.isdisjoint(fresh_import["with help"])


@pytest.mark.parametrize("name", sorted(set(vitrail.__all__) - {"__version__"}))
def test_public_name_exists_and_explains_itself(name: str) -> None:
    value = getattr(vitrail, name)
    # A class's own docstring, not its parent's, nor the signature that @dataclass writes when there is none.
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert doc, f"vitrail.{name} has no docstring"
    assert not doc.startswith(f"{name}("), f"vitrail.{name} has only a generated docstring"


def test_public_names_are_listed_once() -> None:
    assert len(vitrail.__all__) == len(set(vitrail.__all__))


def test_readme_shows_the_two_commands_on_its_first_screen() -> None:
    line, code = code_blocks("README.md", "(?:sh|bash|console)")[0]
    commands = [text.partition("#")[0].strip() for text in code.splitlines()]
    assert commands == ["make demo", "make test"]
    assert line < 20


@pytest.mark.filterwarnings("ignore::vitrail.errors.VitrailWarning")
@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(page, "python")
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, code in blocks:
        # The padding makes a traceback name the page's own line.
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), namespace)


def test_no_file_names_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files belong to the repository")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert files
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files
        for word in FORBIDDEN
        if word.encode() in path.read_bytes()
    ]
    assert found == []
