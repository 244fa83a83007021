"""``python -m mesp_reference.check``: the command ``mesp check``."""

from __future__ import annotations

import sys

from mesp_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
