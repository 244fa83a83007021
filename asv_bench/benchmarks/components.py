"""Each component, forward and backward, on a block of the synthetic model; and the memory of those
whose tiles are there for its sake."""

from __future__ import annotations

from benchmarks.common import BACKENDS, Case, MemoryCase


class Component(Case):
    params = (BACKENDS, (256, 1024), (8,), ("float32",))
    repeat = (5, 50, 1.0)


class ComponentMemory(MemoryCase):
    params = (BACKENDS, (256, 1024), (8,), ("float32",))
    unit = "bytes"


class RmsNorm(Component):
    what = "rms_norm"

    def time_rms_norm(self, *params: object) -> None:
        self.work.run()

    time_rms_norm.pretty_name = "RMS norm: time"


class Rope(Component):
    what = "rope"

    def time_rope(self, *params: object) -> None:
        self.work.run()

    time_rope.pretty_name = "RoPE: time"


class LoraLinear(Component):
    what = "lora_linear"

    def time_lora_linear(self, *params: object) -> None:
        self.work.run()

    time_lora_linear.pretty_name = "LoRA linear: time"


class Attention(Component):
    what = "attention"

    def time_attention(self, *params: object) -> None:
        self.work.run()

    time_attention.pretty_name = "Attention: time"


class AttentionMemory(ComponentMemory):
    what = "attention"

    def track_peak_bytes_attention(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_attention.pretty_name = "Attention: peak memory"


class GatedMlp(Component):
    what = "gated_mlp"

    def time_gated_mlp(self, *params: object) -> None:
        self.work.run()

    time_gated_mlp.pretty_name = "Gated MLP: time"


class GatedMlpMemory(ComponentMemory):
    what = "gated_mlp"

    def track_peak_bytes_gated_mlp(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_gated_mlp.pretty_name = "Gated MLP: peak memory"


class Head(Component):
    what = "linear_cross_entropy"

    def time_head(self, *params: object) -> None:
        self.work.run()

    time_head.pretty_name = "Head and loss: time"


class HeadMemory(ComponentMemory):
    what = "linear_cross_entropy"

    def track_peak_bytes_head(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_head.pretty_name = "Head and loss: peak memory"
