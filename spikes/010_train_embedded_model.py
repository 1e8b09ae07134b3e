# Measured at commit 84bfb74; runs at HEAD.
"""Can two CPU cores train a useful small Llama checkpoint within an hour, from data that every Python has?

Trains the embedded model: a byte-level BPE tokenizer and a 4.7 M parameter decoder, both learnt from the
source of the running interpreter's own standard library, and writes them in the Hugging Face layout.

    python spikes/010_train_embedded_model.py --minutes 50 --out xla_engine/embedded
    python spikes/010_train_embedded_model.py --benchmark
    python spikes/010_train_embedded_model.py --draft-of xla_engine/embedded --minutes 30 --out draft

The last trains the draft model: 0.9 M parameters, the tokenizer of the model it drafts for.
"""

# %%
import argparse
import ast
import hashlib
import json
import math
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 10
END_OF_TEXT = "<|endoftext|>"
END_ID = 0
CONTEXT = 512
BATCH_TOKENS = 2048
SHORT_CONTEXT = 256  # attention costs half as much here; used for the first part of the run
SHORT_SHARE = 0.7
PEAK_LEARNING_RATE = 2e-3
LOSS_CHUNK = 1024  # tokens per piece of the vocabulary product: keeps each logits array inside the caches


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 576
    rope_theta: float = 10000.0
    epsilon: float = 1e-5

    @property
    def query_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        return self.kv_heads * self.head_dim


DRAFT = Shape(hidden=128, layers=2, heads=4, intermediate=352)
SHAPE = DRAFT if "--draft-of" in sys.argv else Shape()

# %% [markdown]
# ## Corpus
# Every `.py` file of the standard library, tests included, without generated tables and deliberately
# broken files. A file is held out when the hash of its relative path says so, so the split does not depend
# on order or machine.

