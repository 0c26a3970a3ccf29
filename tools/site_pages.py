"""Hooks of mkdocs: pages outside ``docs/``, and references generated from the package.

The site has the project's Markdown where it stands: README.md is the home page, the pages of the studies are next to
their rows. Links between files are rewritten for the site, so that they work in a checkout, too.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = (
    *("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("benchmarks/**/*.md", "experiments/**/*.md", "experiments/**/*.png", "experiments/methods/*.py"),
    *("recipes/*.yaml", "examples/*.ipynb", "src/vitrail/weights/*/CARD.md", "src/vitrail/web/page/icon.svg"),
)
"""Files of the site that are not in ``docs/``, as patterns from the root of the repository."""

RENAMED = {"README.md": "index.md", "src/vitrail/weights/": "weights/", "src/vitrail/web/page/": "images/"}
"""Beginnings of paths that are others on the site."""

PACKAGES = {
    "vitrail": "What you call on a model.",
    "vitrail.tokens": "Which token is where.",
    "vitrail.merging": "Methods, schedules and index maps, on plain tensors.",
    "vitrail.adapters": "Interfaces for other models and libraries.",
    "vitrail.models": "Our own ViT, DeiT and CaiT.",
    "vitrail.heads": "Heads by role, pooling, dense heads.",
    "vitrail.data": "Datasets, decoding, preprocessing.",
    "vitrail.drawing": "Stained glass and sheets.",
    "vitrail.training": "Training and evaluation.",
    "vitrail.analysis": "Measurements on tokens.",
    "vitrail.report": "Inspections and their pages.",
    "vitrail.bench": "Speed.",
    "vitrail.export": "ONNX and `torch.export` files.",
    "vitrail.errors": "All errors and warnings.",
}
"""Packages of the API reference, one page each, with what is in them."""

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):(?=<code>)")
_SHORTENED = re.compile(r"<code>~[\w.]+\.(\w+)</code>")
_LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<target>[^)\s\"#:]+)(?P<after>[)#\s\"])")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs/`` and the generated pages."""
    for path in outside():
        files.append(File.generated(config, site_uri(path), abs_src_path=str(ROOT / path)))
    for uri, text in {**_api_pages(), "reference/commands.md": _commands_page()}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page from the repository's tree to the site's."""
    site = page.file.src_uri
    source = _in_repository(site, Path(config.docs_dir))
    if source is None:
        return markdown
    known = {file.src_uri for file in files}

    def moved(link: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath(source).parent / link["target"])
        uri = site_uri(path)
        if uri not in known:
            uri = f"{uri}/README.md" if f"{uri}/README.md" in known else uri
        if uri not in known:
            return link[0]
        from_url = link["before"] == 'src="'  # HTML is left as it is: its links start at the page's address
        target = os.path.relpath(uri, page.file.url if from_url else PurePosixPath(site).parent)
        return f"{link['before']}{target}{link['after']}"

    pieces, at = [], 0
    for code in _CODE.finditer(markdown):
        pieces += [_LINK.sub(moved, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*pieces, _LINK.sub(moved, markdown[at:])])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Remove the roles of cross-references from docstrings."""
    return _SHORTENED.sub(r"<code>\1</code>", _ROLE.sub("", html))


def outside() -> Iterator[str]:
    """Yield the files of the site that are not in ``docs/``, as paths from the root of the repository."""
    for pattern in OUTSIDE:
        yield from sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def site_uri(path: str) -> str:
    """Return the place on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    for begins, other in RENAMED.items():
        if path.startswith(begins):
            return other + path.removeprefix(begins)
    return path


def _in_repository(uri: str, docs: Path) -> str | None:
    """Return the path in the repository of a page of the site; None for generated pages."""
    if (docs / uri).is_file():
        return f"docs/{uri}"
    return next((path for path in outside() if site_uri(path) == uri), None)


def _api_pages() -> dict[str, str]:
    """Return the pages of the API reference, by their place on the site."""
    rows = [f"| [`{name}`]({name}.md) | {what} |" for name, what in PACKAGES.items()]
    index = "\n".join(["# API reference", "", "| package | what is in it |", "| --- | --- |", *rows, ""])
    pages = {"reference/index.md": index}
    places: dict[str, str] = {}
    for package, what in PACKAGES.items():
        entries, elsewhere = [], []
        for name in _public_names(importlib.import_module(package)):
            path = f"{package}.{name}"
            if path in PACKAGES:
                continue
            place = places.setdefault(_definition(path), path)
            if place == path:
                entries.append(f"::: {path}")
            else:
                elsewhere.append(f"[`{name}`][{place}]")
        also = [f"Also here: {', '.join(elsewhere)}."] if elsewhere else []
        pages[f"reference/{package}.md"] = "\n\n".join([f"# {package}", what, *also, *entries, ""])
    return pages


def _definition(path: str) -> str:
    """Return where a public name is defined; its own path for modules and values."""
    module, _, name = path.rpartition(".")
    found: Any = getattr(importlib.import_module(module), name, None)
    return f"{found.__module__}.{found.__qualname__}" if hasattr(found, "__qualname__") else path


def _public_names(module: Any) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed, key=str.lower)
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def _commands_page() -> str:
    """Return the reference of the commands, from their own options."""
    from vitrail.cli._app import COMMANDS, app

    typer = importlib.import_module("typer")
    group = typer.main.get_command(app)
    context = group.make_context("vitrail", [], resilient_parsing=True)
    parts = ["# Commands", "`vitrail COMMAND --help` shows the same in a terminal."]
    for name, summary in COMMANDS.items():
        _, command, _ = group.resolve_command(context, [name])
        module = importlib.import_module(f"vitrail.cli.{name}")
        about = (inspect.getdoc(getattr(module, name)) or "").strip()
        examples = "\n".join(example.strip().strip("`") for example in module.EXAMPLES)
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        rows = [row for parameter in shown if (row := _option_row(parameter))]
        table = ["| option | default | meaning |", "| --- | --- | --- |", *rows]
        parts += [f"## vitrail {name}", summary, about, f"```sh\n{examples}\n```", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _option_row(parameter: Any) -> str | None:
    """Return a row of a command's table; None for ``--help``."""
    if parameter.name == "help":
        return None
    is_argument = parameter.param_type_name == "argument"
    names = (
        [(parameter.metavar or parameter.name or "").upper()]
        if is_argument
        else [*parameter.opts, *parameter.secondary_opts]
    )
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) or default is ... else f"`{default}`"
    about = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {shown} | {about} |"
