"""From blocks to HTML."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vitrail.drawing import theme
from vitrail.errors import ReportError
from vitrail.report.page.blocks import Block

if TYPE_CHECKING:
    from jinja2 import Environment

_NOT_HTML = re.compile("[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
"""Characters that no HTML document may contain, not even escaped: they are left out."""


def check_jinja() -> None:
    """Raise if pages cannot be rendered because Jinja is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "HTML pages need jinja2, which is not installed. Run `pip install vitrail[report]`, or save the values "
            "alone as JSON, like report.json"
        ) from error


def render(template: str, **values: Any) -> str:
    """Render a whole page from a template in ``templates`` and the values it uses."""
    check_jinja()
    return _NOT_HTML.sub("", _environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("vitrail.report.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )

    def draw(blocks: Block | list[Block]) -> Markup:
        macros = environment.get_template("blocks.html").module
        every = [blocks] if isinstance(blocks, Block) else blocks
        return Markup("").join(getattr(macros, type(block).__name__.lower())(block) for block in every)

    environment.globals["draw"] = draw
    environment.globals["style"] = Markup(
        theme.css() + files("vitrail.report.page").joinpath("style.css").read_text("utf-8")
    )
    return environment
