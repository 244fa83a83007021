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
        Raises MespError for an empty batch, a sequence that is not a flat one of integers, of fewer
        than two ids or with a negative one, or lengths that do not match.
        """
        if not len(sequences):
            raise MespError("a batch needs at least one sequence, and got none")
        count = len(sequences)
        prompts = _one_each(prompt_lengths, [0] * count, count, "prompt lengths")
        numbered = _one_each(numbers, range(count), count, "numbers")
        rows = [_ids(row, place) for place, row in enumerate(sequences)]
        weights = []
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            if prompt > len(row):
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
            numbers=numbered,
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
    ids = _integers(row, f"sequence {place}")
    if len(ids) < 2:
        raise MespError(
            f"sequence {place} has {len(ids)} token id(s); next-token training needs at least 2"
        )
    return ids.astype(np.int32)


def _one_each(
    given: Sequence[int] | None, default: Sequence[int], count: int, what: str
) -> np.ndarray:
    """One integer for each of ``count`` sequences."""
    found = _integers(default if given is None else given, what)
    if len(found) != count:
        raise MespError(f"{len(found)} {what} for {count} sequences")
    return found


def _integers(values: Sequence[int], what: str) -> np.ndarray:
    """int64 [n], every one of which an int32 holds and none negative."""
    try:
        found = np.asarray(values)
    except ValueError:
        raise MespError(f"{what} must be a flat list of integers") from None
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise MespError(
            f"{what} must be a flat list of integers, not {found.dtype} values of shape "
            f"{found.shape}"
        )
    if found.size and not 0 <= int(found.min()) <= int(found.max()) <= np.iinfo(np.int32).max:
        raise MespError(f"{what} holds integers outside 0 … 2³¹ − 1")
    return found.astype(np.int64)
