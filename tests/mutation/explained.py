"""Mutants that no test can or should notice, and why."""

from __future__ import annotations

#: The name ``tests.mutation.run`` prints, and the reason.
EXPLAINED: dict[str, str] = {}
