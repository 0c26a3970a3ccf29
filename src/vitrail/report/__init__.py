"""Inspection of models: one pass over the data, all analyses, and a page that anyone can read.

inspect      run a model on images and return a Report
Report       plain values, a verdict, JSON, and an HTML page
compare      compare two reports
"""

from vitrail.errors import ReportError
from vitrail.report.comparison import Comparison, compare
from vitrail.report.inspection import inspect
from vitrail.report.report import Report

__all__ = ["Comparison", "Report", "ReportError", "compare", "inspect"]
