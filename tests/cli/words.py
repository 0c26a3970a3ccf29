"""What a command said, as plain text."""

import re


def one_line(text: str) -> str:
    """The text of a message, whatever box and lines it was set in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
