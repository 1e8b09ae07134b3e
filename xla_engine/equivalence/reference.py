"""An independent reference for users: a decoder's forward pass in NumPy and float32, written to be read.

It shares no code with the engine, neither kernels nor graphs, nor the loader of its files (`reference_files`). There
is no cache, batch or sampler: whole sequences go through one layer after the other, whose weights are read when its
turn comes. What the architectures do differently stands in the functions about config.json, in the words of
transformers' configurations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from xla_engine.equivalence.reference_alternating import (
    alternating_layer,
    layer_inputs,
    of_input,
    one,
    several,
)
from xla_engine.equivalence.reference_arrays import (
    attend,
    capped,
    convolved,
    gelu_tanh,
    of_best_groups,
    rms_norm,
    rotated,
    sigmoid,
    silu,
    softmax,
)
from xla_engine.equivalence.reference_delta import delta_net, kimi_delta, kimi_names
from xla_engine.equivalence.reference_files import Array, ReferenceFiles
from xla_engine.equivalence.reference_mamba import MAMBA, Parts, layer_count, mamba_layer
from xla_engine.equivalence.reference_rotary import Config, UnknownArchitectureError, frequencies

ARCHITECTURES = (
    *("llama", "smollm3", "mistral", "ministral", "granite", "phi3", "qwen2", "qwen3", "qwen3_vl_text"),
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "cohere",
        "cohere2",
        "mixtral",
        "qwen3_moe",
    ),
    *("gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "seed_oss", "ernie4_5", "helium"),
    *("gemma4_text", "exaone4", "glm", "glm4", "glm4_moe", "ministral3", "stablelm", "starcoder2", "phi"),
    *("lfm2", "lfm2_moe", "deepseek_v2", "deepseek_v3", "deepseek_ocr2_text", "glm4_moe_lite", "kimi_linear"),
    *("hunyuan_v1_dense", "qwen3_vl_moe_text", "gemma3n_text", "glm_ocr_text", "paddleocr_vl_text"),
    *MAMBA,
)
_GEMMA = ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text")
_LATER_GEMMA = ("gemma3n_text", "gemma4_text")
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ADJACENT = ("ernie4_5", "helium", "glm", "glm4", "glm_ocr_text")  # their rotary pairs are neighbours
_CENTRED = ("cohere", "cohere2", "stablelm", "starcoder2", "phi")  # LayerNorm in place of RMSNorm
_PLAIN = {"phi": ("fc1", "fc2"), "starcoder2": ("c_fc", "c_proj")}
_FINAL_NORM = {"phi": "final_layernorm", "lfm2": "embedding_norm", "lfm2_moe": "embedding_norm"}
_FINAL_NORM |= {"falcon_h1": "final_layernorm", "nemotron_h": "norm_f", "mamba2": "norm_f"}
_ATTENDED = {"phi": "dense", "lfm2": "out_proj", "lfm2_moe": "out_proj"}  # the last product of attention
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
_BY_SIGMOIDS = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "kimi_linear")  # experts are chosen so
_BY_SOFTMAX = ("deepseek_v2", "deepseek_ocr2_text")  # over all experts, in groups only if asked for
_SHARED = ("glm4_moe", "deepseek_ocr2_text", *_LATENT)  # an expert of all tokens stands beside those chosen
_LFM2 = ("lfm2", "lfm2_moe")


class Reference:
    """Logits of one model.

    context_length: the longest request, by which "dynamic" and "longrope" choose their angles.

    Raises UnknownArchitectureError.
    """

    def __init__(self, files: ReferenceFiles, context_length: int) -> None:
        if (kind := files.config.get("model_type")) not in ARCHITECTURES:
            raise UnknownArchitectureError(
                f"the reference does not know {kind!r}. It knows {', '.join(ARCHITECTURES)}"
            )
        self._files, self._config, self._context_length = files, kimi_names(files.config), context_length
        self._stored: dict[int, tuple[Array, Array]] = {}  # keys and values that later layers see, too
        self._inputs: Array | None = None  # of Gemma 3n and 4, [N, layers, P]

    def logits(
        self,
        sequences: Sequence[Sequence[int]],
        firsts: Sequence[int],
        progress: Callable[[], None] = lambda: None,
    ) -> Iterator[Array]:
        """For each of the S sequences, the logits after its positions from `firsts[s]` on: float32 `[n, V]`.

        progress: called after each layer.
        """
        c, read = self._config, self._files.read
        embedding = read("embed_tokens")
        streams = [embedding[list(tokens)] * np.float32(embedding_factor(c)) for tokens in sequences]
        del embedding
        ends = np.cumsum([len(each) for each in streams])[:-1]
        x = np.concatenate(streams)  # [N, D], the residual stream of all sequences
        self._stored = {}
        parts, alternates = self._parts(), c["model_type"] == "gemma3n_text"
        self._inputs = layer_inputs(c, parts, np.concatenate([list(each) for each in sequences]), x)
        x = several(c, parts, x) if alternates else x
        for index in range(layer_count(c)):
            x = self._layer(x, ends, index)
            progress()
        x = one(c, parts, x) if alternates else x
        x = self._norm(x, _FINAL_NORM.get(c["model_type"], "norm"))
        tied = c.get("tie_word_embeddings") or not self._files.has("lm_head")
        head = read("embed_tokens" if tied else "lm_head")
        for stream, first in zip(np.split(x, ends), firsts, strict=True):
            logits = stream[first:] @ head.T * np.float32(logit_factor(c))
            if self._files.has("lm_head.bias"):
                logits += self._files.read("lm_head.bias")
            yield capped(logits, final_cap(c))

    def _layer(self, x: Array, ends: Array, index: int) -> Array:
        """The residual stream `[N, D]` after layer `index`. Sequences end before rows `ends`."""
        c, name = self._config, f"layers.{index}."
        factor = np.float32(c.get("residual_multiplier") or 1)
        parts = self._parts()
        recurrent = self._files.has(f"{name}linear_attn.A_log")
        mixer = partial(delta_net, c, parts) if recurrent else self._attention
        if c["model_type"] in _LATENT:
            mixer = self._latent_attention
            if self._files.has(f"{name}self_attn.A_log"):
                mixer = partial(kimi_delta, c, parts)
        if c["model_type"] in MAMBA:
            return mamba_layer(c, parts, x, ends, index)
        if c["model_type"] == "gemma3n_text":
            return alternating_layer(c, parts, self._inputs, x, ends, index)
        mlp = self._experts if self._files.has(self._router(name)) else self._mlp
        if c["model_type"] in _LFM2:
            mixer = self._attention if self._files.has(f"{name}self_attn.q_proj") else self._convolution
            x = x + mixer(self._norm(x, f"{name}operator_norm"), ends, index)
            return x + mlp(self._norm(x, f"{name}ffn_norm"), name)
        if c["model_type"] in ("cohere", "cohere2", "phi") or c.get(
            "use_parallel_residual"
        ):  # one beside the other
            normed = self._norm(x, f"{name}input_layernorm")
            return x + mixer(normed, ends, index) + mlp(normed, name)
        if c["model_type"] == "olmo_hybrid" and recurrent:
            x = x + mixer(self._norm(x, f"{name}attention_layer_norm"), ends, index)
            return x + mlp(self._norm(x, f"{name}feedforward_layer_norm"), name)
        if c["model_type"] in ("olmo2", "olmo3", "olmo_hybrid", "exaone4"):  # norms after, none before
            x = x + self._norm(mixer(x, ends, index), f"{name}post_attention_layernorm")
            return x + self._norm(mlp(x, name), f"{name}post_feedforward_layernorm")
        mixed = mixer(self._norm(x, f"{name}input_layernorm"), ends, index)
        if c["model_type"] in ("gemma2", "gemma3_text", "gemma4_text"):  # norms before and after
            x = x + self._norm(mixed, f"{name}post_attention_layernorm")
            out = mlp(self._norm(x, f"{name}pre_feedforward_layernorm"), name)
            out = self._beside(x, out, name) if self._files.has(f"{name}router.proj") else out
            x = x + self._norm(out, f"{name}post_feedforward_layernorm")
            return self._with_input(x, index) if c["model_type"] == "gemma4_text" else x
        if c["model_type"] in ("glm4", "glm_ocr_text"):  # the same by other names
            x = x + self._norm(mixed, f"{name}post_self_attn_layernorm")
            out = mlp(self._norm(x, f"{name}post_attention_layernorm"), name)
            return x + self._norm(out, f"{name}post_mlp_layernorm")
        x = x + factor * mixed
        return x + factor * mlp(self._norm(x, f"{name}post_attention_layernorm"), name)

    def _parts(self) -> Parts:
        return Parts(self._files, self._linear, self._norm, self._attention, epsilon(self._config))

    def _beside(self, x: Array, out: Array, name: str) -> Array:
        """What Gemma 4's MLP, `out`, and the experts beside it make of the residual stream `x [N, D]`."""
        c, read = self._config, self._files.read
        asked = rms_norm(x, read(f"{name}router.scale"), epsilon(c)) / np.float32(math.sqrt(x.shape[1]))
        scores = self._linear(asked, f"{name}router.proj")  # [N, E]
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : c["top_k_experts"]]  # [N, K]
        weights = softmax(np.take_along_axis(scores, chosen, axis=1))
        weights = weights * read(f"{name}router.per_expert_scale")[chosen]
        given, total = self._norm(x, f"{name}pre_feedforward_layernorm_2"), np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            if self._files.has(f"{name}experts.gate_up_proj"):  # all in one, [E, 2 F, D] and [E, D, F]
                both, down = (read(f"{name}experts.{part}_proj")[expert] for part in ("gate_up", "down"))
                gate, up = np.split(given[rows] @ both.T, 2, axis=1)
                made = gelu_tanh(gate) * up @ down.T
            else:
                made = self._mlp(given[rows], name, f"experts.{expert}.")
            total[rows] += weights[rows, places, None] * made
        dense = self._norm(out, f"{name}post_feedforward_layernorm_1")
        return dense + self._norm(total, f"{name}post_feedforward_layernorm_2")

    def _with_input(self, x: Array, index: int) -> Array:
        """`x [N, D]` with what the embeddings for this layer add, times the layer's own factor."""
        x = x if self._inputs is None else x + of_input(self._parts(), self._inputs, x, index)
        return np.asarray(x * self._files.read(f"layers.{index}.layer_scalar"))

    def _linear(self, x: Array, name: str) -> Array:
        """`x [N, D]` times a weight `[F, D]`, plus the bias if there is one: `[N, F]`."""
        out: Array = x @ self._files.read(name).T
        return out + self._files.read(f"{name}.bias") if self._files.has(f"{name}.bias") else out

    def _norm(self, x: Array, name: str) -> Array:
        """RMSNorm or LayerNorm, plus the bias if there is one; Gemma and Qwen3-Next store weights less one."""
        c, weight = self._config, self._files.read(name)
        less_one = c["model_type"] in (*_GEMMA, *_HYBRID) and c["model_type"] not in _LATER_GEMMA
        if less_one and not self._files.norms_whole:
            weight = weight + 1
        if c["model_type"] in _CENTRED:
            x = x - x.mean(axis=-1, keepdims=True)
        out = rms_norm(x, weight, epsilon(c))
        return out + self._files.read(f"{name}.bias") if self._files.has(f"{name}.bias") else out

    def _attention(self, x: Array, ends: Array, index: int) -> Array:
        c, name, read, has = self._config, f"layers.{index}.self_attn.", self._files.read, self._files.has
        name = f"layers.{index}.mixer." if c["model_type"] == "nemotron_h" else name
        heads, kv_heads, width = c["num_attention_heads"], key_heads(c), head_dim(c, index)
        source = keys_of(c, index)
        if has(f"{name}qkv_proj"):  # Phi 3: one weight
            sizes = np.cumsum([heads * width, kv_heads * width])
            q, k, v = np.split(self._linear(x, f"{name}qkv_proj"), sizes, axis=1)
        else:
            q = k = v = self._linear(x, f"{name}q_proj")
            if source == index:  # otherwise an earlier layer's are taken below
                k = self._linear(x, f"{name}k_proj")
                v = (
                    self._linear(x, f"{name}v_proj") if has(f"{name}v_proj") else k
                )  # Gemma 4's keys may be both
        gate = None
        if c["model_type"] in _HYBRID:  # each head's query, then its gate
            q, gate = np.split(q.reshape(len(x), heads, 2 * width), 2, axis=2)
        norms = "layernorm" if c["model_type"] in _LFM2 else "norm"
        per_head = has(f"{name}q_{norms}") and read(f"{name}q_{norms}").size == width
        if has(f"{name}q_norm") and not per_head:  # OLMo: over all heads together
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        q, k, v = (each.reshape(len(x), -1, width) for each in (q, k, v))
        if per_head:
            q = self._norm(q, f"{name}q_{norms}")
            v = rms_norm(v, np.ones(width, np.float32), epsilon(c)) if c["model_type"] in _LATER_GEMMA else v
            k = self._norm(k, f"{name}k_{norms}") if source == index else k
        if source != index:
            k, v = self._stored[source]
        elif sharing_layers(c):
            self._stored[index] = k, v
        k = k * np.float32(c.get("key_multiplier") or 1)  # Falcon-H1
        angles, factor = rotary(c, index, self._context_length)
        sinks = read(f"{name}sinks") if has(f"{name}sinks") else None
        adjacent = self._files.rotary_pairs_adjacent or c["model_type"] in _ADJACENT

        def turn(x: Array, part: str) -> Array:
            x = rotated(x, angles=angles, factor=factor, adjacent=adjacent)
            late = f"{name}{part}_layernorm"  # Hunyuan's norms come behind the rotation
            return self._norm(x, late) if c["model_type"] == "hunyuan_v1_dense" else x

        out = np.concatenate(
            [
                attend(
                    turn(q, "query") * query_factors(c, len(q)),
                    turn(k, "key"),
                    v,
                    attention_scale(c),
                    window(c, index),
                    attention_cap(c),
                    sinks,
                )
                for q, k, v in zip(*(np.split(each, ends) for each in (q, k, v)), strict=True)
            ]
        )
        out = out if gate is None else out * sigmoid(gate)
        return self._linear(out.reshape(len(x), -1), name + _ATTENDED.get(c["model_type"], "o_proj"))

    def _latent_attention(self, x: Array, ends: Array, index: int) -> Array:
        """DeepSeek's latent attention: keys and values are made of a short vector, and heads share rotary keys."""
        c, name = self._config, f"layers.{index}.self_attn."
        still, turning, heads = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["num_attention_heads"]
        read, ranks = self._files.read, (c.get("q_lora_rank"), c["kv_lora_rank"])
        if ranks[0]:
            short = rms_norm(self._linear(x, f"{name}q_a_proj"), read(f"{name}q_a_layernorm"), 1e-6)
            q = self._linear(short, f"{name}q_b_proj")
        else:
            q = self._linear(x, f"{name}q_proj")
        short, shared = np.split(self._linear(x, f"{name}kv_a_proj_with_mqa"), [ranks[1]], axis=1)
        short = rms_norm(short, read(f"{name}kv_a_layernorm"), 1e-6)
        made = self._linear(short, f"{name}kv_b_proj").reshape(len(x), heads, -1)
        angles, factor = rotary(c, index, self._context_length)
        turn = partial(
            rotated, angles=angles, factor=factor, adjacent=c.get("rope_interleave", True) is not False
        )
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        share = rope.get("mscale_all_dim") if (rope.get("factor") or 1) > 1 else None
        temperature = 0.1 * share * math.log(rope["factor"]) + 1 if share else 1
        outs = []
        for query, key, common in zip(
            *(np.split(each, ends) for each in (q.reshape(len(x), heads, -1), made, shared)), strict=True
        ):
            common = turn(common.reshape(-1, 1, turning)).repeat(heads, axis=1)
            query = np.concatenate([query[..., :still], turn(query[..., still:])], axis=2)
            keys = np.concatenate([key[..., :still], common], axis=2)
            values = np.zeros_like(keys)  # as wide as keys
            values[..., : c["v_head_dim"]] = key[..., still:]
            scale = float(temperature**2 / math.sqrt(still + turning))
            outs.append(attend(query, keys, values, scale, None, None, None)[..., : c["v_head_dim"]])
        return self._linear(np.concatenate(outs).reshape(len(x), -1), f"{name}o_proj")

    def _mlp(self, x: Array, name: str, part: str = "mlp.") -> Array:
        if self._files.has(f"{name}feed_forward.w1"):
            return self._numbered(x, f"{name}feed_forward.")
        if (plain := _PLAIN.get(self._config["model_type"])) is not None:  # no gate
            hidden = activation(self._config)(self._linear(x, f"{name}{part}{plain[0]}"))
            return self._linear(hidden, f"{name}{part}{plain[1]}")
        if self._files.has(f"{name}{part}gate_proj"):
            gate, up = (self._linear(x, f"{name}{part}{each}_proj") for each in ("gate", "up"))
        else:  # Phi 3: one weight
            gate, up = np.split(self._linear(x, f"{name}{part}gate_up_proj"), 2, axis=1)
        return self._linear(activation(self._config)(gate) * up, f"{name}{part}down_proj")

    def _numbered(self, x: Array, name: str) -> Array:
        """An MLP whose gate, last product and up are w1, w2 and w3 (Mixtral, LFM2)."""
        gate, up = self._linear(x, f"{name}w1"), self._linear(x, f"{name}w3")
        return self._linear(activation(self._config)(gate) * up, f"{name}w2")

    def _router(self, name: str) -> str:
        kind = self._config["model_type"]
        router = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}
        router |= {"lfm2_moe": "feed_forward.gate", "kimi_linear": "block_sparse_moe.gate"}
        return name + router.get(kind, "mlp.gate")

    def _experts(self, x: Array, name: str) -> Array:
        """A mixture of experts: each token takes the ones that the router scores highest."""
        c, kind = self._config, self._config["model_type"]
        scores = self._linear(x, self._router(name))  # [N, E]
        count = c.get("num_experts_per_tok") or {"mixtral": 2, "gpt_oss": 4}.get(kind, 8)
        correction = dict.fromkeys(_BY_SIGMOIDS, "mlp.gate.e_score_correction_bias")
        correction["lfm2_moe"] = "feed_forward.expert_bias"
        correction["kimi_linear"] = "block_sparse_moe.gate.e_score_correction_bias"
        if kind in correction:  # sigmoids, and a correction that only chooses
            scores = sigmoid(scores)
        corrected = scores + self._files.read(name + correction[kind]) if kind in correction else scores
        if kind in _SHARED:
            corrected = of_best_groups(corrected, *groups(c), best=2 if kind in correction else 1)
        chosen = np.argsort(-corrected, axis=1, kind="stable")[:, :count]  # [N, K]
        # Mixtral and gpt-oss weigh by a softmax over the chosen; the others, unless told so, over all.
        renormalised = c.get("norm_topk_prob", kind in (*_HYBRID, "qwen3_vl_moe_text"))
        renormalised = (renormalised and kind not in _BY_SOFTMAX) or kind in ("mixtral", "gpt_oss")
        among = np.take_along_axis(scores, chosen, axis=1) if renormalised else scores
        if kind in correction:
            among = np.take_along_axis(scores, chosen, axis=1)
            total = among.sum(axis=1, keepdims=True) if c.get("norm_topk_prob", True) else np.float32(1)
            weights = among / total * np.float32(c.get("routed_scaling_factor") or 1)
        else:
            weights = softmax(among) if renormalised else np.take_along_axis(softmax(among), chosen, axis=1)
            weights = weights * np.float32(c.get("routed_scaling_factor") or 1)
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            out[rows] += weights[rows, places, None] * self._expert(x[rows], name, int(expert))
        if kind in _SHARED:
            part = "block_sparse_moe" if kind == "kimi_linear" else "mlp"
            out += self._mlp(x, name, f"{part}.shared_experts.")
        if kind in _HYBRID:  # the same, with a gate
            shared = self._mlp(x, name, "mlp.shared_expert.")
            out += sigmoid(self._linear(x, f"{name}mlp.shared_expert_gate")) * shared
        return out

    def _expert(self, x: Array, name: str, expert: int) -> Array:
        kind, has = self._config["model_type"], self._files.has
        if kind in ("mixtral", "lfm2_moe", "kimi_linear"):
            part = "feed_forward" if kind == "lfm2_moe" else "block_sparse_moe"
            return self._numbered(x, f"{name}{part}.experts.{expert}.")
        if kind == "qwen3_vl_moe_text":  # [E, D, 2 F], gates first, and [E, F, D]; or both as other weights
            part = f"{name}mlp.experts."
            weights = [self._files.read(f"{part}{each}_proj")[expert] for each in ("gate_up", "down")]
            into, out_of = (each.T for each in weights) if weights[0].shape[1] == x.shape[1] else weights
            gate, up = np.split(x @ into, 2, axis=1)
            return np.asarray(silu(gate) * up @ out_of)
        if kind != "gpt_oss":
            return self._mlp(x, name, f"mlp.experts.{expert}.")
        if has(f"{name}mlp.experts.gate_up_proj"):  # [E, D, 2 F], gates and ups in turn
            part = f"{name}mlp.experts."
            both = x @ self._files.read(f"{part}gate_up_proj")[expert]
            both += self._files.read(f"{part}gate_up_proj_bias")[expert]
            gate, up = both[:, ::2], both[:, 1::2]
        else:  # GGUF files have them apart
            part = f"{name}mlp.experts.{expert}."
            gate, up = (self._linear(x, f"{part}{each}_proj") for each in ("gate", "up"))
        limit = np.float32(self._config.get("swiglu_limit") or 7)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        hidden = (up + 1) * gate * sigmoid(np.float32(1.702) * gate)
        if not has(f"{name}mlp.experts.gate_up_proj"):
            return self._linear(hidden, f"{part}down_proj")
        down: Array = hidden @ self._files.read(f"{part}down_proj")[expert]
        return down + self._files.read(f"{part}down_proj_bias")[expert]

    def _convolution(self, x: Array, ends: Array, index: int) -> Array:
        """A short gated convolution (LFM2)."""
        name, has = f"layers.{index}.conv.", self._files.has
        before, behind, x = np.split(self._linear(x, f"{name}in_proj"), 3, axis=1)
        filters = self._files.read(f"{name}conv").reshape(x.shape[1], -1)
        out = np.concatenate([convolved(each, filters) for each in np.split(before * x, ends)])
        if has(f"{name}conv.bias"):
            out += self._files.read(f"{name}conv.bias")
        return self._linear(behind * out, f"{name}out_proj")


