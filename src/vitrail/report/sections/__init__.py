"""Sections of a report, in the order of the page. Each is one module that computes its values and renders them.

To add a section, write a module with a :class:`Section` and list it here.
"""

from __future__ import annotations

from vitrail.report.page.blocks import Bullets, PageSection
from vitrail.report.report import Report
from vitrail.report.sections import (
    attention,
    components,
    cure,
    discovery,
    high_norm_tokens,
    norms,
    places,
    probes,
    registers,
    sinks,
    summary,
)
from vitrail.report.sections.base import Section

__all__ = ["SECTIONS", "Section", "page_sections", "section_keys"]

SECTIONS: tuple[Section, ...] = (
    norms.IMAGES,
    high_norm_tokens.SECTION,
    norms.HISTOGRAM,
    norms.LAYERS,
    places.SECTION,
    attention.SECTION,
    sinks.SECTION,
    components.SECTION,
    probes.SECTION,
    registers.SECTION,  # after the probes, whose values it uses
    discovery.SECTION,
    cure.SECTION,
    summary.NEXT,
    summary.METHOD,
    summary.PROBLEMS,
)


def section_keys() -> list[str]:
    """Return the keys of the sections in the JSON."""
    return [section.key for section in SECTIONS if section.compute is not None]


def page_sections(report: Report) -> list[PageSection]:
    """Return the sections of a report's page that have something to show, and a list of those that have not."""
    every = [(one, one.blocks(report)) for one in SECTIONS]
    pages = [PageSection(one.anchor, one.title, one.link, blocks) for one, blocks in every if blocks]
    absent = [f"{one.title}: {one.note(report) or one.absent(report)}" for one, blocks in every if not blocks]
    return [*pages, PageSection("absent", "Not on this page", "", [Bullets(absent)])] if absent else pages