# %%
EXCLUDED_FOLDERS = {
    "site-packages",
    "encodings",
    "lib2to3",
    "test_lib2to3",
    "pydoc_data",
    "encoded_modules",
    "__pycache__",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str
    text: str
    is_test: bool
    held_out: bool


def read_corpus() -> list[SourceFile]:
    """All files in the order of their relative paths; about 2 % of them are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace(END_OF_TEXT, "")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if not text.strip():
            continue
        name = relative.as_posix()
        digest = hashlib.sha256(name.encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") % 50 == 0
        files.append(SourceFile(name, text, "test" in name.split("/")[0] or "_test" in name, held_out))
    return files


def node_lines(lines: list[str], node: ast.stmt) -> tuple[int, int]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return first - 1, node.end_lineno or len(lines)


def split_source(text: str) -> tuple[list[str], list[str]]:
    """(pieces, functions): the file cut at top-level definitions, and every function alone, dedented."""
    lines = text.splitlines()
    pieces: list[str] = []
    functions: list[str] = []
    statements: list[int] = []  # [first, end] line of the run of plain statements not yet written

    def flush() -> None:
        if statements:
            pieces.append("\n".join(lines[statements[0] : statements[-1]]) + "\n")
            statements.clear()

    for node in ast.parse(text).body:
        first, end = node_lines(lines, node)
        piece = "\n".join(lines[first:end]) + "\n"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            statements.extend([first, end])
            continue
        flush()
        pieces.append(piece)
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                first, end = node_lines(lines, member)
                functions.append(textwrap.dedent("\n".join(lines[first:end])) + "\n")
    flush()
    return pieces, functions


# %% [markdown]
# ## Tokenizer
# Byte-level BPE. A newline and the indent after it form one word, so deep indents cost one token and a
# line's first word never carries a space. All 256 bytes are in the alphabet: any text comes back exactly.
# Nothing is added to a text.

# %%
WORD = r"[\r\n]+[ \t]*| ?\p{L}+| ?_+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != SHAPE.vocab or tokenizer.token_to_id(END_OF_TEXT) != END_ID:
        raise ValueError("the tokenizer does not have the expected size or special token")
    return tokenizer


# %% [markdown]
# ## Documents and batches
# In each epoch a file is shown whole, cut at its top-level definitions, or as single functions; every
# document ends by the end token. So the model sees long context and also learns that a complete function
# may end the text.

# %%
Document = np.ndarray[Any, np.dtype[np.uint16]]  # token ids, the end token last


@dataclass(frozen=True, slots=True)
class TokenisedFile:
    views: tuple[list[Document], list[Document], list[Document]]  # whole, pieces, functions
    is_test: bool


def tokenise(tokenizer: Tokenizer, files: list[SourceFile]) -> list[TokenisedFile]:
    tokenised = []
    for file in files:
        pieces, functions = split_source(file.text)
        views = []
        for texts in ([file.text], pieces, functions or pieces):
            encodings = tokenizer.encode_batch(texts)
            views.append([np.array([*encoding.ids, END_ID], np.uint16) for encoding in encodings])
        tokenised.append(TokenisedFile((views[0], views[1], views[2]), file.is_test))
    return tokenised


def epoch_rows(files: list[TokenisedFile], epoch: int) -> Document:
    """Shuffled rows of one epoch, [rows, CONTEXT + 1]; neighbouring columns are inputs and targets.

    A test file takes part in every second epoch on average: tests have twice as many bytes as the library.
    """
    generator = np.random.default_rng([SEED, epoch])
    documents: list[Document] = []
    for file in files:
        view = generator.choice(3, p=(0.4, 0.3, 0.3))
        if not file.is_test or generator.random() < 0.5:
            documents.extend(file.views[view])
    order = generator.permutation(len(documents))
    return pack_rows([documents[index] for index in order], generator)


def pack_rows(documents: list[Document], generator: np.random.Generator | None = None) -> Document:
    stream = np.concatenate(documents)
    rows = (len(stream) - 1) // CONTEXT
    packed = np.lib.stride_tricks.sliding_window_view(stream, CONTEXT + 1)[: rows * CONTEXT : CONTEXT]
    return packed[generator.permutation(rows)] if generator is not None else packed


def training_batches(files: list[TokenisedFile], skip: int) -> Iterator[tuple[int, Document]]:
    """Endless (epoch, rows [BATCH_TOKENS / CONTEXT, CONTEXT + 1]), beginning after `skip` batches."""
    size = BATCH_TOKENS // CONTEXT
    epoch = 0
    while True:
        rows = epoch_rows(files, epoch)
        for first in range(0, len(rows) - size + 1, size):
            if skip:
                skip -= 1
            else:
                yield epoch, rows[first : first + size]
        epoch += 1


# %% [markdown]
# ## Products
# XLA:CPU multiplies bf16 quickly only in the forms its YNNPACK emitter accepts: both operands bf16, f32
# result, the left operand contracted over its last axis. The gradient products autodiff writes are not of
# that form, so they are spelt out.

# %%
USE_BFLOAT16 = True


def product(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    """`left [..., m, k]` times `right`, contracted over its axis -1 or -2, leading axes batched; f32."""
    batch = tuple(range(left.ndim - 2))
    dimensions = (((left.ndim - 1,), (right.ndim + right_axis,)), (batch, batch))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def in_row_order(array: jax.Array) -> jax.Array:
    """The array with its last axis contiguous in memory.

    An optimization barrier is not enough: XLA makes a transpose a mere change of layout, and a bf16 product
    whose left operand has another layout runs in f32, four times slower.
    """
    constrained: jax.Array = with_layout_constraint(array, Layout(tuple(range(array.ndim))))
    return constrained


def fenced(array: jax.Array) -> jax.Array:
    """The array, through a barrier that XLA does not simplify across."""
    same: jax.Array = lax.optimization_barrier(array)
    return same


def transposed(array: jax.Array) -> jax.Array:
    """The last two axes swapped, in memory and not only in name."""
    return in_row_order(array.swapaxes(-1, -2))


def product_transposed(left: jax.Array, right: jax.Array) -> jax.Array:
    """`(left^T right)^T` for `left [..., m, k]`, `right [..., m, n]` -> f32 [..., n, k].

    The left operand is the one that moves in memory, so the smaller one belongs there.
    """
    return fenced(product(transposed(left), right, -2)).swapaxes(-1, -2)


@jax.custom_vjp
def bfloat16_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [M, D]`, `weight [F, D]` -> f32 [M, F]."""
    return product(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), -1)


