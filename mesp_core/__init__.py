"""MeSP: exact-gradient LoRA fine-tuning of language models in the memory of inference."""

from __future__ import annotations

from mesp_core.adapters import load_adapter, save_adapter
from mesp_core.backend import Backend, available_backends, get_backend
from mesp_core.batch import Batch
from mesp_core.decoder import evaluate, logits
from mesp_core.errors import (
    BackendUnavailableError,
    MespError,
    NonFiniteError,
    UnsupportedError,
)
from mesp_core.lora import LoraConfig
from mesp_core.methods import Result, loss_and_gradients
from mesp_core.model import Model, load_model
from mesp_core.optimizers import SGD, AdamW

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Backend",
    "BackendUnavailableError",
    "Batch",
    "LoraConfig",
    "MespError",
    "Model",
    "NonFiniteError",
    "Result",
    "UnsupportedError",
    "available_backends",
    "evaluate",
    "get_backend",
    "load_adapter",
    "load_model",
    "logits",
    "loss_and_gradients",
    "save_adapter",
]
