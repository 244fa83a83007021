"""Forward and hand-written backward formulas, on any namespace of the Python array API standard.

``x_forward(...) -> (out, saved)`` and ``x_backward(dout, saved, ...) -> gradients`` in argument
order; ``xp`` (and ``loops`` where there are tiles) are required keywords. ``saved`` is exactly
what has to stay alive in between.
"""

from mesp_core.formulas.activation import activation, activation_with_slope
from mesp_core.formulas.attention import (
    AttentionPlan,
    AttentionSaved,
    attention_backward,
    attention_forward,
    first_key_tiles,
)
from mesp_core.formulas.cross_entropy import (
    CrossEntropySaved,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from mesp_core.formulas.dropout import Dropout, dropout_key, dropout_multiplier, words_of
from mesp_core.formulas.embedding import embedding_backward, embedding_forward
from mesp_core.formulas.frozen_linear import frozen_linear_backward, frozen_linear_forward
from mesp_core.formulas.frozen_matrix import DenseMatrix, FrozenMatrix, QuantizedMatrix
from mesp_core.formulas.gated_mlp import (
    GatedMlpSaved,
    MlpPlan,
    gated_mlp_backward,
    gated_mlp_forward,
)
from mesp_core.formulas.loops import EagerLoops, Loops
from mesp_core.formulas.lora_linear import (
    LoraGradients,
    LoraLinearSaved,
    Projection,
    lora_linear_backward,
    lora_linear_forward,
)
from mesp_core.formulas.quantization import dequantize
from mesp_core.formulas.rms_norm import RmsNormSaved, rms_norm_backward, rms_norm_forward
from mesp_core.formulas.rope import rope_backward, rope_forward, rope_frequencies, rope_tables

__all__ = [
    "AttentionPlan",
    "AttentionSaved",
    "CrossEntropySaved",
    "DenseMatrix",
    "Dropout",
    "EagerLoops",
    "FrozenMatrix",
    "GatedMlpSaved",
    "Loops",
    "LoraGradients",
    "LoraLinearSaved",
    "MlpPlan",
    "Projection",
    "QuantizedMatrix",
    "RmsNormSaved",
    "activation",
    "activation_with_slope",
    "attention_backward",
    "attention_forward",
    "dequantize",
    "dropout_key",
    "dropout_multiplier",
    "embedding_backward",
    "embedding_forward",
    "first_key_tiles",
    "frozen_linear_backward",
    "frozen_linear_forward",
    "gated_mlp_backward",
    "gated_mlp_forward",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_forward",
    "lora_linear_backward",
    "lora_linear_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "rope_backward",
    "rope_forward",
    "rope_frequencies",
    "rope_tables",
    "words_of",
]
