"""What kinds of recurrent layers do differently, and the parameters of each between its two products."""

from typing import NamedTuple, Protocol

import jax

from xla_engine.graphs.recurrent.rule import Heads
from xla_engine.graphs.recurrent_forms import Recurrent


class RecurrentState(NamedTuple):
    """The state of a layer for every slot, float32.

    inputs: `[B, kernel - 1, mixed features]`, the convolution's last inputs.   memory: `[B, Hv, Dk, Dv]`; None
        without a rule.
    """

    inputs: jax.Array
    memory: jax.Array | None


Others = tuple[jax.Array, ...]  # the parts of a projection that do not go through the convolution


class DeltaWeights(NamedTuple):
    """Of a gated DeltaNet layer, all float32.

    convolution: `[mixed features, kernel]`, oldest position first.   norm: `[Dv]`.
    decay: `[Hv]`, the checkpoint's A_log. step_bias: of each decay, its dt_bias.
    """

    convolution: jax.Array
    decay: jax.Array
    step_bias: jax.Array
    norm: jax.Array
    convolution_bias: jax.Array | None = None


class ConvolutionWeights(NamedTuple):
    """Of a short convolution, float32: `[mixed features, kernel]`, oldest position first, and `[mixed features]`."""

    convolution: jax.Array
    convolution_bias: jax.Array | None = None


class MambaWeights(NamedTuple):
    """Of a Mamba-2 layer, all float32.

    convolution: `[mixed features, kernel]`, oldest position first. convolution_bias: `[mixed features]`.
    decay, step_bias, skip: `[Hv]`, the checkpoint's A_log, dt_bias and D. norm: `[inner features]`.
    """

    convolution: jax.Array
    decay: jax.Array
    step_bias: jax.Array
    skip: jax.Array
    norm: jax.Array | None
    convolution_bias: jax.Array | None = None


RecurrentWeights = DeltaWeights | ConvolutionWeights | MambaWeights


class Split(Protocol):
    def __call__(self, form: Recurrent, projected: jax.Array, /) -> tuple[jax.Array, Others]:
        """The convolution's inputs `[N, mixed features]`, and the other parts of `projected [N, F]`."""
        ...


class ReadHeads(Protocol):
    def __call__(
        self, form: Recurrent, weights: RecurrentWeights, convolved: jax.Array, others: Others, /
    ) -> Heads | None:
        """What the rule is given for `convolved [N, mixed features]`; None without a rule."""
        ...


class Output(Protocol):
    def __call__(
        self,
        form: Recurrent,
        weights: RecurrentWeights,
        convolved: jax.Array,
        out: jax.Array | None,
        others: Others,
        /,
    ) -> jax.Array:
        """The layer's output before its last product `[N, inner features]`; out: the rule's, `[N, Hv, Dv]`."""
        ...


class Kind(NamedTuple):
    """The parts of a kind of layers, in their order."""

    split: Split
    heads: ReadHeads
    output: Output
