"""What makes a model an encoder: static, frozen, without weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderForm:
    """What makes a model an encoder: every token attends to all others, and norms come after each sublayer (BERT,
    Devlin et al. 2019) or before it (ModernBERT, Warner et al. 2024).

    positions: rows of the table of learned positions; 0: there is none, and queries and keys are rotated.
    position_offset: the row of a text's first token.
    token_types: rows of the table of token types, which tell the two texts of a pair apart; 0: there is none.
    activation: of the MLP, or of its gate; "gelu" is exact, by the error function.
    pre_norm: norms stand before each sublayer, but before the first, and behind the last layer.
    relative_buckets: rows of the table of what a key's distance adds to its score (32), or 0 without one.
    norm_bias: norms have a bias. gated: the MLP has a gate. up_bias: the first product of the MLP has a bias.
    """

    positions: int
    position_offset: int = 0
    token_types: int = 1
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    pre_norm: bool = False
    norm_bias: bool = True
    gated: bool = False
    up_bias: bool = True
    relative_buckets: int = 0