# What config.json says.


def epsilon(c: Config) -> float:
    if c["model_type"] in _CENTRED:
        return float(c.get("layer_norm_eps") or c.get("norm_epsilon") or 1e-5)
    late = [*("phi3", "olmo2", "olmo3", "mixtral", "gpt_oss", "ernie4_5", "exaone4", "ministral3")]
    late += ["glm4_moe", "glm4_moe_lite", "kimi_linear"]
    usual = {**dict.fromkeys(late, 1e-5), **dict.fromkeys(("glm", "glm4"), 1.5625e-7), "helium": 1e-8}
    if c["model_type"] in _LFM2:
        return float(c.get("norm_eps") or 1e-5)
    if c["model_type"] in ("nemotron_h", "mamba2"):
        return float(c.get("layer_norm_epsilon") or 1e-5)
    return float(c.get("rms_norm_eps") or usual.get(c["model_type"], 1e-6))


def activation(c: Config) -> Callable[[Array], Array]:
    default = "gelu_pytorch_tanh" if c["model_type"] in (*_GEMMA, *_PLAIN) else "silu"
    name = c.get("hidden_activation") or c.get("hidden_act") or default
    return silu if name in ("silu", "swish") else gelu_tanh


def groups(c: Config) -> tuple[int, int]:
    """How many groups experts stand in, and from how many of them a token takes its own."""
    if c["model_type"] in _BY_SOFTMAX and c.get("topk_method") != "group_limited_greedy":
        return 1, 1
    count, chosen = (8, 4) if c["model_type"] == "deepseek_v3" else (1, 1)
    return int(c.get("n_group") or count), int(c.get("topk_group") or chosen)


