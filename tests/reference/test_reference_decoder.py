"""The block and the whole decoder: finite differences, and transformers' logits."""

from typing import Any

import numpy as np
import pytest

from mesp_reference.block import PROJECTIONS, block_backward, block_forward
from mesp_reference.config import DecoderConfig
from mesp_reference.decoder import (
    Lora,
    block_parameters,
    decoder_forward,
    decoder_logits,
    loss_and_gradients,
)
from mesp_reference.finite_differences import (
    central_gradient,
    directional_derivative,
    relative_error,
)
from mesp_reference.ragged import RaggedBatch, segment_and_position
from mesp_reference.random_decoder import random_frozen, random_lora

SHAPE: dict[str, Any] = {
    "hidden": 18,
    "layers": 2,
    "ffn": 13,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 4,
    "vocab": 17,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
EVERYTHING: dict[str, Any] = {
    "eps": 1e-5,
    "activation": "gelu_tanh",
    "norm_plus_one": True,
    "rope_scaling": YARN,
    "partial_rotary": 0.5,
    "interleaved": True,
    "window": 2,
    "softcap": 1.5,
    "qk_norm": True,
}
#: The family's configuration, and whether q, k and v have biases.
FAMILIES = {
    "llama": (DecoderConfig(**SHAPE), False),
    "qwen2": (DecoderConfig(**SHAPE, tied=True), True),
    "qwen3": (DecoderConfig(**SHAPE, qk_norm=True), False),
    "everything": (DecoderConfig(**SHAPE, **EVERYTHING), True),
}
R = 3


def ragged_batch(generator):
    starts = np.array([0, 3, 4, 7])
    weights = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5])
    tokens, targets = generator.integers(0, SHAPE["vocab"], (2, 7))
    return RaggedBatch(tokens, targets, weights, starts)


def example(family, seed=24):
    config, biases = FAMILIES[family]
    generator = np.random.default_rng(seed)
    frozen = random_frozen(config, generator, biases=biases)
    return ragged_batch(generator), frozen, random_lora(config, R, generator), config


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_of_the_decoder(family, dropout):
    batch, frozen, parameters, config = example(family)
    lora = Lora(scale=1.4, dropout=dropout, seed=2**40 + 7, step=5)
    _, gradients = loss_and_gradients(batch, frozen, parameters, config, lora)
    assert gradients.keys() == parameters.keys()
    generator = np.random.default_rng(25)
    for name, value in parameters.items():
        # Along the gradient itself, whose derivative has no cancellation, plus a random part.
        noise = generator.standard_normal(value.shape)
        gradient = gradients[name]
        direction = gradient / np.linalg.norm(gradient) + 0.3 * noise / np.linalg.norm(noise)

        def loss(value, name=name):
            changed = {**parameters, name: value}
            return decoder_forward(batch, frozen, changed, config, lora)[0]

        numeric = directional_derivative(loss, value, direction, step=1e-4)
        assert float(np.sum(gradient * direction)) == pytest.approx(numeric, rel=1e-8), name


@pytest.mark.parametrize("family", FAMILIES)
def test_block_input_gradient(family):
    batch, frozen, parameters, config = example(family)
    where = segment_and_position(batch.starts)
    block = block_parameters(1, frozen, parameters, config, Lora(1.4, 0.2), *where)
    generator = np.random.default_rng(26)
    x, dy = generator.standard_normal((2, 7, config.hidden))
    _, saved = block_forward(x, block, config, *where)
    dx, gradients = block_backward(dy, saved)
    numeric = central_gradient(
        lambda x: float(np.sum(dy * block_forward(x, block, config, *where)[0])), x
    )
    assert relative_error(dx, numeric) < 1e-8
    assert list(gradients) == [
        f"{name}.{ab}" for name in PROJECTIONS for ab in ("lora_a", "lora_b")
    ]


def test_only_adapted_projections_have_gradients():
    batch, frozen, _, config = example("llama")
    targets = ("self_attn.v_proj", "mlp.down_proj")
    parameters = random_lora(config, R, np.random.default_rng(27), targets)
    _, gradients = loss_and_gradients(batch, frozen, parameters, config, Lora(1.0))
    assert len(parameters) == 8
    assert gradients.keys() == parameters.keys()


def test_ragged_batch_is_the_sum_of_its_sequences():
    batch, frozen, parameters, config = example("qwen3")
    lora = Lora(1.4)
    loss, gradients = loss_and_gradients(batch, frozen, parameters, config, lora, 2.5)
    losses, sums = 0.0, {name: np.zeros_like(value) for name, value in parameters.items()}
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        own = slice(start, stop)
        alone = RaggedBatch(
            batch.tokens[own], batch.targets[own], batch.weights[own], np.array([0, stop - start])
        )
        part, part_gradients = loss_and_gradients(alone, frozen, parameters, config, lora, 2.5)
        losses += part
        for name in sums:
            sums[name] += part_gradients[name]
    assert loss == pytest.approx(losses, rel=1e-13)
    assert max(relative_error(gradients[name], sums[name]) for name in sums) < 1e-12


def test_masked_targets_do_not_matter():
    batch, frozen, parameters, config = example("llama")
    other = np.where(batch.weights == 0.0, (batch.targets + 5) % config.vocab, batch.targets)
    changed = RaggedBatch(batch.tokens, other, batch.weights, batch.starts)
    first = loss_and_gradients(batch, frozen, parameters, config, Lora(1.0))
    second = loss_and_gradients(changed, frozen, parameters, config, Lora(1.0))
    assert first[0] == second[0]
    assert all(np.array_equal(first[1][name], second[1][name]) for name in parameters)


def test_dropout_changes_the_loss_and_the_step_changes_the_masks():
    batch, frozen, parameters, config = example("llama")
    losses = {
        decoder_forward(batch, frozen, parameters, config, lora)[0]
        for lora in (Lora(1.0), Lora(1.0, 0.5), Lora(1.0, 0.5, step=1), Lora(1.0, 0.5, seed=1))
    }
    assert len(losses) == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family):
    import torch
    import transformers

    batch, frozen, _, config = example(family)
    name = family.capitalize()
    shape = {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
    }
    their_config = getattr(transformers, f"{name}Config")(**shape)
    their_config.head_dim = config.head_dim  # not every family takes it as an argument
    model = getattr(transformers, f"{name}ForCausalLM")(their_config).double().eval()
    missing = model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in frozen.items()}, strict=False
    )
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    ours = decoder_logits(batch, frozen, {}, config, Lora(1.0))
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.tokens[None, start:stop])).logits[0]
        # Norms and rotations are computed in float32 there, whatever the model's dtype.
        assert relative_error(ours[start:stop], logits.numpy()) < 1e-5
