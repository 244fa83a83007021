"""The whole decoder: embedding, blocks, final norm and head, forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_core.batch import Batch
from mesp_core.block import BlockPlan, block_backward, block_forward
from mesp_core.config import ModelConfig
from mesp_core.formulas.attention import AttentionPlan
from mesp_core.formulas.dropout import Dropout, dropout_key
from mesp_core.formulas.frozen_matrix import rows_per_tile
from mesp_core.formulas.gated_mlp import MlpPlan
from mesp_core.formulas.lora_linear import LoraGradients
from mesp_core.formulas.precision import cast
from mesp_core.formulas.rope import rope_frequencies, rope_tables
from mesp_core.head import HeadPlan, head_logits, head_loss
from mesp_core.model import Model

Array = Any


@dataclass(frozen=True)
class Stages:
    """What a pass runs, each a stage of ``Backend.run``: a block forward and backward, and the
    head. masked: whether the block needs ``BlockPlan.mask``."""

    forward: Callable[..., Any] = block_forward
    backward: Callable[..., Any] = block_backward
    head: Callable[..., Any] = head_loss
    masked: bool = False


#: The hand-written passes.
MESP = Stages()


class Pass:
    """One batch on its way through a model: what every block shares.

    training: with dropout masks (when the model's LoRA has dropout), keyed by ``model.step``.
    """

    def __init__(
        self, model: Model, batch: Batch, *, training: bool, stages: Stages = MESP
    ) -> None:
        batch.check_vocabulary(model.config.vocab)
        self.model = model
        self.stages = stages
        self.sequences = len(batch.numbers)
        self.backend = model.backend
        self.tokens = len(batch.tokens)
        self.batch = batch = batch.padded(self.backend.bucket(self.tokens))
        self.segment = self.backend.from_numpy(batch.segment, "int32")
        tables = _tables(model.config, batch)
        self.cos, self.sin = (self.backend.from_numpy(a, model.wide_dtype) for a in tables)
        windows = set(model.config.windows)
        self._attention = {window: self._plan(window) for window in windows}
        self._masks = {window: self.mask(window) for window in windows} if stages.masked else {}
        lora = model.lora
        self._dropout = lora.dropout if training and lora is not None else 0.0
        if self._dropout:
            words = self.backend.words
            numbers = batch.numbers[batch.segment]
            self._sequence, self._position = (
                cast(self.backend.from_numpy(counter, "int32"), words.dtype, self.backend.xp)
                for counter in (numbers, batch.position)
            )

    def _plan(self, window: int | None) -> AttentionPlan:
        tiles, config = self.backend.tiles, self.model.config
        return AttentionPlan(
            segment=self.segment,
            first_key_tile=self.backend.first_key_tiles(self.batch.segment, window),
            scale=config.head_dim**-0.5,
            window=window,
            softcap=config.softcap,
            query_tile=tiles.query,
            key_tile=tiles.key,
        )

    def mask(self, window: int | None) -> Array | None:
        """[N, N], True where a query (row) sees a key; None where that is every key at or before
        it: one sequence, shorter than the window. (What is padded sees the sequence, which
        changes nothing, as nothing sees it.)"""
        if self.sequences == 1 and (window is None or window >= self.tokens):
            return None
        segment, place = self.batch.segment, np.arange(len(self.batch.tokens))
        back = place[:, None] - place[None, :]
        seen = (segment[:, None] == segment[None, :]) & (back >= 0)
        return self.backend.from_numpy(seen & (back < (window or len(place))), "bool")

    def block_plan(self, layer: int, *, masked: bool = False) -> BlockPlan:
        """masked: for a block that forms the scores and needs ``mask``."""
        config = self.model.config
        window = config.windows[layer]
        tiles = self.backend.tiles
        dropouts = [self._dropout_of(layer, projection) for projection in range(7)]
        mlp = MlpPlan(
            activation=config.activation,
            # Three dense tiles, of gate, up and down, are alive together.
            feature_tile=tiles.features or rows_per_tile(3 * config.hidden, tiles.weights),
            token_tile=tiles.tokens,
            dropouts=(dropouts[4], dropouts[5], dropouts[6]),
        )
        return BlockPlan(
            heads=config.heads,
            kv_heads=config.kv_heads,
            eps=config.eps,
            norm_plus_one=config.norm_plus_one,
            interleaved=config.rope.interleaved,
            cos=self.cos,
            sin=self.sin,
            attention=self._attention[window],
            mlp=mlp,
            dropouts=(dropouts[0], dropouts[1], dropouts[2], dropouts[3]),
            mask=self._masks[window] if masked else None,
        )

    def _dropout_of(self, layer: int, projection: int) -> Dropout | None:
        if not self._dropout:
            return None
        key = dropout_key(self.model.seed, self.model.step, layer, projection)
        return Dropout(self._dropout, key, self._sequence, self._position, self.backend.words)

    def embed(self) -> Array:
        """The first block's input [N, D]."""
        tokens = self.backend.from_numpy(self.batch.tokens, "int32")
        dtype = self.backend.dtype(self.model.dtype)
        x, _ = self.backend.ops.embedding.forward(tokens, self.model.embedding, dtype=dtype)
        self.backend.stage(x)
        return x

    def forward(self, x: Array, layer: int, parameters: Mapping[str, Array] | None = None) -> Array:
        """Block ``layer`` on its input, perhaps with other parameters than the model's; its
        weights are released afterwards."""
        block = self.model.block(layer, parameters)
        plan = self.block_plan(layer, masked=self.stages.masked)
        out = self.backend.run(self.stages.forward, x, block, plan)
        self.model.release(layer)
        return out

    def backward(
        self, dout: Array, x: Array, layer: int, **static: bool
    ) -> tuple[Array | None, dict[str, LoraGradients | None]]:
        """(dx, gradients) of block ``layer`` from its input; neither array may be used again.

        static: ``input_gradient`` and what else the stage takes.
        """
        block = self.model.block(layer)
        plan = self.block_plan(layer, masked=self.stages.masked)
        return self.backend.run(self.stages.backward, dout, x, block, plan, **static)

    def output(self) -> Array:
        """The last block's output [N, D], nothing kept on the way."""
        x = self.embed()
        for layer in range(self.model.config.layers):
            x = self.forward(x, layer)
        return x

    def loss(self, x: Array, *, normalizer: float, gradient: bool) -> tuple[float, Array | None]:
        """The weighted cross-entropy of the last block's output, and its gradient dx [N, D]."""
        targets, weights = self.targets()
        loss, dx = self.backend.run(
            self.stages.head,
            x,
            self.model.head,
            targets,
            weights,
            normalizer,
            plan=self.head_plan(),
            gradient=gradient,
        )
        self.model.release(None)
        return float(loss), dx

    def targets(self) -> tuple[Array, Array]:
        """Targets and weights [N] on the backend."""
        weights = self.backend.from_numpy(self.batch.weights, self.model.wide_dtype)
        return self.backend.from_numpy(self.batch.targets, "int32"), weights

    def logits(self, x: Array) -> Array:
        """The logits [rows, V] of rows of the last block's output."""
        logits = self.backend.run(head_logits, x, self.model.head, plan=self.head_plan())
        self.model.release(None)
        return logits

    def head_plan(self) -> HeadPlan:
        config, tiles = self.model.config, self.backend.tiles
        return HeadPlan(
            eps=config.eps,
            norm_plus_one=config.norm_plus_one,
            vocabulary_tile=rows_per_tile(config.hidden, tiles.weights),
            token_tile=tiles.tokens,
        )


def _tables(config: ModelConfig, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin in float64 on the host, so that every backend starts from the same tables."""
    rope = config.rope
    inv_freq, factor = rope_frequencies(rope.dim, rope.theta, rope.scaling, config.max_positions)
    position = batch.position.astype(np.float64)
    return rope_tables(position, np.asarray(inv_freq), factor, xp=np)


def logits(model: Model, batch: Batch) -> Array:
    """The logits [N, V] of every token, for looking at: training never makes them."""
    run = Pass(model, batch, training=False)
    return run.logits(run.output()[: run.tokens, :])


def last_logits(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """The logits [V] of the token that would follow ``tokens``, as NumPy."""
    run = Pass(model, Batch.from_sequences([[*tokens, 0]]), training=False)
    last = run.logits(run.output()[run.tokens - 1 : run.tokens, :])
    return model.backend.to_numpy(last)[0]


def evaluate(model: Model, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean cross-entropy over all targets of ``batches`` without dropout, and their number.

    A batch's share is its sum of weights. Returns (nan, 0) when there is no target at all.
    """
    total, weight, count = 0.0, 0.0, 0
    for batch in batches:
        run = Pass(model, batch, training=False)
        loss, _ = run.loss(run.output(), normalizer=1.0, gradient=False)
        total += loss
        weight += float(batch.weights.sum())
        count += batch.target_count
    return (total / weight if weight else float("nan")), count
