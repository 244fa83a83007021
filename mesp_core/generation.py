"""Greedy text generation, plain and small: for looking at what a model has learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mesp_core.decoder import last_logits
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.files.tokenizer import Tokenizer
from mesp_core.model import Model


def greedy(
    model: Model, tokens: Sequence[int], max_tokens: int, eos_id: int | None = None
) -> Iterator[int]:
    """The most likely next ids, one by one, until ``eos_id`` or ``max_tokens``.

    The whole sequence is run anew for each id (no cache), so time grows with the square of the
    length. Raises MespError for an empty prompt, NonFiniteError for logits that are not numbers.
    """
    if not tokens:
        raise MespError("the prompt has no tokens; give at least one word")
    grown = list(tokens)
    for _ in range(max_tokens):
        logits = last_logits(model, grown)
        if not np.isfinite(logits).all():
            model.check_weights()
            raise NonFiniteError("the model's logits are NaN or infinite")
        chosen = int(np.argmax(logits))
        if chosen == eos_id:
            return
        yield chosen
        grown.append(chosen)


def continuation(model: Model, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """The text that greedy decoding adds to ``prompt``."""
    if max_tokens < 1:
        raise MespError(f"the number of tokens to generate must be at least 1, not {max_tokens}")
    ids = tokenizer.encode(prompt)
    whole = tokenizer.decode([*ids, *greedy(model, ids, max_tokens, tokenizer.eos_id)])
    # Decoded alone, the new ids would lose the space that some tokenizers put before a word.
    return whole.removeprefix(tokenizer.decode(ids))
