"""The report: one self-contained HTML page about one run or several, with curves, samples and settings.

`reading` reads what a run has written, `plots` draws a plot, `page` puts the page together, `style` is its look.
"""

from toolkit.report.page import write_report

__all__ = ["write_report"]
