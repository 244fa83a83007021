"""Which cells of the benchmarks are run when, as regular expressions for asv's ``--bench``.

asv matches them with a cell's name, ``step.Step.time_step('mlx', 256, 8, 'float32')``.
"""

from __future__ import annotations

_STANDARD = r"\('[a-z]+', 256, 8, 'float32'(, 'mebp')?\)"

#: Always: what every result is checked by.
SOURCE = r"track_source_hash"

#: Every benchmark once, on every backend: so that none rots.
QUICK = (
    SOURCE,
    _STANDARD,
    r"time_real_model\('torch', 256, 8, 'float32', 'smollm2-135m'\)",
    r"peak_bytes_real_model\('mlx', 256, 8, 'float32', 'smollm2-135m'\)",
)

#: For many commits: the step and what it is compared with, and its memory over tokens.
SHORT = (
    SOURCE,
    r"^(step|block|methods)\..*" + _STANDARD,
    r"^step\.StepMemory.*\('[a-z]+', (1024|2048), 8, 'float32'\)",
)

#: For two commits, one of which may be the worse.
COMPARE = (*SHORT, r"^components\..*" + _STANDARD)

#: Large models, minutes each: for one commit.
LARGE = (
    SOURCE,
    r"real_model\('[a-z]+', 256, 8, 'float32', 'smollm2-135m'\)",
    r"peak_bytes_real_model\('mlx', 256, 8, 'bfloat16', '(smollm2-135m|qwen2.5-0.5b)'\)",
)

#: Everything there is.
FULL = ("",)

SUITES = {"quick": QUICK, "short": SHORT, "compare": COMPARE, "large": LARGE, "full": FULL}


def patterns(suite: str) -> tuple[str, ...]:
    """A suite by its name; anything else is a regular expression of its own."""
    return SUITES.get(suite, (SOURCE, suite))
