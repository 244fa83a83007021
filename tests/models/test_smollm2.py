"""The packaged model on real text: losses as transformers gives them, ids as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

import mesp_core as mesp
from mesp_core.model import Model

#: Topic, ids taken, targets, and the mean next-token loss by transformers 5.24 in float32, its
#: own ids, no special tokens added.
LOSSES = [("assert", 257, 256, 2.8533), ("with", 257, 256, 3.0087), ("lambda", None, 111, 3.3241)]


@pytest.fixture(scope="module", params=["mlx:cpu", "numpy"])
def model(request: pytest.FixtureRequest) -> Model:
    return mesp.load_model("smollm2-135m", backend=request.param)


@pytest.fixture(scope="module")
def transformers_ids() -> dict[str, list[int]]:
    path = Path(mesp.load_model("smollm2-135m", backend="numpy").checkpoint.path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return {
        topic: tokenizer.encode(topics[topic], add_special_tokens=False) for topic, *_ in LOSSES
    }


def loss_of(model: Model, row: list[int]) -> tuple[float, int]:
    return mesp.evaluate(model, [mesp.Batch.from_sequences([row])])


@pytest.mark.parametrize(("topic", "ids", "targets", "loss"), LOSSES)
def test_losses_are_those_of_transformers(
    model: Model,
    transformers_ids: dict[str, list[int]],
    topic: str,
    ids: int | None,
    targets: int,
    loss: float,
) -> None:
    found, count = loss_of(model, transformers_ids[topic][:ids])
    assert count == targets
    assert found == pytest.approx(loss, abs=2e-3)


def test_our_ids_are_the_trained_ones(transformers_ids: dict[str, list[int]]) -> None:
    """transformers drops the file's pre-tokenizer ("smollm": each digit on its own, then GPT-2's
    rule) when it reads a GGUF file, and so cuts line breaks before a digit otherwise. llama.cpp
    and the tokenizer the model was trained with do not: their ids are ours on every topic, and
    the model finds them likelier (2.971 against 3.009)."""
    model = mesp.load_model("smollm2-135m", backend="mlx:cpu")
    tokenizer = model.checkpoint.tokenizer()
    ours = {topic: tokenizer.encode(topics[topic]) for topic, *_ in LOSSES}
    assert ours["assert"] == transformers_ids["assert"]
    assert ours["lambda"] == transformers_ids["lambda"]
    assert ours["with"] != transformers_ids["with"]
    # "follows:\n\n1." is ":", both line breaks as one token, "1", ".".
    assert tokenizer.encode(":\n\n1.") == [42, *tokenizer.encode("\n\n"), 33, 30]
    assert len(tokenizer.encode("\n\n")) == 1
    found, _ = loss_of(model, ours["with"][:257])
    assert found == pytest.approx(2.9711, abs=2e-3)