def linear_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return product(x, weight, -1), (x, weight)


def linear_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    gradient = gradient.astype(jnp.bfloat16)
    x_gradient = product(gradient, weight, -2)
    weight_gradient = product_transposed(x, gradient)
    return x_gradient, weight_gradient


bfloat16_linear.defvjp(linear_forward, linear_backward)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return bfloat16_linear(x, weight) if USE_BFLOAT16 else product(x, weight, -1)


@jax.custom_vjp
def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of one block of queries. N = batch x kv heads, R = queries x heads per kv head.

    query [N, R, Dh] (already scaled), key and value [N, S, Dh], mask [B, queries, S] of 0 and 1
    -> f32 [N, R, Dh]. The weights stay unnormalised and one division follows the second product, so the
    gradient passes over the [N, R, S] array once.
    """
    return attend_forward(query, key, value, mask)[0]


def attend_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = product(query, key, -1)
    batch, query_length, key_length = mask.shape
    split = scores.reshape(batch, -1, query_length, scores.shape[1] // query_length, key_length)
    masked = jnp.where(mask[:, None, :, None, :] > 0, split, -1e30)
    weights = jnp.exp(masked - jnp.max(masked, axis=-1, keepdims=True))
    weights = weights.astype(query.dtype).reshape(scores.shape)
    inverse_sum = 1.0 / jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)  # [N, R, 1]
    output = product(weights, value, -2) * inverse_sum
    return output, (query, key, value, weights, inverse_sum, output)


def attend_backward(
    saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """FlashAttention's delta (Dao et al. 2022, appendix B): sum(weights * gradients) = output . gradient."""
    query, key, value, weights, inverse_sum, output = saved
    dtype = query.dtype
    gradient = (gradient * inverse_sum).astype(dtype)
    delta = jnp.sum(output * gradient, axis=-1, keepdims=True)  # [N, R, 1], of the rounded gradient
    value_gradient = product_transposed(gradient, weights)
    score_gradient = (weights * (product(gradient, value, -1) - delta)).astype(dtype)
    query_gradient = product(score_gradient, key, -2)
    key_gradient = product_transposed(query, score_gradient)
    return query_gradient.astype(dtype), key_gradient.astype(dtype), value_gradient.astype(dtype), None


attend.defvjp(attend_forward, attend_backward)


# %% [markdown]
# ## Model
# Llama: RMS norm, rotary embedding in the half-split convention, grouped-query attention, SwiGLU, tied
# output. Query, key and value share one weight while training, gate and up another; the export takes them
# apart.

# %%
QUERY_BLOCK = 128


def normal(rngs: nnx.Rngs, rows: int, columns: int, scale: float) -> nnx.Param[jax.Array]:
    return nnx.Param(jax.random.normal(rngs.params(), (rows, columns), jnp.float32) * scale)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + SHAPE.epsilon) * scale


def rotary_tables(length: int) -> tuple[jax.Array, jax.Array]:
    """cosine and sine [T, 1, Dh / 2] at positions 0..T-1."""
    half = SHAPE.head_dim // 2
    angles = np.arange(length)[:, None] * SHAPE.rope_theta ** (-np.arange(half) / half)
    return jnp.asarray(np.cos(angles), jnp.float32)[:, None], jnp.asarray(np.sin(angles), jnp.float32)[
        :, None
    ]


