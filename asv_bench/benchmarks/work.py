"""What is measured: a training step, a block, or one component, each ready to run again.

Everything of the package is imported when it is needed, because an older commit may lack it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import stages, synthetic

Array = Any

LEARNING_RATE = 1e-4

#: Standard deviation of the first ``lora_b``: with zeros every gradient of ``lora_a`` would be 0.
DEVIATION = 0.02


@dataclass(frozen=True)
class Setting:
    """backend, tokens, rank, dtype: as the parameters of every benchmark; what: a name of ``WORK``;
    method: whose gradients a step takes; source: what ``load_model`` opens, the synthetic model
    when None."""

    backend: str
    tokens: int
    rank: int
    dtype: str
    what: str = "step"
    method: str = "mesp"
    source: str | None = None


def open_backend(name: str) -> Any:
    """Raises BackendUnavailableError where it cannot run."""
    from mesp_core import get_backend

    return get_backend(name)


def open_model(setting: Setting, backend: Any) -> Any:
    """The setting's model, with random values in every ``lora_b``."""
    from mesp_core import LoraConfig, load_model

    source = setting.source
    if source is None:
        source = Path("synthetic").absolute()
        if not source.exists():
            synthetic.write_model(source)
    elif source.startswith("qwen"):
        from mesp_core.compare.presets import preset_folder

        source = preset_folder(source, os.environ.get("MESP_BENCH_CACHE"))
    lora = LoraConfig(rank=setting.rank)
    model = load_model(source, backend=backend, lora=lora, dtype=setting.dtype)
    generator = np.random.default_rng(0)
    for name, value in model.parameters.items():
        if name.endswith(".lora_b"):
            small = DEVIATION * generator.standard_normal(tuple(value.shape))
            model.parameters[name] = backend.from_numpy(small, "float32")
    return model


def token_batch(setting: Setting, model: Any) -> Any:
    """One sequence of random tokens."""
    from mesp_core import Batch

    generator = np.random.default_rng(1)
    ids = generator.integers(0, model.config.vocab, setting.tokens + 1)
    return Batch.from_sequences([ids.tolist()])


class Step:
    """A whole training step: loss, gradients and updates by SGD, block by block."""

    def __init__(self, setting: Setting, backend: Any) -> None:
        from mesp_core import SGD, loss_and_gradients

        self.backend = backend
        self.model = open_model(setting, backend)
        self.batch = token_batch(setting, self.model)
        self._optimizer = SGD(LEARNING_RATE)
        self._loss_and_gradients = loss_and_gradients
        # Commits before there were other methods know no such argument.
        has_methods = "method" in inspect.signature(loss_and_gradients).parameters
        self._options: dict[str, Any] = {"method": setting.method} if has_methods else {}
        if setting.method != "mesp" and not has_methods:
            raise NotImplementedError(f"this commit has no method {setting.method}")

    def run(self) -> None:
        self._loss_and_gradients(self.model, self.batch, on_block=self._update, **self._options)
        # An update may be lazy, or still under way.
        self.backend.stage(list(self.model.parameters.values()))

    def _update(self, layer: int, gradients: dict[str, Array]) -> None:
        self._optimizer.update(self.model, gradients)

    def gradients(self) -> dict[str, np.ndarray]:
        """Of the parameters as they are, in float64."""
        result = self._loss_and_gradients(self.model, self.batch, **self._options)
        to_numpy = self.backend.to_numpy
        return {name: to_numpy(g).astype(np.float64) for name, g in result.gradients.items()}


class Piece:
    """Part of a step, on the synthetic model's first block."""

    def __init__(self, setting: Setting, backend: Any) -> None:
        from mesp_core.decoder import Pass

        self.backend = backend
        self.model = open_model(setting, backend)
        self.pass_ = Pass(self.model, token_batch(setting, self.model), training=True)
        self.block = self.model.block(0)
        self.plan = self.pass_.block_plan(0)
        # A compiling backend pads the batch.
        self.tokens = self.pass_.cos.shape[0]
        self.dtype = setting.dtype
        self.hidden = self.random(synthetic.HIDDEN)

    def random(self, *shape: int) -> np.ndarray:
        """[N, …] on the host."""
        generator = np.random.default_rng(len(shape))
        return generator.standard_normal((self.tokens, *shape)).astype(np.float32)


class Block(Piece):
    """A block forward, then backward from its input alone. A backend may overwrite the arrays it
    is given, so they are made anew."""

    def run(self) -> None:
        x = self.backend.from_numpy(self.hidden, self.dtype)
        out = self.pass_.forward(x, 0)
        dout = self.backend.from_numpy(self.hidden, "float32")
        dx, gradients = self.pass_.backward(dout, x, 0, input_gradient=True)
        self.backend.stage(out, dx, gradients)


class Head(Piece):
    """The final norm and the loss over the vocabulary, with its gradient."""

    def run(self) -> None:
        x = self.backend.from_numpy(self.hidden, self.dtype)
        _, dx = self.pass_.loss(x, normalizer=float(self.tokens), gradient=True)
        self.backend.stage(dx)


class Component(Piece):
    """One component forward and backward, as a stage of its own.

    stage: a function of ``stages``; shapes: of the arrays [N, …] it starts with.
    """

    stage: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((synthetic.HIDDEN,), (synthetic.HIDDEN,))

    def __init__(self, setting: Setting, backend: Any) -> None:
        super().__init__(setting, backend)
        self.inputs = [backend.from_numpy(self.random(*s), "float32") for s in self.shapes]

    def run(self) -> None:
        stage = type(self).stage
        self.backend.stage(self.backend.run(stage, *self.inputs, self.block, self.plan))


class RmsNorm(Component):
    stage = stages.rms_norm


class Rope(Component):
    stage = stages.rope
    shapes = ((synthetic.HEADS, synthetic.HEAD_DIM),) * 2


class Attention(Component):
    stage = stages.attention
    shapes = (
        (synthetic.HEADS, synthetic.HEAD_DIM),
        (synthetic.KV_HEADS, synthetic.HEAD_DIM),
        (synthetic.KV_HEADS, synthetic.HEAD_DIM),
        (synthetic.HEADS, synthetic.HEAD_DIM),
    )


class LoraLinear(Component):
    stage = stages.lora_linear


class GatedMlp(Component):
    stage = stages.gated_mlp


WORK: dict[str, Callable[[Setting, Any], Any]] = {
    "step": Step,
    "block": Block,
    "rms_norm": RmsNorm,
    "rope": Rope,
    "attention": Attention,
    "lora_linear": LoraLinear,
    "gated_mlp": GatedMlp,
    "linear_cross_entropy": Head,
}