def sharing_layers(c: Config) -> int:
    """How many of the last layers have no keys and values of their own."""
    found = c.get("num_kv_shared_layers", 15 if c["model_type"] == "gemma3n_text" else 0)
    return int(found or 0)


def keys_of(c: Config, index: int) -> int:
    """The layer whose keys and values a layer attends to: the last of its type that has its own (Gemma 3n and 4)."""
    first = layer_count(c) - sharing_layers(c)
    if index < first:
        return index
    return max(at for at in range(first) if slides(c, at) == slides(c, index))


def head_dim(c: Config, index: int | None = None) -> int:
    if c["model_type"] == "gemma4_text" and index is not None and not slides(c, index):
        own = (c.get("per_layer_config") or {}).get(str(index)) or {}
        return int(own.get("head_dim") or c.get("global_head_dim") or 512)
    if c["model_type"] in _LATENT:
        return int(c.get("qk_rope_head_dim") or 64)  # the part that turns
    wide = ("qwen3", "seed_oss", "ernie4_5", "helium", "glm", "glm4")
    default = {**dict.fromkeys(_GEMMA, 256), **dict.fromkeys(wide, 128), **dict.fromkeys(_HYBRID, 256)}
    even = c["hidden_size"] // c["num_attention_heads"]
    return int(c.get("head_dim") or default.get(c["model_type"], even))


