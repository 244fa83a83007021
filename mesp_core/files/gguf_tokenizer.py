"""Byte-level BPE tokenizers from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4

#: One pattern serves Qwen 2 and Llama 3; they differ in how many digits make a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Style:
    """How one kind of byte-level BPE splits text into words, and its other choices.

    pattern: None for GPT-2's own. single_digits: each digit is a word of its own first.
    """

    pattern: str | None = None
    single_digits: bool = False
    compose: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_STYLES: Mapping[str, _Style] = {
    "gpt-2": _Style(),
    "default": _Style(),
    "smollm": _Style(single_digits=True),
    "qwen2": _Style(pattern=_WORDS.format(digits=""), compose=True),
    "llama-bpe": _Style(pattern=_WORDS.format(digits="{1,3}"), ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file, as the ``tokenizers`` library runs it.

    Raises UnsupportedError for a kind that we lack, MespError for damaged metadata.
    """
    import tokenizers

    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or not isinstance(pre, str) or pre not in _STYLES:
        raise UnsupportedError(
            f"{path}: tokenizer {model!r} with word splitting {pre!r} is not supported (known: gpt2"
            f" with {', '.join(_STYLES)}); use the Hugging Face folder of the model"
        )
    style = _STYLES[pre]
    tokens = _strings(metadata, "tokens", path)
    special = _special_tokens(metadata, tokens)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", style.add_bos)
    bos = special.get("bos_token") if add_bos else None
    description = {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, path),
        "normalizer": {"type": "NFC"} if style.compose else None,
        "pre_tokenizer": _pre_tokenizer(style),
        "post_processor": _post_processor(bos, tokens),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": style.ignore_merges,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _strings(metadata, "merges", path),
        },
    }
    if len(description["model"]["vocab"]) != len(tokens):
        raise MespError(f"{path} is damaged: a token occurs twice")
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no narrower one
        raise MespError(f"{path} has a damaged tokenizer: {error}") from None
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise MespError(f"{path} has no list of strings tokenizer.ggml.{key}")
    return values


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in keys.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            found[name] = tokens[index]
    return found


def _added_tokens(
    metadata: Mapping[str, Any], tokens: list[str], path: Path
) -> list[dict[str, Any]]:
    """Tokens that are matched in the text before it is split into words."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise MespError(f"{path} is damaged: token types do not match the tokens")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], "special": kind == _CONTROL, **plain}
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _pre_tokenizer(style: _Style) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if style.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if style.pattern is not None:
        split = {"pattern": {"Regex": style.pattern}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **split})
    steps.append(_byte_level(use_regex=style.pattern is None))
    return {"type": "Sequence", "pretokenizers": steps}


def _post_processor(bos: str | None, tokens: list[str]) -> dict[str, Any] | None:
    """The beginning-of-sequence token, for those who ask for special tokens."""
    if bos is None:
        return None
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    second = {"SpecialToken": {"id": bos, "type_id": 1}}
    ids = {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, second, b],
        "special_tokens": {bos: ids},
    }
