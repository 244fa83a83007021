"""The reference: every component of MeSP in float64 NumPy, written from the mathematics alone.

Nothing here is tiled, recomputed or clever: each forward stores everything that its backward
needs, and each backward is the derivation of `docs/` line by line. It imports NumPy and nothing
else, so that what is compared with it shares no code with it.

Shape letters: N tokens of a ragged batch, B sequences, D hidden, F feed-forward, H query heads,
K key/value heads, E head dimension, V vocabulary, R LoRA rank, L layers. All arrays are float64,
except token and position numbers. `d` before a name is the derivative of the loss by it.
"""