def key_heads(c: Config) -> int:
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def embedding_factor(c: Config) -> float:
    return math.sqrt(c["hidden_size"]) if c["model_type"] in _GEMMA else c.get("embedding_multiplier") or 1


def logit_factor(c: Config) -> float:
    if c["model_type"] in ("cohere", "cohere2"):
        return float(c.get("logit_scale") or 0.0625)
    if c["model_type"] == "falcon_h1":
        return float(c.get("lm_head_multiplier") or 1)
    return 1 / float(c.get("logits_scaling") or 1)


def attention_scale(c: Config) -> float:
    if c["model_type"] in _LATER_GEMMA:
        return 1.0
    if c["model_type"] in ("gemma2", "gemma3_text"):
        return float((c.get("query_pre_attn_scalar") or 256) ** -0.5)
    return float(c.get("attention_multiplier") or head_dim(c) ** -0.5)


def query_factors(c: Config, length: int) -> Array:
    """What multiplies the queries of each position, `[length, 1, 1]`: a temperature that grows with the context."""
    rope = c.get("rope_parameters") or {}
    beta = rope.get("llama_4_scaling_beta") if c["model_type"] == "ministral3" else None
    contexts = np.arange(length) // (rope.get("original_max_position_embeddings") or length)
    factors = 1 + np.float32(beta or 0) * np.log1p(contexts.astype(np.float32))
    return factors.astype(np.float32)[:, None, None]


