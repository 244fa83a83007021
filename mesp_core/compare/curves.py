"""Loss curves: the same training run by several methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from mesp_core.backend import get_backend
from mesp_core.callbacks import Info, TrainingCallback
from mesp_core.data import Batches, load_corpus
from mesp_core.lora import LoraConfig
from mesp_core.methods import reason_against
from mesp_core.model import load_model
from mesp_core.optimizers import SGD, AdamW, Optimizer
from mesp_core.training import Trainer, TrainingOptions

#: step and loss of every iteration, the run's settings, error: why it did not end, or None, and
#: failed: whether that was no fault of the backend's.
Curve = dict[str, Any]

#: Steps between two calls of ``keep``.
_KEPT = 20

OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {"sgd": SGD, "adamw": AdamW}


@dataclass(frozen=True)
class Run:
    """One training run on Python's documentation, one sequence of ``tokens`` tokens a step."""

    model: str
    backend: str
    method: str
    optimizer: str
    learning_rate: float
    iterations: int
    tokens: int
    rank: int = 8
    dtype: str = "float32"
    seed: int = 0

    def curve(self) -> Curve:
        """The curve before the first step."""
        return {"step": [], "loss": [], "error": None, "failed": False, "run": asdict(self)}

    def finished(self, curve: Curve | None) -> bool:
        """Whether a curve is that of this run, to its end."""
        if not self.began(curve) or curve.get("failed"):
            return False
        return curve["error"] is not None or len(curve["step"]) == self.iterations

    def began(self, curve: Curve | None) -> TypeGuard[Curve]:
        """Whether a curve is that of this run."""
        return curve is not None and curve["run"] == asdict(self)


def train(
    run: Run,
    curve: Curve,
    stop: Callable[[], bool] = lambda: False,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Fills ``curve`` step by step, and calls ``keep`` every few. A backend that cannot run the
    method is its ``error``.

    Raises MespError where the model or the backend cannot be opened, or the loss diverges.
    """
    backend = get_backend(run.backend)
    curve["error"] = reason_against(backend, run.method)
    if curve["error"] is not None:
        return
    lora = LoraConfig(rank=run.rank)
    model = load_model(run.model, backend=backend, lora=lora, dtype=run.dtype, seed=run.seed)
    corpus = load_corpus(None, model.checkpoint.tokenizer(), run.tokens)
    trainer = Trainer(
        model,
        OPTIMIZERS[run.optimizer](run.learning_rate),
        TrainingOptions(iterations=run.iterations, method=run.method, report_every=0),
        callback=_Recorder(curve, keep),
        stop=stop,
    )
    trainer.run(Batches(corpus.train, 1, run.seed).stream())


class _Recorder(TrainingCallback):
    """Writes every iteration's loss into a curve."""

    def __init__(self, curve: Curve, keep: Callable[[], None]) -> None:
        self._curve = curve
        self._keep = keep

    def on_iteration(self, info: Info) -> None:
        self._curve["step"].append(info["iteration"])
        self._curve["loss"].append(info["loss"])
        if len(self._curve["loss"]) % _KEPT == 0:
            self._keep()
