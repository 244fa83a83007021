"""Entry point of the command ``mesp``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import numpy as np

import mesp_core
from mesp_core.cli import check, compare, export, finetune, generate, info
from mesp_core.cli.arguments import Parser
from mesp_core.cli.output import INTERRUPTED, MISTAKE, say, surviving
from mesp_core.errors import MespError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    A mistake of the user is one line on stderr and status 2; an interrupt is status 130.
    """
    _open_streams()
    try:
        options = _parser().parse_args(arguments)
        if options.run is None:
            raise MespError(
                "give a command: finetune, generate, export-base, info, check or compare "
                "(see --help)"
            )
        # What overflows is found by checks that tell it in words.
        with np.errstate(all="ignore"):
            status = options.run(options)
        sys.stdout.flush()
        return status
    except MespError as error:
        return _complain(str(error))
    except BrokenPipeError:
        return MISTAKE
    except OSError as error:
        return _complain(f"{error.filename or 'system'}: {error.strerror or error}")
    except MemoryError as error:
        return _complain(f"out of memory: {error}".rstrip(": "))
    except KeyboardInterrupt:
        say("mesp: interrupted", error=True)
        return INTERRUPTED
    finally:
        # Where the reader has left, Python would complain once more at its own end.
        with surviving(sys.stdout):
            sys.stdout.flush()


def _open_streams() -> None:
    """A closed stream leads nowhere, and one that is not Unicode gets escapes for other letters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> Parser:
    parser = Parser(
        prog="mesp",
        description="Exact-gradient LoRA fine-tuning in the memory of inference.",
    )
    parser.add_argument("--version", action="version", version=f"mesp {mesp_core.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (finetune, generate, export, info, check, compare):
        command.add_command(commands)
    return parser


def _complain(message: str) -> int:
    say(f"mesp: error: {' '.join(message.split())}", error=True)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
