"""Output of a command as plain text."""

import re


def one_line(text: str) -> str:
    """Return a message without its box and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
