"""Mutants that no test can or should notice, and why."""

from __future__ import annotations

_ERASED = (
    "the first key tile rescales what the running sums start from by exp(MASKED - maximum), which "
    "is exactly 0"
)
_OVERWRITTEN = "every tile of the buffer is written before anything reads it"
_PUT_CASTS = "putting a tile into a buffer casts it to the buffer's dtype anyway"
_PROMOTED = "a 16-bit factor beside a wide one is promoted to it by the operation itself"

#: The names ``tests.mutation.run`` prints, by the reason they share.
_BY_REASON: dict[str, tuple[str, ...]] = {
    "any score no real one reaches will do": ("mesp_core.formulas.attention:: -1e+30 → -2e+30",),
    _ERASED: (
        "mesp_core.formulas.attention:attention_forward.query_tile: "
        "xp.zeros_like(top) → xp.ones_like(top)",
        "mesp_core.formulas.attention:attention_forward.query_tile: "
        "xp.zeros_like(grouped) → xp.ones_like(grouped)",
    ),
    _OVERWRITTEN: (
        "mesp_core.formulas.attention:attention_forward: "
        "xp.zeros((tokens, heads, width), dtype=q.dtype) → "
        "xp.ones((tokens, heads, width), dtype=q.dtype)",
        "mesp_core.formulas.attention:attention_forward: "
        "xp.zeros((tokens, heads), dtype=dtype) → xp.ones((tokens, heads), dtype=dtype)",
    ),
    _PUT_CASTS: (
        "mesp_core.formulas.attention:attention_forward.query_tile: "
        "cast(o_tile, q.dtype, xp) → o_tile",
    ),
    "the first feature is even, and halved": (
        "mesp_core.formulas.gated_mlp:_input_adapter: "
        "dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=xp) → "
        "dropout_multiplier(dropout, 1, x.shape[1], dtype=x.dtype, xp=xp)",
    ),
    _PROMOTED: (
        "mesp_core.formulas.rms_norm:rms_norm_backward: wide(dout, xp) → dout",
        "mesp_core.formulas.rms_norm:rms_norm_backward: wide(saved.x, xp) → saved.x",
        "mesp_core.formulas.rms_norm:_gain: cast(weight, dtype, xp) → weight",
    ),
}

#: Name: reason.
EXPLAINED: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}
