"""Entry point of the command ``mesp``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import mesp_core
from mesp_core.cli import export, finetune, generate, info
from mesp_core.cli.arguments import Parser
from mesp_core.errors import MespError

#: Exit statuses, beside 0: a mistake in the input; stopped by Ctrl-C, as shells have it.
MISTAKE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    A mistake of the user is one line on stderr and status 2; an interrupt is status 130.
    """
    try:
        options = _parser().parse_args(arguments)
        if options.run is None:
            raise MespError("give a command: finetune, generate, export-base or info (see --help)")
        status = options.run(options)
        sys.stdout.flush()
        return status
    except MespError as error:
        return _complain(str(error))
    except BrokenPipeError:
        # Whoever read our output has left; without this, Python complains once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return MISTAKE
    except OSError as error:
        return _complain(f"{error.filename or 'system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("mesp: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(
        prog="mesp",
        description="Exact-gradient LoRA fine-tuning in the memory of inference.",
    )
    parser.add_argument("--version", action="version", version=f"mesp {mesp_core.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (finetune, generate, export, info):
        command.add_command(commands)
    return parser


def _complain(message: str) -> int:
    print(f"mesp: error: {' '.join(message.split())}", file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
