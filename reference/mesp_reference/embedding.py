"""Embedding: the rows of a table. Derivation: docs/embedding.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class EmbeddingSaved:
    """tokens: [N]; vocabulary: V, the number of rows of the table."""

    tokens: np.ndarray
    vocabulary: int


def embedding_forward(tokens: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, EmbeddingSaved]:
    """x_i = table[tokens_i].

    tokens: [N] integers in [0, V); table: [V, D]. Returns x: [N, D].
    """
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < table.shape[0]:
        raise ValueError(f"token ids must lie in [0, {table.shape[0]})")
    return table[tokens], EmbeddingSaved(tokens, table.shape[0])


def embedding_backward(dx: np.ndarray, saved: EmbeddingSaved) -> np.ndarray:
    """dtable_v = Σ of dx_i over the tokens i that equal v.

    dx: [N, D]. Returns dtable: [V, D].
    """
    dtable = np.zeros((saved.vocabulary, dx.shape[1]))
    np.add.at(dtable, saved.tokens, dx)
    return dtable
