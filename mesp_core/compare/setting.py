"""What one measurement is of, and its row in a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mesp_core.errors import MespError
from mesp_core.methods import HEADS, METHODS, default_head

Row = dict[str, Any]

#: What is found by measuring; None until it is, and where it cannot be.
MEASURED = (
    "peak_bytes",
    "footprint_bytes",
    "compiled_bytes",
    "step_seconds",
    "step_ratio",
    "loss",
    "gradient_cosine",
    "gradient_sign_agreement",
    "gradient_relative_error",
    "gradient_reference",
    "stored_bytes",
    "trained",
    "timeline",
    "error",
    "time_error",
)


@dataclass(frozen=True)
class Setting:
    """model: what ``load_model`` opens; label: what people call it; head: the method's own when
    None is given; dtype, residency: as in ``load_model``; tokens: N of the one sequence; apply:
    ``block``, each block is updated as soon as its gradients are there; tiled: False cuts attention
    and MLP into no tiles; seed: of parameters, of random tokens and of MeZO's directions."""

    model: str
    label: str
    backend: str
    method: str = "mesp"
    head: str | None = None
    dtype: str = "auto"
    lora_dtype: str = "float32"
    tokens: int = 256
    rank: int = 8
    residency: str = "streamed"
    apply: str = "block"
    tiled: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.head is None:
            object.__setattr__(self, "head", default_head(self.method))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Setting:
        return cls(**value)

    @property
    def title(self) -> str:
        """The method, with what is not its default."""
        head = "" if self.head == default_head(self.method) else f":{self.head}"
        return f"{self.method}{head}{'' if self.tiled else ' untiled'}"

    def row(self) -> Row:
        """The report's row, nothing measured yet."""
        row = self.as_json() | {"model": self.label, "source": self.model}
        del row["label"]
        return row | dict.fromkeys(MEASURED)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Setting:
        """What a row is of."""
        own = {field.name: row[field.name] for field in fields(cls) if field.name != "label"}
        return cls(**own | {"model": row["source"], "label": row["model"]})


def parse_method(text: str) -> tuple[str, str | None]:
    """(method, head) of ``mebp`` or ``mebp:tiled``. Raises MespError for another name."""
    method, colon, head = text.strip().partition(":")
    if method not in METHODS:
        raise MespError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if colon and head not in HEADS:
        raise MespError(f"unknown head {head!r} of {method}; choose from {', '.join(HEADS)}")
    return method, head or None