def turn(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@jax.custom_vjp
def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of `x [B, T, heads, Dh]`; i pairs with i + Dh / 2. Its gradient turns back."""
    return turn(x, *rotary_tables(x.shape[1]))


def rotate_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    cosine, sine = rotary_tables(gradient.shape[1])
    return (turn(gradient, cosine, -sine),)


rotate.defvjp(lambda x: (rotate(x), None), rotate_backward)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        hidden, wide = SHAPE.hidden, SHAPE.intermediate
        residual_scale = (2 * SHAPE.layers) ** -0.5
        self.attention_norm = nnx.Param(jnp.ones(hidden))
        self.query_key_value = normal(
            rngs, SHAPE.query_features + 2 * SHAPE.kv_features, hidden, hidden**-0.5
        )
        self.attention_output = normal(rngs, hidden, SHAPE.query_features, residual_scale * hidden**-0.5)
        self.feed_forward_norm = nnx.Param(jnp.ones(hidden))
        self.gate_up = normal(rngs, 2 * wide, hidden, hidden**-0.5)
        self.down = normal(rngs, hidden, wide, residual_scale * wide**-0.5)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`x [B * T, D]`, `mask [B, T, T]` -> [B * T, D]."""
        x = x + self.attention(rms_norm(x, self.attention_norm[...]), mask)
        gate, up = jnp.split(linear(rms_norm(x, self.feed_forward_norm[...]), self.gate_up[...]), 2, axis=-1)
        return x + linear(jax.nn.silu(gate) * up, self.down[...])

    def attention(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        batch, length, _ = mask.shape
        kv_heads, group, head_dim = SHAPE.kv_heads, SHAPE.heads // SHAPE.kv_heads, SHAPE.head_dim
        projected = linear(x, self.query_key_value[...]).reshape(batch, length, -1, head_dim)
        rotated = rotate(projected[:, :, : SHAPE.heads + kv_heads])
        query, key = rotated[:, :, : SHAPE.heads] * head_dim**-0.5, rotated[:, :, SHAPE.heads :]
        value = projected[:, :, SHAPE.heads + kv_heads :]
        dtype = jnp.bfloat16 if USE_BFLOAT16 else jnp.float32
        grouped = query.astype(dtype).reshape(batch, length, kv_heads, group, head_dim)
        query = grouped.transpose(0, 2, 1, 3, 4).reshape(batch * kv_heads, length * group, head_dim)
        key, value = (
            array.astype(dtype).transpose(0, 2, 1, 3).reshape(batch * kv_heads, length, head_dim)
            for array in (key, value)
        )
        blocks = []
        for first in range(0, length, QUERY_BLOCK):
            end = min(first + QUERY_BLOCK, length)
            rows = query[:, first * group : end * group]
            blocks.append(attend(rows, key[:, :end], value[:, :end], mask[:, first:end, :end]))
        output = jnp.concatenate(blocks, axis=1).reshape(batch, kv_heads, length, group, head_dim)
        return linear(output.transpose(0, 2, 1, 3, 4).reshape(batch * length, -1), self.attention_output[...])


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = normal(rngs, SHAPE.vocab, SHAPE.hidden, SHAPE.hidden**-0.5)
        self.layers = nnx.List([Layer(rngs) for _ in range(SHAPE.layers)])
        self.norm = nnx.Param(jnp.ones(SHAPE.hidden))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`tokens [B, T]` -> normed hidden states [B * T, D]. A token sees only its own document."""
        document = jnp.cumsum(tokens == END_ID, axis=1) - (tokens == END_ID)
        position = jnp.arange(tokens.shape[1])
        mask = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
        mask = fenced(mask.astype(jnp.float32))  # made once, not again in every layer
        x = self.embedding[...][tokens.reshape(-1)]
        for layer in self.layers:
            x = layer(x, mask)
        return rms_norm(x, self.norm[...])


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return cross_entropy_forward(logits, targets)[0]


def cross_entropy_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`logits [M, V]`, `targets [M]` -> losses [M]; keeps the log-sum-exp: the gradient is one pass."""
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return log_sum - chosen, (logits, targets, log_sum)


def cross_entropy_backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, log_sum = saved
    chosen = (jnp.arange(SHAPE.vocab) == targets[:, None]).astype(jnp.float32)
    return (jnp.exp(logits - log_sum[:, None]) - chosen) * gradient[:, None], None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)


def token_losses(hidden: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log likelihood in nats of `targets [M]` under `hidden [M, D]`."""
    losses = []
    for first in range(0, hidden.shape[0], LOSS_CHUNK):
        logits = linear(hidden[first : first + LOSS_CHUNK], embedding)
        losses.append(cross_entropy(logits, targets[first : first + LOSS_CHUNK]))
    return jnp.concatenate(losses)


Parameters = list[jax.Array]  # the model's leaves in the order of TREE; f32 master weights
GRAPH, INITIAL_STATE = nnx.split(Decoder(nnx.Rngs(SEED)))
INITIAL_PARAMETERS, TREE = jax.tree.flatten(INITIAL_STATE)


def decoder_of(parameters: Parameters) -> Decoder:
    return nnx.merge(GRAPH, jax.tree.unflatten(TREE, parameters))


def row_losses(parameters: Parameters, rows: jax.Array, length: int) -> jax.Array:
    """Losses of `rows [B, CONTEXT + 1]`, each read as CONTEXT / length independent contexts."""
    model = decoder_of(parameters)
    hidden = model(rows[:, :-1].reshape(-1, length))
    return token_losses(hidden, model.embedding[...], rows[:, 1:].reshape(-1))


# %% [markdown]
# ## Training step
# AdamW with decay on matrices only. The learning rate is an argument, so a run may follow the clock and
# always end in time.

# %%
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.95),
    optax.add_decayed_weights(0.1, mask=lambda parameters: [leaf.ndim == 2 for leaf in parameters]),
)
State = tuple[Parameters, optax.OptState]


def train_step(
    state: State, rows: jax.Array, learning_rate: jax.Array, length: int
) -> tuple[State, jax.Array]:
    parameters, optimizer_state = state
    loss, gradients = jax.value_and_grad(lambda tree: row_losses(tree, rows, length).mean())(parameters)
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, parameters)
    parameters = [leaf - learning_rate * update for leaf, update in zip(parameters, updates, strict=True)]
    return (parameters, optimizer_state), loss


def learning_rate_at(progress: float) -> float:
    warm_up = 0.02
    if progress < warm_up:
        return PEAK_LEARNING_RATE * max(progress, 1e-4) / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * cosine)


def initial_state() -> State:
    """Fresh copies, because a step donates its state."""
    parameters = [jnp.array(leaf) for leaf in INITIAL_PARAMETERS]
    return parameters, OPTIMIZER.init(parameters)


def compiled_step(length: int) -> Any:
    return jax.jit(partial(train_step, length=length), donate_argnums=0)


def benchmark() -> None:
    """A training step in f32 and in the bf16 form, for both context lengths; wall and processor time."""
    global USE_BFLOAT16
    shape = (BATCH_TOKENS // CONTEXT, CONTEXT + 1)
    rows = np.random.default_rng(0).integers(1, SHAPE.vocab, shape).astype(np.int32)
    for USE_BFLOAT16 in (False, True):
        for length in (SHORT_CONTEXT, CONTEXT):
            step, state, times = compiled_step(length), initial_state(), []
            for _ in range(12):
                wall, processor = time.perf_counter(), time.process_time()
                state, loss = step(state, rows, 1e-3)
                loss.block_until_ready()
                times.append((time.perf_counter() - wall, time.process_time() - processor))
            wall, processor = np.median(times[3:], axis=0)
            print(
                f"{'bf16 form' if USE_BFLOAT16 else 'f32':9} T={length}: wall {wall * 1e3:.0f} ms,"
                f" processor {processor * 1e3:.0f} ms, {BATCH_TOKENS / wall:.0f} tokens/s",
                flush=True,
            )


# %% [markdown]
# ## Files
# The Hugging Face layout: linear weights [out, in] in bf16, query/key/value and gate/up apart.


# %%
def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` without white space (it is shipped), and the small files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", {"bos_token_id": END_ID, "eos_token_id": END_ID})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": SHAPE.vocab,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.intermediate,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "max_position_embeddings": CONTEXT,
        "rope_theta": SHAPE.rope_theta,
        "rms_norm_eps": SHAPE.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
    }
    write_json(folder / "config.json", config)


def export_weights(parameters: Parameters, path: Path) -> None:
    model = decoder_of(parameters)
    tensors = {"model.embed_tokens.weight": model.embedding[...], "model.norm.weight": model.norm[...]}
    query_end, key_end = SHAPE.query_features, SHAPE.query_features + SHAPE.kv_features
    for index, layer in enumerate(model.layers):
        name = f"model.layers.{index}"
        query, key, value = jnp.split(layer.query_key_value[...], (query_end, key_end))
        gate, up = jnp.split(layer.gate_up[...], 2)
        tensors |= {
            f"{name}.input_layernorm.weight": layer.attention_norm[...],
            f"{name}.self_attn.q_proj.weight": query,
            f"{name}.self_attn.k_proj.weight": key,
            f"{name}.self_attn.v_proj.weight": value,
            f"{name}.self_attn.o_proj.weight": layer.attention_output[...],
            f"{name}.post_attention_layernorm.weight": layer.feed_forward_norm[...],
            f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up,
            f"{name}.mlp.down_proj.weight": layer.down[...],
        }
    arrays = {name: np.asarray(tensor).astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    partial_path = path.with_suffix(".partial")
    save_file(arrays, partial_path, metadata={"format": "pt"})
    partial_path.chmod(0o644)  # the writer makes the file private; it is shipped
    partial_path.replace(path)


def import_weights(path: Path) -> Parameters:
    """The inverse of `export_weights`, in a fresh model."""
    tensors = {name: jnp.asarray(array.astype(np.float32)) for name, array in load_file(path).items()}
    model = Decoder(nnx.Rngs(0))
    model.embedding[...] = tensors["model.embed_tokens.weight"]
    model.norm[...] = tensors["model.norm.weight"]
    for index, layer in enumerate(model.layers):
        name = f"model.layers.{index}"
        layer.attention_norm[...] = tensors[f"{name}.input_layernorm.weight"]
        parts = [tensors[f"{name}.self_attn.{part}_proj.weight"] for part in "qkv"]
        layer.query_key_value[...] = jnp.concatenate(parts)
        layer.attention_output[...] = tensors[f"{name}.self_attn.o_proj.weight"]
        layer.feed_forward_norm[...] = tensors[f"{name}.post_attention_layernorm.weight"]
        parts = [tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        layer.gate_up[...] = jnp.concatenate(parts)
        layer.down[...] = tensors[f"{name}.mlp.down_proj.weight"]
    return jax.tree.leaves(nnx.split(model)[1])


def save_checkpoint(path: Path, state: State, step: int, elapsed: float) -> None:
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, np.array([step, elapsed]), *map(np.asarray, jax.tree.leaves(state)))
    partial_path.replace(path)


def load_checkpoint(path: Path) -> tuple[State, int, float]:
    with np.load(path) as archive:
        (step, elapsed), *leaves = (archive[f"arr_{index}"] for index in range(len(archive.files)))
    state = jax.tree.unflatten(jax.tree.structure(initial_state()), [jnp.asarray(leaf) for leaf in leaves])
    return state, int(step), float(elapsed)


# %% [markdown]
# ## Measures: held-out loss, and what the model writes


# %%
losses_of_rows = jax.jit(partial(row_losses, length=CONTEXT))


def held_out_loss(parameters: Parameters, rows: Document) -> float:
    """Mean nats per token over `rows [N, CONTEXT + 1]`."""
    total = 0.0
    size = BATCH_TOKENS // CONTEXT
    for first in range(0, len(rows), size):
        batch = rows[first : first + size]
        padded = np.zeros((size, CONTEXT + 1), np.int32)
        padded[: len(batch)] = batch
        losses = losses_of_rows(parameters, padded).reshape(size, CONTEXT)
        total += float(losses[: len(batch)].sum())
    return total / (len(rows) * CONTEXT)


@jax.jit
def next_logits(parameters: Parameters, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Logits [B, V] after the first `lengths [B]` tokens of each row of `tokens [B, T]`."""
    model = decoder_of(parameters)
    hidden = model(tokens).reshape(*tokens.shape, -1)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    return linear(last, model.embedding[...])


def complete(
    parameters: Parameters,
    tokenizer: Tokenizer,
    prompts: list[str],
    temperature: float,
    max_tokens: int = 200,
) -> list[tuple[str, bool]]:
    """(text, reached the end token) for each prompt; temperature 0 is greedy. Keeps no cache: a check."""
    generator = np.random.default_rng(SEED)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    lengths = np.array([len(ids) for ids in encoded])
    limits = lengths + max_tokens
    tokens = np.zeros((len(prompts), -(-int(limits.max()) // QUERY_BLOCK) * QUERY_BLOCK), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
    ended = np.zeros(len(prompts), bool)
    for _ in range(max_tokens):
        width = -(-int(lengths.max()) // QUERY_BLOCK) * QUERY_BLOCK
        logits = np.asarray(next_logits(parameters, tokens[:, :width], lengths), np.float64)
        if temperature > 0:
            logits = logits / temperature + generator.gumbel(size=logits.shape)
        chosen = logits.argmax(axis=-1)
        ended |= chosen == END_ID
        live = np.flatnonzero(~ended)
        tokens[live, lengths[live]] = chosen[live]
        lengths[live] += 1
        if not len(live):
            break
    texts = [tokenizer.decode(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]
    return list(zip(texts, ended.tolist(), strict=True))


# %% [markdown]
# ## The run


# %%
# No prompt ends in a newline: a newline and the indent after it are one token, so a bare newline at the end of a
# prompt reads as the end of an indented block.
PROMPTS = [
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):",
    'def read_lines(path):\n    """Return the lines of a file."""',
    "import os\nimport sys",
]


def signatures(files: list[SourceFile], count: int) -> list[str]:
    """The first lines of `count` held-out functions, spread evenly over the held-out files."""
    found = []
    for file in files:
        for function in split_source(file.text)[1]:
            first = function.split("\n", 1)[0]
            if first.startswith("def ") and first.endswith(":"):
                found.append(first)
    return found[:: max(1, len(found) // count)][:count]


def report(
    folder: Path, tokenizer: Tokenizer, held_out: list[SourceFile], trained: Parameters | None
) -> None:
    """Held-out loss of the trained weights and of the exported file read back, then samples from the file."""
    documents = [file.views[0][0] for file in tokenise(tokenizer, held_out)]
    rows = pack_rows(documents)
    tokens = sum(len(document) for document in documents)
    bytes_per_token = sum(len(file.text.encode()) for file in held_out) / tokens
    exported = import_weights(folder / "model.safetensors")
    for name, parameters in (("trained f32", trained), ("exported bf16", exported)):
        if parameters is not None:
            loss = held_out_loss(parameters, rows)
            bits = loss / math.log(2) / bytes_per_token
            print(f"held-out, {name}: {loss:.4f} nats/token, {bits:.4f} bits/byte", flush=True)
    print(f"held-out: {len(held_out)} files, {tokens} tokens, {bytes_per_token:.3f} bytes/token")
    for temperature in (0.0, 0.7):
        completions = complete(exported, tokenizer, signatures(held_out, 40), temperature)
        ended = sum(end for _, end in completions)
        print(f"temperature {temperature}: {ended} of {len(completions)} held-out functions ended")
        for text, end in complete(exported, tokenizer, PROMPTS, temperature):
            print(f"--- temperature {temperature}, {'ended' if end else 'cut'}\n{text}", flush=True)
    print(f"files: {sum(path.stat().st_size for path in folder.iterdir() if path.is_file())} bytes")


def train(files: list[TokenisedFile], held_out_rows: Document, arguments: argparse.Namespace) -> Parameters:
    """Runs for `--steps`, or until the clock says `--minutes`; exports every `--export-minutes`."""
    state, step, earlier = initial_state(), 0, 0.0
    if arguments.start:
        parameters = import_weights(arguments.start / "model.safetensors")
        state = parameters, OPTIMIZER.init(parameters)
    if arguments.checkpoint and arguments.checkpoint.exists():
        state, step, earlier = load_checkpoint(arguments.checkpoint)
    steps = {length: compiled_step(length) for length in (SHORT_CONTEXT, CONTEXT)}
    budget = arguments.minutes * 60
    begin = time.monotonic()
    exported = earlier
    smooth = None
    for epoch, rows in training_batches(files, skip=step):
        elapsed = earlier + time.monotonic() - begin
        progress = step / arguments.steps if arguments.steps else elapsed / budget
        if progress >= 1:
            break
        length = SHORT_CONTEXT if progress < SHORT_SHARE else CONTEXT
        rate = learning_rate_at(progress)
        state, loss = steps[length](state, rows.astype(np.int32), rate)
        step += 1
        smooth = float(loss) if smooth is None else 0.98 * smooth + 0.02 * float(loss)
        if step % 100 == 0:
            speed = step * BATCH_TOKENS / (earlier + time.monotonic() - begin)
            print(
                f"step {step} epoch {epoch} T={length} loss {smooth:.4f} rate {rate:.2e} {speed:.0f} tokens/s"
                f" {progress:.1%}",
                flush=True,
            )
        if elapsed - exported > arguments.export_minutes * 60:
            exported = elapsed
            export_weights(state[0], arguments.out / "model.safetensors")
            if arguments.checkpoint:
                save_checkpoint(arguments.checkpoint, state, step, elapsed)
            print(
                f"step {step}: held-out {held_out_loss(state[0], held_out_rows[:64]):.4f} (64 rows)",
                flush=True,
            )
    export_weights(state[0], arguments.out / "model.safetensors")
    elapsed = earlier + time.monotonic() - begin
    print(
        f"{step} steps, {step * BATCH_TOKENS} tokens, epoch {epoch}, {elapsed / 60:.1f} minutes", flush=True
    )
    return state[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=50.0, help="the learning rate follows the clock")
    parser.add_argument("--steps", type=int, help="the learning rate follows the step instead: reproducible")
    parser.add_argument("--out", type=Path, default=Path("embedded"))
    parser.add_argument("--draft-of", type=Path, help="train a draft model for the model in this folder")
    parser.add_argument(
        "--start", type=Path, help="the folder of a model of this shape that is trained further"
    )
    parser.add_argument("--checkpoint", type=Path, help="an .npz file to continue from and to write")
    parser.add_argument("--export-minutes", type=float, default=4.0)
    parser.add_argument("--benchmark", action="store_true", help="only time a training step")
    parser.add_argument("--report", action="store_true", help="only measure the files in --out")
    arguments = parser.parse_args()
    if arguments.benchmark:
        benchmark()
        return
    warnings.simplefilter("ignore", SyntaxWarning)  # from old escapes in the files that are read
    corpus = read_corpus()
    training = [file for file in corpus if not file.held_out]
    held_out = [file for file in corpus if file.held_out]
    if arguments.report:
        report(arguments.out, Tokenizer.from_file(str(arguments.out / "tokenizer.json")), held_out, None)
        return
    size = sum(len(file.text.encode()) for file in training)
    print(f"corpus: {len(training)} files, {size} bytes; {len(held_out)} files held out", flush=True)
    if arguments.draft_of:
        tokenizer = Tokenizer.from_file(str(arguments.draft_of / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(file.text for file in training)
    export_tokenizer(tokenizer, arguments.out)
    tokenised = tokenise(tokenizer, training)
    whole, pieces, functions = (
        sum(len(document) for file in tokenised for document in file.views[view]) for view in range(3)
    )
    print(f"tokens: whole files {whole}, pieces {pieces}, functions {functions}", flush=True)
    held_out_rows = pack_rows([file.views[0][0] for file in tokenise(tokenizer, held_out)])
    trained = train(tokenised, held_out_rows, arguments)
    report(arguments.out, tokenizer, held_out, trained)


if __name__ == "__main__":
    main()
