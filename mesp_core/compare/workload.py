"""One training step as every measurement runs it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesp_core.backend import Backend, get_backend
from mesp_core.batch import Batch
from mesp_core.compare.setting import Setting
from mesp_core.compare.untiled import make_untiled
from mesp_core.data import load_corpus
from mesp_core.errors import MespError
from mesp_core.files.checkpoint import Checkpoint, expected_shapes
from mesp_core.lora import LoraConfig
from mesp_core.methods import Result, loss_and_gradients
from mesp_core.methods.request import OnBlock
from mesp_core.model import Model, load_model
from mesp_core.optimizers import SGD

#: Of plain SGD, as in the paper.
LEARNING_RATE = 1e-4

#: Standard deviation of the first ``lora_b``. Were it 0, as training starts, every ∂loss/∂lora_a
#: would be 0, and no comparison of gradients would see an error in one.
_DEVIATION = 0.02


def open_backend(setting: Setting) -> Backend:
    """A backend of this setting's own: what is changed in it changes no other."""
    backend = get_backend(setting.backend)
    if not setting.tiled:
        make_untiled(backend, setting.tokens)
    return backend


def open_model(setting: Setting, backend: Backend) -> Model:
    """The model of a setting on a backend, with small random values in every ``lora_b``."""
    model = load_model(
        setting.model,
        backend=backend,
        lora=LoraConfig(rank=setting.rank, dtype=setting.lora_dtype),
        dtype=setting.dtype,
        residency=setting.residency,
        seed=setting.seed,
    )
    generator = np.random.default_rng(setting.seed % 2**64)
    for name, value in model.parameters.items():
        if name.endswith(".lora_b"):
            small = _DEVIATION * generator.standard_normal(tuple(value.shape))
            model.parameters[name] = backend.from_numpy(small, setting.lora_dtype)
    return model


class Workload:
    """Training steps of one setting on one batch, on a model that other settings may share."""

    def __init__(self, setting: Setting, model: Model, ids: Sequence[int]) -> None:
        self.setting = setting
        self.model = model
        self._batch = Batch.from_sequences([ids])
        self._optimizer = SGD(LEARNING_RATE)

    def step(
        self,
        *,
        on_block: OnBlock | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> Result:
        """Gradients and updates. on_block: sees each block's gradients before they are applied."""

        def update(layer: int, gradients: dict[str, Any]) -> None:
            if on_block is not None:
                on_block(layer, gradients)
            self._optimizer.update(self.model, gradients)

        return loss_and_gradients(
            self.model,
            self._batch,
            method=self.setting.method,
            head=self.setting.head,
            on_block=update,
            on_phase=on_phase,
        )


def token_ids(checkpoint: Checkpoint, tokens: int, seed: int) -> list[int]:
    """tokens + 1 ids: the beginning of Python's documentation topics where the model has a
    tokenizer, random ones otherwise."""
    try:
        tokenizer = checkpoint.tokenizer()
    except MespError:
        generator = np.random.default_rng(seed % 2**64)
        return generator.integers(0, checkpoint.config.vocab, tokens + 1).tolist()
    rows = load_corpus(None, tokenizer, 1 << 30).train
    ids = itertools.chain.from_iterable(itertools.repeat(rows))
    return list(itertools.islice(itertools.chain.from_iterable(ids), tokens + 1))


def stored_bytes(checkpoint: Checkpoint) -> int:
    """The size of the frozen weights as the checkpoint stores them; vectors as float32."""
    total = 0
    for name, shape in expected_shapes(checkpoint.config).items():
        total += checkpoint.matrix(name).nbytes if len(shape) == 2 else 4 * math.prod(shape)
    return total