def attention_cap(c: Config) -> float | None:
    return c.get("attn_logit_softcapping", 50.0) if c["model_type"] == "gemma2" else None


def final_cap(c: Config) -> float | None:
    default = 30.0 if c["model_type"] in ("gemma2", "gemma3n_text") else None
    return c.get("final_logit_softcapping", default) if c["model_type"] in _GEMMA else None


def slides(c: Config, index: int) -> bool:
    """Whether a layer's attention has a window, if the model has one."""
    if c["model_type"] == "gemma4_text" and index + 1 == c["num_hidden_layers"]:
        return False  # whatever the file says
    if (types := c.get("layer_types")) is not None:
        return bool(types[index] == "sliding_attention")
    kind = c["model_type"]
    period = {
        "gemma2": 2,
        "gpt_oss": 2,
        "gemma3_text": 6,
        "gemma3n_text": 5,
        "gemma4_text": 6,
        "olmo3": 4,
        "cohere2": 4,
        "exaone4": 4,
    }.get(kind)
    if period is not None:  # the last of each few layers sees everything
        pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern")
        if isinstance(pattern, str):  # a letter for each layer
            pattern = len(pattern)
        own = ("gemma3_text", "cohere2", "exaone4")
        return bool((index + 1) % (pattern if pattern and kind in own else period))
    if kind in ("qwen2", "qwen3"):
        return bool(index >= c.get("max_window_layers", 28))
    return (
        not rotates(c, index)
        if kind == "smollm3"
        else kind in ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
    )


