"""A model: frozen weights read from a checkpoint, and the LoRA parameters that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.backend import Backend, get_backend
from mesp_core.block import Block
from mesp_core.config import ModelConfig
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.files.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.lora_linear import Projection
from mesp_core.head import Head
from mesp_core.lora import PROJECTIONS, LoraConfig, initial_factors, parameter_name
from mesp_core.stored_matrix import StoredMatrix

Array = Any

RESIDENCIES = ("streamed", "resident")
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Model:
    """parameters: LoRA tensors by name, settable; step: counter of dropout's masks.

    Frozen matrices are made from the checkpoint when a block is asked for; norm weights and
    biases, a few kilobytes a block, are held.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        lora: LoraConfig | None,
        dtype: str,
        residency: str,
        seed: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.backend = backend
        self.lora = lora
        self.dtype = dtype
        self.residency = residency
        self.seed = seed
        self.step = 0
        self.parameters: dict[str, Array] = {}
        self._vectors: dict[str, Array] = {}
        self._stored: dict[str, StoredMatrix] = {}
        self._resident: dict[str, FrozenMatrix] = {}
        self._open()

    def _open(self) -> None:
        for name, shape in expected_shapes(self.config).items():
            if len(shape) == 2:
                self._stored[name] = self.checkpoint.matrix(name)
                if self.residency == "resident":
                    self._resident[name] = self._frozen(name)
                continue
            vector = self.checkpoint.vector(name)
            if not np.isfinite(vector).all():
                raise NonFiniteError(f"weight {name} of {self.checkpoint.path} is NaN or infinite")
            self._vectors[name] = self.backend.from_numpy(vector, self.wide_dtype)
        if self.lora is not None:
            self._initialise(self.lora)

    @property
    def wide_dtype(self) -> str:
        """The accumulation dtype by name: of norms, tables and everything inside a block."""
        return "float64" if self.dtype == "float64" else "float32"

    def _initialise(self, lora: LoraConfig) -> None:
        for layer in lora.adapted_layers(self.config.layers):
            for projection in lora.targets:
                shape = self._stored[f"model.layers.{layer}.{projection}.weight"].shape
                factors = initial_factors(self.seed, layer, projection, lora.rank, shape)
                for factor, value in zip(("lora_a", "lora_b"), factors, strict=True):
                    name = parameter_name(layer, projection, factor)
                    self.parameters[name] = self.backend.from_numpy(value, lora.dtype)

    def _frozen(self, name: str) -> FrozenMatrix:
        return self.backend.frozen(self._stored[name], self.dtype, self.residency)

    def matrix(self, name: str) -> FrozenMatrix:
        """The frozen matrix called ``name`` in the checkpoint."""
        return self._resident.get(name) or self._frozen(name)

    @property
    def embedding(self) -> FrozenMatrix:
        return self.matrix("model.embed_tokens.weight")

    @property
    def head(self) -> Head:
        weight = self.embedding if self.config.tied else self.matrix("lm_head.weight")
        return Head(self._vectors["model.norm.weight"], weight)

    def block(self, layer: int, parameters: Mapping[str, Array] | None = None) -> Block:
        """Block ``layer`` with its parameters as they are now, or with those given instead."""
        prefix = f"model.layers.{layer}."
        if parameters is None:
            parameters = self.parameters
        projections = {
            name.rpartition(".")[2].removesuffix("_proj"): self._projection(layer, name, parameters)
            for name in PROJECTIONS
        }
        return Block(
            input_norm=self._vectors[prefix + "input_layernorm.weight"],
            post_norm=self._vectors[prefix + "post_attention_layernorm.weight"],
            q_norm=self._vectors.get(prefix + "self_attn.q_norm.weight"),
            k_norm=self._vectors.get(prefix + "self_attn.k_norm.weight"),
            **projections,
        )

    def _projection(self, layer: int, name: str, parameters: Mapping[str, Array]) -> Projection:
        prefix = f"model.layers.{layer}.{name}"
        return Projection(
            weight=self.matrix(prefix + ".weight"),
            bias=self._vectors.get(prefix + ".bias"),
            lora_a=parameters.get(prefix + ".lora_a"),
            lora_b=parameters.get(prefix + ".lora_b"),
            scale=self.lora.scale if self.lora else 1.0,
        )

    def release(self, layer: int | None) -> None:
        """Gives back the mapped pages of one block's matrices, or of embedding and head."""
        if self.residency == "streamed":
            prefix = "" if layer is None else f"model.layers.{layer}."
            for name, stored in self._stored.items():
                if name.startswith(prefix) and (layer is not None or ".layers." not in name):
                    stored.release()
        self.backend.release()

    def lowest_adapted_layer(self) -> int:
        """The first block with a parameter; the number of blocks when nothing is trained."""
        layers = (int(name.split(".")[2]) for name in self.parameters)
        return min(layers, default=self.config.layers)

    def parameter_names(self, layer: int) -> list[str]:
        """The names of one block's parameters, in the order of ``model.parameters``."""
        prefix = f"model.layers.{layer}."
        return [name for name in self.parameters if name.startswith(prefix)]

    def check_weights(self) -> None:
        """Raises NonFiniteError naming the first frozen matrix that holds NaN or infinity.

        Reads every weight, so it is called only when a loss has turned out not finite.
        """
        for name, stored in self._stored.items():
            size = max(1, (1 << 20) // stored.shape[1])
            for lo in range(0, stored.shape[0], size):
                rows = stored.rows(lo, min(lo + size, stored.shape[0]))
                if not np.isfinite(rows.decode()).all():
                    raise NonFiniteError(
                        f"weight {name} of {self.checkpoint.path} holds NaN or infinite values"
                    )
            stored.release()

    def close(self) -> None:
        """Closes the checkpoint's files; the model cannot be used afterwards."""
        self._stored.clear()
        self._resident.clear()
        self.checkpoint.close()


def load_model(
    source: str | Path,
    *,
    backend: str | Backend = "auto",
    lora: LoraConfig | None = None,
    adapter: str | Path | None = None,
    dtype: str = "auto",
    residency: str = "streamed",
    seed: int = 0,
) -> Model:
    """Opens a checkpoint for training or inference.

    source: a Hugging Face folder, a ``.gguf`` file, or ``smollm2-135m``. lora: what to train;
    None for inference only, or where ``adapter`` says it. adapter: a saved adapter folder to
    start from; its own rank, scale and targets apply. dtype: of the activations (``auto``: the
    checkpoint's on a GPU, float32 on a CPU); frozen weights keep the values of the file.
    residency: ``streamed`` reads weights from the mapped file whenever they are needed,
    ``resident`` holds them. seed: of the first values of ``lora_a`` and of dropout.
    Raises MespError naming what is wrong with the source, the adapter or an option.
    """
    if residency not in RESIDENCIES:
        raise MespError(f"residency must be one of {', '.join(RESIDENCIES)}, not {residency!r}")
    if dtype != "auto" and dtype not in DTYPES:
        raise MespError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    chosen = get_backend(backend)
    saved = None
    if adapter is not None:
        from mesp_core.adapters import read_adapter

        saved = read_adapter(adapter)
        lora = saved.config
    checkpoint = open_checkpoint(source)
    stored = checkpoint.matrix("model.embed_tokens.weight").dtype
    dtype = chosen.default_dtype(stored) if dtype == "auto" else dtype
    chosen.dtype(dtype)
    model = Model(checkpoint, chosen, lora, dtype, residency, seed)
    if adapter is not None:
        from mesp_core.adapters import load_adapter

        load_adapter(model, adapter)
    return model
