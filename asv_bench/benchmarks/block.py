"""One block: forward, then backward from its input alone."""

from __future__ import annotations

from benchmarks.common import Case, MemoryCase


class Block(Case):
    what = "block"

    def time_block(self, *params: object) -> None:
        self.work.run()

    time_block.pretty_name = "Block: time"


class BlockMemory(MemoryCase):
    what = "block"

    def track_peak_bytes_block(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_block.unit = "bytes"
    track_peak_bytes_block.pretty_name = "Block: peak memory"