def window(c: Config, index: int) -> int | None:
    """The most keys that a query of this layer sees; None: all."""
    switched = ("qwen2", "qwen3", "qwen3_vl_text", "smollm3")
    if c["model_type"] in switched and not c.get("use_sliding_window"):
        return None
    usual = {"gpt_oss": 128, "mixtral": None, "phi3": None, "starcoder2": None}
    default = (usual | dict.fromkeys(_LATER_GEMMA, 512)).get(c["model_type"], 4096)
    return c.get("sliding_window", default) if slides(c, index) else None


def rotates(c: Config, index: int) -> bool:
    """Whether a layer has rotary embedding."""
    if c["model_type"] in ("nemotron_h", "granitemoehybrid", "kimi_linear"):
        return c.get("position_embedding_type") == "rope"
    if c["model_type"] == "olmo_hybrid":
        rope = c.get("rope_parameters", {}) or {"rope_theta": None}
        return bool(c.get("rope_theta") or rope.get("rope_theta", "rope_theta" not in c))
    if c["model_type"] == "smollm3":
        flags = c.get("no_rope_layers")
        interval = c.get("no_rope_layer_interval") or 4
        return bool(flags[index] if flags else (index + 1) % interval)
    if c["model_type"] == "exaone4" and c.get("sliding_window", 4096) is None:
        return True
    return c["model_type"] not in ("cohere2", "exaone4") or slides(c, index)


