"""Inspection of whole models: one pass over the data, all analyses, and a page that anybody can read.

inspect      a model and pictures to a Report
Report       plain values, a verdict, a page, JSON
compare      two reports side by side
"""

from vitrail.errors import ReportError
from vitrail.report.compare import Comparison, compare
from vitrail.report.inspect import inspect
from vitrail.report.report import Report

__all__ = ["Comparison", "Report", "ReportError", "compare", "inspect"]
