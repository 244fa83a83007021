"""The one table of tolerances: what a tensor may err by beyond the naive computation in its dtype.

Relative error of a whole tensor, ‖Δ‖ / ‖reference‖. Never loosened for one case.
"""

TOLERANCE = {
    "float64": 1e-13,
    "float32": 1e-6,
    # Half a unit in the last place: one rounding.
    "float16": 2.0**-12,
    "bfloat16": 2.0**-9,
}