def rotary(c: Config, index: int, context_length: int) -> tuple[Array, float]:
    """The angles of one position, one for each pair of dimensions that turn, and the factor of sines and cosines."""
    kind = c["model_type"]
    if not rotates(c, index):
        return np.zeros(0, np.float32), 1.0
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    sliding = kind in ("gemma3_text", *_LATER_GEMMA, "olmo3") and slides(c, index)
    if kind == "gemma4_text" and not rope:
        rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
    if "full_attention" in rope or "sliding_attention" in rope:  # an object for each type of layer
        rope = rope.get("sliding_attention" if sliding else "full_attention") or {}
    elif sliding:  # the scaling is that of full attention
        local = c.get("rope_local_base_freq") or (
            10000.0 if kind in ("gemma3_text", "gemma3n_text") else None
        )
        rope = {"rope_theta": local or c.get("rope_theta") or rope.get("rope_theta")}
    defaults = {
        **dict.fromkeys(("mixtral", "gemma3_text", *_LFM2), 1e6),
        **dict.fromkeys(_LATER_GEMMA, 10000.0 if sliding else 1e6),
        **dict.fromkeys(("olmo3", "cohere", "qwen3_vl_text", "qwen3_vl_moe_text"), 500000.0),
        **dict.fromkeys(("ernie4_5", "paddleocr_vl_text"), 500000.0),
        "helium": 100000.0,
        "smollm3": 2e6,
        "gpt_oss": 150000.0,
    }
    theta = float(rope.get("rope_theta") or c.get("rope_theta") or defaults.get(kind, 10000.0))
    share = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor")
    usual = {
        **dict.fromkeys(_HYBRID, 0.25),
        **dict.fromkeys(("glm", "glm4", "glm4_moe", "phi"), 0.5),
        "stablelm": 0.25,
    }
    if rope.get("rope_type") == "proportional":  # the first pairs turn, as fast as if all did
        pairs = head_dim(c, index) // 2
        plain = theta ** (-np.arange(pairs) / pairs) / float(rope.get("factor") or 1)
        return np.where(np.arange(pairs) < int((share or 1) * pairs), plain, 0).astype(np.float32), 1.0
    dims = int(head_dim(c, index) * (share or usual.get(kind, 1.0)))
    return frequencies(c, rope, theta, dims, context_length)
