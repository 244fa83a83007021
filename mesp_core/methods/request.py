"""What a method is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesp_core.batch import Batch
from mesp_core.decoder import Stages
from mesp_core.model import Model

Array = Any

#: Called with a layer and its gradients by full name, when they are complete.
OnBlock = Callable[[int, dict[str, Array]], None]


@dataclass(frozen=True)
class Request:
    """stages: the block and the head to run; on_block: takes each adapted block's gradients, last
    block first; on_phase: told when a phase begins (forward, head, backward, update); epsilon: how
    far MeZO steps; normalizer: what the weighted sum of losses is divided by."""

    model: Model
    batch: Batch
    stages: Stages
    on_block: OnBlock
    on_phase: Callable[[str], None]
    normalizer: float
    epsilon: float
