"""Text to token ids and back, from the same source as the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesp_core.errors import MespError
from mesp_core.files.mapped_file import check_regular, read_json, read_text

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with what a model needs to know beside it.

    special_tokens: the text of bos_token, eos_token, unk_token, pad_token, where there is one.
    """

    def __init__(
        self,
        backend_tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        self.backend_tokenizer = backend_tokenizer
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, or None."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. Raises MespError for one that is not Unicode, or that the tokenizer
        has no tokens for."""
        if not is_unicode(text):
            raise MespError("the text is not valid Unicode: it holds half of a surrogate pair")
        try:
            return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises no narrower one
            raise MespError(f"the tokenizer cannot encode the text: {error}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers and mlx-lm read them."""
        folder = Path(folder)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False)
        try:
            (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
            content = self.backend_tokenizer.to_str(pretty=True)
            (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        except OSError as error:
            raise MespError(f"cannot write the tokenizer to {folder}: {error.strerror}") from None


def tokenizer_from_folder(folder: Path, model_config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    model_config: config.json, whose ``eos_token_id`` serves where tokenizer_config.json names no
    end-of-sequence token. Raises MespError for a missing or damaged tokenizer.json.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.exists():
        raise MespError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    check_regular(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise MespError(f"{path} is not a valid tokenizer: {error}") from None
    # What a file asks for here would silently shorten or lengthen every text.
    backend.no_truncation()
    backend.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings, name))}
    for name, text in special.items():
        if not is_unicode(text):
            raise MespError(f"{settings_path}: {name} is not valid Unicode")
    if "eos_token" not in special:
        text = _token_at(backend, model_config.get("eos_token_id"))
        special |= {} if text is None else {"eos_token": text}
    return Tokenizer(
        backend, special_tokens=special, chat_template=_chat_template(folder, settings)
    )


def is_unicode(text: str) -> bool:
    """Whether the text holds no lone surrogate, which JSON escapes and bytes that are not UTF-8 in
    an argument can bring, and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token_at(backend: tokenizers.Tokenizer, index: Any) -> str | None:
    if isinstance(index, list) and index:
        index = index[0]
    if not isinstance(index, int) or not 0 <= index < 2**32:
        return None
    return backend.id_to_token(index)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = (t for t in template if isinstance(t, Mapping) and t.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) and is_unicode(template) else None
