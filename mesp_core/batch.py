"""A batch of sequences of any lengths: their tokens one after the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesp_core.errors import MespError


@dataclass(frozen=True)
class Batch:
    """tokens: int32 [N]; targets: int32 [N], the token after each; weights: float32 [N], 0 for a
    masked target; starts: int64 [B+1], where each sequence begins; numbers: int64 [B], which
    sequence each is for dropout, so that reordering a batch changes no mask."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Batch:
        """Shifts each sequence by one: n ids give n − 1 tokens and their targets.

        prompt_lengths: how many leading ids of each sequence are prompt, and so never a target.
        numbers: the sequences' numbers for dropout; their place in the batch by default.
        Raises MespError for an empty batch, a sequence of fewer than two ids, a negative id, or
        lengths that do not match.
        """
        if not len(sequences):
            raise MespError("a batch needs at least one sequence, and got none")
        prompts = [0] * len(sequences) if prompt_lengths is None else list(prompt_lengths)
        if len(prompts) != len(sequences):
            raise MespError(f"{len(prompts)} prompt lengths for {len(sequences)} sequences")
        rows = [_ids(row, place) for place, row in enumerate(sequences)]
        weights = []
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            if not 0 <= prompt <= len(row):
                raise MespError(
                    f"prompt length {prompt} of sequence {place} is not within its {len(row)} ids"
                )
            weight = np.ones(len(row) - 1, dtype=np.float32)
            weight[: max(prompt - 1, 0)] = 0.0
            weights.append(weight)
        return cls(
            tokens=np.concatenate([row[:-1] for row in rows]),
            targets=np.concatenate([row[1:] for row in rows]),
            weights=np.concatenate(weights),
            starts=np.cumsum([0, *(len(row) - 1 for row in rows)]),
            numbers=np.arange(len(rows)) if numbers is None else np.asarray(numbers),
        )

    @property
    def segment(self) -> np.ndarray:
        """Which sequence of the batch each token belongs to: int32 [N]."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))

    @property
    def position(self) -> np.ndarray:
        """Each token's position in its own sequence: int32 [N]."""
        return np.arange(len(self.tokens), dtype=np.int32) - self.starts[self.segment].astype(
            np.int32
        )

    def padded(self, length: int) -> Batch:
        """The batch with ``length`` tokens, the new ones at the end in a sequence of their own
        with weight 0: no other token sees them, and the loss does not either."""
        more = length - len(self.tokens)
        if more <= 0:
            return self
        zeros = np.zeros(more, dtype=np.int32)
        return Batch(
            tokens=np.concatenate([self.tokens, zeros]),
            targets=np.concatenate([self.targets, zeros]),
            weights=np.concatenate([self.weights, zeros.astype(np.float32)]),
            starts=np.append(self.starts, length),
            numbers=np.append(self.numbers, 0),
        )

    @property
    def target_count(self) -> int:
        """How many targets count (weight not zero)."""
        return int(np.count_nonzero(self.weights))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises MespError when a token or target is not below ``vocabulary``."""
        for name, ids in (("token", self.tokens), ("target", self.targets)):
            if ids.size:
                check_id(int(ids.max()), vocabulary, name)


def check_id(largest: int, vocabulary: int, what: str = "token") -> None:
    """Raises MespError when the largest of some ids is not below ``vocabulary``."""
    if largest >= vocabulary:
        raise MespError(
            f"{what} id {largest} is not below the model's vocabulary size {vocabulary}; "
            "was the text encoded with another model's tokenizer?"
        )


def _ids(row: Sequence[int], place: int) -> np.ndarray:
    ids = np.asarray(row)
    if ids.ndim != 1 or len(ids) < 2:
        raise MespError(
            f"sequence {place} has {ids.size} token id(s); next-token training needs at least 2"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise MespError(f"sequence {place} holds {ids.dtype} values, not integer token ids")
    if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
        raise MespError(f"sequence {place} holds token ids outside 0 … 2³¹ − 1")
    return ids.astype(np.int32)
