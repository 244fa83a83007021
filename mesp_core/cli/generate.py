"""``mesp generate``: greedy text from a model, with or without an adapter."""

from __future__ import annotations

import argparse
from typing import Any

from mesp_core.cli.arguments import DEFAULT_MODEL, add_json_argument, add_model_arguments
from mesp_core.cli.output import check_report, environment, write_report
from mesp_core.generation import continuation
from mesp_core.model import load_model


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="greedy text from a model and an adapter",
        description="The most likely continuation of a prompt: small and plain, without a cache, "
        "for looking at what an adapter has learnt.",
    )
    add_model_arguments(parser, default=DEFAULT_MODEL)
    parser.add_argument("--adapter-path", help="adapter folder of mlx-lm's or PEFT's format")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=40, help="default 40")
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_report(options.json)
    model = load_model(
        options.model,
        backend=options.backend,
        adapter=options.adapter_path,
        dtype=options.dtype,
        residency=options.residency,
        seed=options.seed,
    )
    tokenizer = model.checkpoint.tokenizer()
    text = continuation(model, tokenizer, options.prompt, options.max_tokens)
    print(options.prompt + text)
    write_report(
        options.json,
        {
            "command": "generate",
            **environment(model.backend),
            "model": str(options.model),
            "adapter_path": options.adapter_path,
            "prompt": options.prompt,
            "text": text,
        },
    )
    return 0
