"""``mesp info``: what runs on this machine, and what a model is."""

from __future__ import annotations

import argparse
import math
from typing import Any

from mesp_core.backend import available_backends, get_backend
from mesp_core.cli.arguments import add_json_argument
from mesp_core.cli.output import check_report, environment, readable_bytes, write_report
from mesp_core.files.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from mesp_core.footprint import process_footprint
from mesp_core.stored_matrix import StoredMatrix


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, device, backends, and a model's sizes",
        description="What is installed and can run here; with --model, what the model is.",
    )
    parser.add_argument("--model", help="folder, .gguf file, or smollm2-135m")
    parser.add_argument("--backend", default="auto", help="the one to describe (auto)")
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_report(options.json)
    backends = available_backends()
    backend = get_backend(options.backend)
    report: dict[str, Any] = {"command": "info", **environment(backend), "backends": backends}
    report["operations"] = [vars(implementation) for implementation in backend.explain()]
    print("Versions: " + ", ".join(f"{k} {v}" for k, v in report["versions"].items()))
    print(f"Machine:  {report['machine']}")
    print(f"Backend:  {backend.name} on {backend.device}")
    for name, reason in backends.items():
        print(f"  {name}: {'can run' if reason is None else reason}")
    for implementation in backend.explain():
        print(f"  {implementation.component}: {implementation.name} ({implementation.reason})")
    print(f"Process:  {readable_bytes(process_footprint())} of its own memory")
    if options.model is not None:
        report["model"] = _model(options.model)
    write_report(options.json, report)
    return 0


def _model(source: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(source)
    try:
        summary = _summary(checkpoint)
    finally:
        checkpoint.close()
    print(f"Model:    {source}")
    for key, value in summary.items():
        print(f"  {key}: {value:,}" if isinstance(value, int) else f"  {key}: {value}")
    return {"source": source, **summary}


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    shapes = expected_shapes(config)
    kinds = {_kind(checkpoint.matrix(name)) for name, shape in shapes.items() if len(shape) == 2}
    return {
        "family": config.model_type,
        "layers": config.layers,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "vocabulary": config.vocab,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "stored": ", ".join(sorted(kinds)),
    }


def _kind(matrix: StoredMatrix) -> str:
    if not matrix.quantized:
        return matrix.dtype
    return f"{matrix.bits} bits in groups of {matrix.group}"
