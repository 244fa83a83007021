"""What a person sees of a run: a progress bar and lines, in mlx-lm's words."""

from __future__ import annotations

import sys

from tqdm import tqdm

from mesp_core.callbacks import Info, TrainingCallback
from mesp_core.cli.output import readable_bytes, say, surviving


class Display(TrainingCallback):
    """A bar on stderr with loss, tokens/s and peak memory; reports as lines on stdout.

    Whether anybody still reads them makes no difference to the run.
    Each kind of event is told once, on stderr: a thousand equal warnings hide everything else.
    """

    def __init__(self, total: int, start: int = 0) -> None:
        # Where nobody watches, in a log file, a redrawn bar is only noise: draw it seldom.
        watched = sys.stderr.isatty()
        self._bar = tqdm(
            total=total + start,
            initial=start,
            desc="training",
            unit="batch",
            file=sys.stderr,
            mininterval=0.2 if watched else 20.0,
            dynamic_ncols=watched,
        )
        self._told: set[str] = set()

    def on_iteration(self, info: Info) -> None:
        peak = info["peak_memory"] if info["peak_memory"] is not None else info["footprint"]
        self._bar.set_postfix_str(
            f"loss {info['loss']:.3f}, {info['tokens_per_second']:.0f} tokens/s, "
            f"peak {_size(peak)}",
            refresh=False,
        )
        with surviving(sys.stderr):
            self._bar.update(info["iterations"])

    def on_train_loss_report(self, info: Info) -> None:
        # Not every framework counts its arrays on a CPU.
        known = info["peak_memory"] is not None
        arrays = f"{_size(info['peak_memory'])} of arrays, " if known else ""
        self._line(
            f"Iter {info['iteration']}: train loss {info['train_loss']:.3f}, "
            f"learning rate {info['learning_rate']:.2e}, "
            f"{info['tokens_per_second']:.0f} tokens/s, "
            f"{info['trained_tokens']} tokens trained, "
            f"peak memory {arrays}process {_size(info['footprint'])}"
        )

    def on_val_loss_report(self, info: Info) -> None:
        self._line(
            f"Iter {info['iteration']}: val loss {info['val_loss']:.3f} ({info['val_time']:.1f} s)"
        )

    def on_event(self, info: Info) -> None:
        if info["event"] not in self._told:
            self._told.add(info["event"])
            self.warn(f"iteration {info['iteration']}: {info['message']}")

    def on_save(self, info: Info) -> None:
        self._line(f"Iter {info['iteration']}: saved {info['path']}")

    def warn(self, message: str) -> None:
        self._line(f"mesp: warning: {message}", error=True)

    def _line(self, text: str, *, error: bool = False) -> None:
        with surviving(sys.stderr):
            self._bar.clear()
        say(text, error=error)
        with surviving(sys.stderr):
            self._bar.refresh()

    def close(self) -> None:
        with surviving(sys.stderr):
            self._bar.close()


def _size(gigabytes: float | None) -> str:
    return readable_bytes(None if gigabytes is None else round(gigabytes * 1e9))
