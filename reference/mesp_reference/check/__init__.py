"""How an implementation is compared with the reference, and the check that does it anywhere.

errors and their one measure: ``compare``; what naive code in a dtype is off by: ``naive``; the one
table: ``tolerances``. ``run`` is what ``mesp check`` finds under the entry point ``mesp.checks``.
"""

from mesp_reference.check.runner import Report, Row, run

__all__ = ["Report", "Row", "run"]
