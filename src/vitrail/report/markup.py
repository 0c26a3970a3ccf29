"""Pages from small pieces: everything is escaped unless it is markup already, so that no name can become markup."""

from __future__ import annotations

import html
from typing import Any

VOID = frozenset({"br", "hr", "img", "meta", "link"})


class Html(str):
    """Text that is markup, and is not escaped again."""

    __slots__ = ()


def text(value: Any) -> Html:
    """Make anything markup: text is escaped, markup stays, several pieces are joined, None is nothing.

    Characters that no page may hold are left out; HTML has no way to write them.
    """
    if value is None:
        return Html("")
    if isinstance(value, Html):
        return value
    if isinstance(value, list | tuple):
        return Html("".join(text(item) for item in value))
    found = "".join(letter for letter in str(value) if letter in "\n\t" or (letter >= " " and not _forbidden(letter)))
    return Html(html.escape(found))


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Make an element; ``class_`` is written ``class``, other underscores become dashes, None is left out.

    >>> tag("p", "1 < 2 ", tag("b", "yes"), class_="note")
    '<p class="note">1 &lt; 2 <b>yes</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{text(children)}</{name}>")


def figure(content: Any, caption: Any, class_: str | None = None) -> Html:
    """Make a figure with a caption."""
    return tag("figure", content, tag("figcaption", caption), class_=class_)


def table(head: list[Any], rows: list[list[Any]], caption: str) -> Html:
    """Make a table whose first column names the rows; wide ones scroll by themselves."""
    top = tag("tr", [tag("th", cell, scope="col") for cell in head])
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            [tag("td", cell, class_="long" if len(str(cell)) > 40 else None) for cell in row[1:]],
        )
        for row in rows
    ]
    whole = tag("table", tag("thead", top) if any(head) else None, tag("tbody", body), aria_label=caption)
    scroll = tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)
    return tag("figure", tag("figcaption", caption), scroll)


def key(style: str, words: str) -> Html:
    """Explain a line of a chart."""
    return tag("span", tag("i", class_=f"key {style}"), words, class_="explained")


def note(words: Any) -> Html:
    """Make a remark, such as why there is no number."""
    if isinstance(words, str) and not isinstance(words, Html):
        words = words[:1].upper() + words[1:]
    return tag("p", words, class_="note") if words else Html("")


def _forbidden(letter: str) -> bool:
    return 0x7F <= ord(letter) <= 0x9F or 0xD800 <= ord(letter) <= 0xDFFF
