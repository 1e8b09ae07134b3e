"""The configuration of an engine, fixed at start-up."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import PurePath
from typing import Any, Final, Literal, Self

from xla_engine.config_options import by_value, check_ascending, check_value, is_number, option, option_of
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import POOLING_TYPES, whole_spans
from xla_engine.scheduler.policy import POLICIES
from xla_engine.scheduler.user_policy import find_policy
from xla_engine.speculative_config import SpeculativeConfig
from xla_engine.utils.did_you_mean import did_you_mean, naming_fields
from xla_engine.utils.shown import shown

AUTO: Final = "auto"
DEFAULT_MAX_MODEL_LEN = 2048  # the least default, for models that allow more
GENERATION_CONFIGS = ("engine", "model")
RUNNERS = ("auto", "generate", "pooling")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
SMALLEST_KEY_BUCKET = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
ATTENTION_BACKENDS = ("auto", "native", "xla", "gpu", "tpu")
GGUF: Final = "gguf"
GGUF_INT8: Final = "gguf-int8"
KEPT: Final = (GGUF, GGUF_INT8)  # keep the encoding of a quantised file
_OTHER_NAMES: Final = {"packed": GGUF, "packed-int8": GGUF_INT8, "none": None}
# How checkpoints are stored, in vLLM's words: checked against the checkpoint, then the same as AUTO.
STORED_AS: Final = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4")
QUANTIZATIONS = (AUTO, None, "int8", *KEPT, *STORED_AS)
_QUANTIZATION_WORDS = (AUTO, "none", "int8", "packed", "packed-int8", *KEPT, *STORED_AS)
LINEAR_BACKENDS = ("auto", "native", "xla", "gpu")
KV_CACHE_DTYPES = (AUTO, "int8")
ISAS = (AUTO, "amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "none")
BITS = ("machine", "portable")
MAMBA_CACHE_MODES = ("none", "align")
_PORTABLE_PROPOSERS = ("ngram", "suffix")
# The fewest device rows: smaller products use other kernels with other bits (findings/same_bits.md).
SMALLEST_BATCH = 8
# The defaults of saved states (findings/prefix_cache.md).
STATE_INTERVAL = 1024
STATES_PER_SLOT = 2
IMAGE_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOption:
    """An option of another engine, and what happens to it here.

    why: its meaning here, or why other values are refused.
    accepted: the accepted values apart from None, which omits the option; None accepts any.
    becomes: the field of `EngineConfig` that gets the value; None: the value is ignored.
    renamed: translates values.
    """

    why: str
    accepted: tuple[Any, ...] | None = None
    becomes: str | None = None
    renamed: Mapping[Any, Any] = field(default_factory=dict)


@naming_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options; names follow vLLM where it has one.

    max_num_seqs: the most requests decoded together (slots); "auto" takes as many as fit into memory, up to a limit
        for the platform (`xla_engine.runner.sizing`).
    memory_utilization: the share of the memory available at start-up that the engine may use.
    max_model_len: the most tokens of a request, prompt plus generated. None takes the model's limit; while that needs
        more than a quarter of the machine's memory, it is halved, down to 2048.
    dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
    seed: combined with the request id for requests without a seed of their own.
    lag: how many started steps may be unread: 1 overlaps host and device, 0 reads each step at once. 2 is up to 9 %
        faster if steps take a millisecond, but a row that a stop token ends runs one step longer
        (findings/host_time.md).
    chunk_size: prompt tokens per prefill lane. Prompts are cut at its multiples, whatever the load.
    prefill_lanes: lane counts of the prefill programs, ascending. The last is raised if the model's largest picture
        runs in one call and needs more.
    max_num_batched_tokens: the most rows of work per step (decode rows plus padded prompt chunks); None fills the
        largest prefill program once per step.
    key_buckets: key lengths for which attention is compiled, ascending; rounded up to multiples of the span. None
        takes at most three: 256, the whole context, and their geometric mean (findings/kv_cache.md).
    attention_backend: "auto" takes the fastest on this platform; "native" is C++ for the CPU, compiled at first use;
        "xla" is pure JAX and runs anywhere; "gpu" and "tpu" are Pallas kernels for CUDA and for TPUs, which are
        interpreted (slowly, for tests) elsewhere.
    linear_backend: "auto" takes the fastest on this platform; "native" is C++ for the CPU, in bfloat16 or int8; "xla"
        runs anywhere; "gpu" is a Pallas kernel for CUDA in bfloat16, which is interpreted elsewhere.
    quantization: "auto" keeps the weights of a quantised checkpoint (GGUF, AWQ, GPTQ, compressed-tensors) packed if
        the C++ products can, in the form that `xla_engine.runner.weight_form` chooses: "gguf-int8" for dense models.
        Other checkpoints stay as they are. A resolved configuration names the form.
        "none", or None, dequantises them to `dtype`.
        "int8" quantises all matrices, including those of experts, and activations to eight bits: half the
        memory, other tokens, and a small loss (findings/int8.md).
        "gguf" keeps the encoding of a quantised GGUF file: the memory of the file, and the bits of "none"
        (docs/models.md). It needs the C++ products.
        "gguf-int8" keeps it too and quantises activations to eight bits, in groups of 32: faster, with other tokens
        and a small loss. For AWQ, GPTQ and compressed-tensors, the same two are called "packed" and "packed-int8";
        either name does for any file.
        "awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8" and "mxfp4" mean the same as "auto" for a checkpoint
        of that `quant_method`, and are refused for any other.
    kv_cache_dtype: "auto" keeps keys and values in `dtype`; "int8" keeps them in eight bits, with a float32 scale for
        each position and head: half the memory, long contexts decode faster, other tokens, and a small loss. It
        needs the C++ attention in bfloat16.
    max_waiting: the most queued requests, beyond those that fit into free slots; None: unbounded.
    scheduling_policy: the order of the queue: "priority" (by arrival and priority), "fcfs" (by arrival alone),
        "shortest_prompt", "deadline" (the earliest first), "longest_prefix" (longest cached prefix first), or
        "round_robin", under which requests take turns on the slots; `scheduler.policy` states the bounds.
        "package.module:Name" is your own policy, see `scheduler.user_policy`.
    priority_aging: how many arrivals one level of priority is worth; under shortest_prompt, deadline and
        longest_prefix, how many requests may pass the one that waits longest.
    quantum: steps that a request decodes under round_robin before it gives up its slot.
    logprobs_mode: "raw_logprobs" returns log-probabilities of the model's raw logits, "processed_logprobs" those of
        the sampled distribution: after bias, penalties, masks, temperature and truncation (-inf for tokens that cannot
        be sampled; greedy rows have no temperature or truncation).
    generation_config: the sampling defaults of requests without parameters: "engine" for those of `SamplingParams`,
        "model" for those of the checkpoint's generation_config.json.
    enable_prefix_caching: prompts with a cached prefix, of the same `cache_salt`, prefill only the rest. It applies to
        models without sliding windows, with a pool of blocks also to those with them, to those with recurrent layers
        only by `mamba_cache_mode`, and changes no bit.
    mamba_cache_mode: "align" also gives models with recurrent layers a prefix cache: their states are saved at the
        multiples of `mamba_block_size`, where prompts can then begin. It changes no bit. "none" saves none, because a
        state is large (`xla-engine inspect`).
    mamba_block_size: tokens from one saved state to the next, a multiple of `chunk_size` and `block_size`. None takes
        the first such from 1024 on.
    mamba_cache_states: the most saved states; the least recently used is overwritten first. None takes two for every
        slot.
    block_size: tokens of a KV block, the unit of prefix caching and of the block pool.
    num_blocks: size of a pool of KV blocks, which slots take as they grow, and share for common prefixes. Without it,
        each slot has memory for `max_model_len` tokens. With a pool, more requests fit if most are short. When blocks
        run out, the last request in line is preempted and continues later.
    kv_cache_memory_bytes: the memory of the pool, instead of `num_blocks`; "auto" takes what weights and slots leave
        of `memory_utilization`, up to `max_model_len` tokens for every slot.
    prefix_cache_dir: a directory in which blocks of shared prefixes are kept, for later starts and other processes
        (docs/prefix_cache.md). It needs a pool of blocks, and with recurrent layers `mamba_cache_mode`. It changes no
        bit. The files contain prompts in clear.
    prefix_cache_bytes: the most bytes of files there; the least recently used ones are deleted.
    preemption: under fcfs and priority, a request may take the slot of one that is behind it in line; that one
        continues later.
    swap_space: GiB of host memory for the state of preempted requests; if it is full, they are computed again.
    compile_cache: keep compiled programs on disk between runs.
    self_check: check at start-up whether rows, lane counts or key buckets change bits on this machine. With
        `compile_cache`, later starts of the same model, options and programs reuse the result.
    bits: "machine" takes what is fastest here. "portable" gives a request the same tokens and log-probability bits on
        every processor with AVX2, AVX-512 or NEON, and refuses models and options for which that is not known
        (docs/same_bits.md).
    isa: the instruction set of the C++ kernels, "amx", "avx512_bf16", "avx512", "avx2", "neon_bf16" or "neon"; "amx"
        and "neon_bf16" have their own bits, the others sum in the same order. "auto" takes `XLA_ENGINE_ISA` if it is
        set, otherwise the best of this machine; "none" is pure JAX.
    speculative_config: speculative decoding, see `SpeculativeConfig`; it changes no token and no log-probability.
        None: off.
    enable_dry: allow `dry_multiplier` and `penalty_last_n`. This compiles other programs; no bit of requests without
        them changes.
    keep_finished: how many finished requests to keep, with their tokens and log-probabilities in host memory, so that
        `extend` can continue them; the oldest is evicted first. 0 keeps none.
    step_timeout_s: seconds that the start of a step, and then its result, may take. After that the device counts as
        lost, and every request ends with an error. Deadlines are also checked while a step runs. None: no limit.
    phase_timers: measure the phases of each step on the host, for `stats().phases` and step logs.
    tensor_parallel_size: devices that share one model; each has some output features of every weight and some heads of
        the cache (`xla_engine.graphs.sharding`). With the C++ products, no bit depends on it.
    shadow_rate: the share of finished requests that are rerun alone, by plain decode, in a separate row between the
        engine's steps; `stats` counts those that differ (`xla_engine.engine.shadow`). Each of their tokens costs a
        step of one row. 0: off.
    enable_lora: requests may have LoRA adapters, each a different one (docs/adapters.md). This compiles other
        programs; with the C++ products, no bit of requests without an adapter changes.
    max_loras: the number of adapter slots. The cost of a step depends only on the adapters in use.
    max_lora_rank: the highest rank of an adapter.
    image_cache_bytes: room for the features of pictures, for models with a vision tower (docs/images.md). A prompt's
        pictures must fit; those used last stay, so that further questions about a picture do not encode it again. None
        takes 64 MiB; with 0, the tower is not loaded, and prompts have no pictures.
    allowed_local_media_path: a folder; requests may name pictures in it by path. None: no paths.
    allowed_media_domains: hosts, by exact name; requests may name pictures there by http(s) address.
    mm_processor_kwargs: fields of the checkpoint's image processor to replace: `size`, `do_image_splitting`,
        `min_pixels`, `max_pixels` and `max_soft_tokens`, as far as the model has them (docs/images.md).
    runner: "generate" makes text; "pooling" makes one vector, or a classifier's numbers, for each prompt
        (docs/embeddings.md); "auto" pools if the checkpoint is a sequence classifier, has no output head, or has a
        modules.json of sentence-transformers.
    pooler_config: overrides how the model pools: "pooling_type" ("LAST", "MEAN", or "CLS" for encoders) and
        "use_activation".
    hf_overrides: overrides fields of config.json: `rope_parameters`, `rope_scaling`, `rope_theta` and
        `max_position_embeddings`, for example for YaRN; and those that say how a model pools.
    """

    max_num_seqs: int | Literal["auto"] = field(
        default=16,
        metadata=option(
            help="Number of requests decoded together; auto is as many as fit into memory.",
            section="Slots and memory",
            group="slots",
            metavar="N|auto",
            least=1,
            auto=True,
            bits="free",
        ),
    )
    memory_utilization: float = field(
        default=0.9,
        metadata=option(
            help="Use at most this share of the available memory.",
            section="Slots and memory",
            above=0,
            high=1,
            bits="free",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            help="Maximum number of prompt plus generated tokens of a request.  [default: the model's, or what"
            " fits into a quarter of the machine's memory]",
            section="Slots and memory",
            least=2,
            bits="known",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=option(
            help="Dtype of weights and activations; auto is the checkpoint's.",
            section="Model",
            words=("auto", "bfloat16", "float32"),
            bits="known",
        ),
    )
    seed: int = field(default=0, metadata=option(least=-(2**63), bits="known"))
    lag: int = field(default=1, metadata=option(section="Scheduling", least=0, bits="free"))
    chunk_size: int = field(
        default=32,
        metadata=option(
            help="Prompt tokens of a prefill lane, 8 or more: prompts are cut at its multiples, whatever the "
            "load.",
            section="Scheduling",
            metavar="N",
            least=8,
            bits="free",
        ),
    )
    prefill_lanes: tuple[int, ...] = field(
        default=(2, 8),
        metadata=option(
            help="Numbers of lanes of the prefill programs, ascending, with commas between them; a step "
            "computes up to the last of them times --chunk-size prompt tokens.",
            section="Scheduling",
            metavar="N,N",
            bits="free",
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=option(
            help="Maximum number of tokens computed in one step.  [default: all slots and the largest prefill "
            "call]",
            section="Scheduling",
            group="scheduling",
            least=1,
            bits="free",
        ),
    )
    key_buckets: tuple[int, ...] | None = field(default=None, metadata=option(bits="free"))
    logprobs_mode: str = field(default="raw_logprobs", metadata=option(choices=LOGPROBS_MODES, bits="known"))
    generation_config: str = field(
        default="engine", metadata=option(choices=GENERATION_CONFIGS, bits="known")
    )
    attention_backend: str = field(
        default="auto",
        metadata=option(
            help="auto is the fastest on this device; xla is pure JAX.",
            section="Model",
            metavar="NAME",
            choices=ATTENTION_BACKENDS,
            portable=("auto", "native"),
        ),
    )
    linear_backend: str = field(
        default="auto", metadata=option(choices=LINEAR_BACKENDS, portable=("auto", "native"))
    )
    quantization: str | None = field(
        default=AUTO,
        metadata=option(
            help="auto: keep the weights of a quantised checkpoint packed, if this machine can, with "
            "activations in eight bits for dense models: the least memory, the fastest, a small loss. "
            "none: dequantise them. packed or gguf: packed, with the tokens of none. packed-int8 or "
            "gguf-int8: packed, with activations in eight bits. int8: quantise any weights and "
            "activations to eight bits: half the memory, a small loss. The other names say how the "
            "checkpoint is stored: they mean auto, and any other checkpoint is refused.",
            section="Model",
            words=_QUANTIZATION_WORDS,
            bits="known",
            portable=(AUTO, None, "int8", *STORED_AS),
        ),
    )
    kv_cache_dtype: str = field(
        default=AUTO,
        metadata=option(
            help="int8: keep keys and values in eight bits: half the memory, long contexts decode faster, "
            "different tokens, a small loss. auto: as --dtype.",
            section="Slots and memory",
            choices=KV_CACHE_DTYPES,
            late=True,
        ),
    )
    max_waiting: int | None = field(default=None, metadata=option(least=1, bits="free"))
    scheduling_policy: str = field(
        default="priority",
        metadata=option(
            help=f"Which request gets a slot next: {', '.join(POLICIES)}, or your own by its import path.",
            section="Scheduling",
            group="scheduling",
            metavar="POLICY",
            flag="--policy",
            bits="free",
        ),
    )
    priority_aging: int = field(
        default=64,
        metadata=option(
            help="How many later requests may overtake a waiting one: for each level of priority between them,"
            " and under shortest_prompt, deadline and longest_prefix in total.",
            section="Scheduling",
            group="scheduling",
            least=1,
            bits="free",
        ),
    )
    quantum: int = field(
        default=64,
        metadata=option(
            help="Steps in a request's time slice under the policy round_robin.",
            section="Scheduling",
            group="scheduling",
            least=1,
            bits="free",
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=option(
            help="Compute the common beginning of prompts once.", section="Slots and memory", bits="free"
        ),
    )
    mamba_cache_mode: str = field(
        default="none",
        metadata=option(
            help="align: models with recurrent layers also reuse prefixes that prompts share, from states that"
            " are saved every --mamba-block-size tokens.",
            section="Slots and memory",
            choices=MAMBA_CACHE_MODES,
            late=True,
        ),
    )
    mamba_block_size: int | None = field(
        default=None,
        metadata=option(
            help="Tokens from one saved state of recurrent layers to the next.  [default: 1024]",
            section="Slots and memory",
            metavar="N",
            least=1,
            late=True,
        ),
    )
    mamba_cache_states: int | None = field(
        default=None,
        metadata=option(
            help="Maximum number of saved states of recurrent layers.  [default: two for each slot]",
            section="Slots and memory",
            metavar="N",
            least=1,
            late=True,
        ),
    )
    block_size: int = field(
        default=64,
        metadata=option(
            help="Tokens of a KV block, the unit in which prefixes are cached and slots share blocks: "
            f"{', '.join(map(str, BLOCK_SIZES))}.",
            section="Slots and memory",
            metavar="N",
            least=1,
            bits="free",
        ),
    )
    num_blocks: int | None = field(
        default=None,
        metadata=option(
            help="Let slots share N KV blocks of --block-size tokens and allocate them as they grow, instead "
            "of reserving --max-model-len tokens each.",
            section="Slots and memory",
            least=1,
            bits="free",
        ),
    )
    kv_cache_memory_bytes: int | Literal["auto"] | None = field(
        default=None,
        metadata=option(
            help="Like --num-blocks, with as many blocks as fit into N bytes; auto uses the available memory.",
            section="Slots and memory",
            metavar="N|auto",
            least=1,
            auto=True,
            bits="free",
        ),
    )
    prefix_cache_dir: str | None = field(
        default=None,
        metadata=option(
            help="Keep the KV blocks of shared prefixes in files here, for later starts and other processes. "
            "Needs --num-blocks or --kv-cache-memory-bytes. The files contain prompts in clear.",
            section="Slots and memory",
            metavar="DIR",
            compared=False,
            bits="free",
        ),
    )
    prefix_cache_bytes: int = field(
        default=10 << 30,
        metadata=option(
            help="Delete the least recently used of these files beyond N bytes.",
            section="Slots and memory",
            metavar="N",
            least=1,
            compared=False,
            bits="free",
        ),
    )
    preemption: bool = field(
        default=True,
        metadata=option(
            help="Let a waiting request preempt a running one that is behind it in line.",
            section="Scheduling",
            bits="free",
        ),
    )
    swap_space: float = field(
        default=4.0,
        metadata=option(
            help="Host memory for the KV cache of preempted requests; the rest is recomputed.",
            section="Slots and memory",
            metavar="GiB",
            low=0,
            unit="GiB",
            bits="free",
        ),
    )
    compile_cache: bool = field(default=True, metadata=option(bits="free"))
    self_check: bool = field(default=True, metadata=option(bits="free"))
    bits: str = field(
        default="machine",
        metadata=option(
            help="machine: what is fastest here. portable: the same bits on every processor with AVX2, AVX-512"
            " or NEON; what cannot have them is refused.",
            section="Model",
            choices=BITS,
            late=True,
            bits="known",
        ),
    )
    isa: str = field(
        default=AUTO,
        metadata=option(
            help="Instruction set of the C++ kernels, such as avx2; auto is the best one; none is pure JAX.",
            section="Model",
            metavar="NAME",
            choices=ISAS,
            late=True,
            portable=tuple(isa for isa in ISAS if isa != "none"),
        ),
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = field(
        default=None,
        metadata=option(
            help='Draft tokens and verify several in one step, without changing results: \'{"method": '
            '"suffix"}\', "ngram", "mtp", or "draft_model" or "eagle3" with "model"; and '
            '"num_speculative_tokens".',
            section="Scheduling",
            metavar="JSON",
            compared=False,
            bits="free",
        ),
    )
    step_timeout_s: float | None = field(
        default=None,
        metadata=option(
            help="If a step takes longer, treat the device as lost and end every request with an error.  "
            "[default: wait]",
            section="Scheduling",
            group="limits",
            metavar="SECONDS",
            flag="--step-timeout",
            above=0,
            unit="seconds",
            late=True,
            bits="free",
        ),
    )
    phase_timers: bool = field(
        default=False,
        metadata=option(
            help="Measure the host's time in each step, for step logs, the status file and metrics.",
            section="While it runs",
            group="timers",
            no_flag=False,
            compared=False,
            bits="free",
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=option(
            help="Number of devices that share the model; each holds a part of every weight.",
            section="Model",
            metavar="N",
            least=1,
            late=True,
        ),
    )
    keep_finished: int = field(
        default=0,
        metadata=option(
            help="With --stream: keep this many finished requests, so that they can be extended.",
            section="Slots and memory",
            group="kept",
            least=0,
            late=True,
            bits="free",
        ),
    )
    enable_dry: bool = field(
        default=False,
        metadata=option(help="Support dry_multiplier and penalty_last_n in requests.", late=True),
    )
    shadow_rate: float = field(
        default=0.0,
        metadata=option(
            help="Fraction of requests to run again, alone and by plain decode, to check that they get the "
            "same bits.",
            section="Scheduling",
            metavar="SHARE",
            low=0,
            high=1,
            late=True,
            bits="free",
        ),
    )
    enable_lora: bool = field(
        default=False,
        metadata=option(
            help="Let each request use its own LoRA adapter.",
            section="Model",
            group="lora",
            no_flag=False,
            late=True,
        ),
    )
    max_loras: int = field(
        default=1,
        metadata=option(
            help="Maximum number of adapters in memory; at least those of --lora-modules.",
            section="Model",
            group="lora",
            least=1,
            late=True,
        ),
    )
    max_lora_rank: int = field(
        default=16,
        metadata=option(
            help="Highest rank of an adapter.", section="Model", group="lora", least=1, late=True
        ),
    )
    image_cache_bytes: int | None = field(
        default=None,
        metadata=option(
            help="Memory for the features of pictures; with 0, the vision tower is not loaded.  [default: 64 "
            "MiB]",
            section="Pictures",
            metavar="N",
            least=0,
            compared=False,
            bits="free",
        ),
    )
    allowed_local_media_path: str | None = field(
        default=None,
        metadata=option(
            help="Requests may name pictures in this folder by path.",
            section="Pictures",
            metavar="DIR",
            compared=False,
            bits="free",
        ),
    )
    allowed_media_domains: tuple[str, ...] = field(
        default=(),
        metadata=option(
            help="Requests may name pictures on these hosts by address; exact names, with commas between them.",
            section="Pictures",
            metavar="HOSTS",
            compared=False,
            bits="free",
        ),
    )
    runner: str = field(
        default="auto",
        metadata=option(
            help="Generate text, or one vector per prompt; auto follows the checkpoint.",
            section="Model",
            group="pooling",
            choices=RUNNERS,
            late=True,
            portable=("auto", "generate"),
        ),
    )
    pooler_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=option(
            help='Override how the checkpoint pools: \'{"pooling_type": "MEAN"}\'.',
            section="Model",
            group="pooling",
            metavar="JSON",
            late=True,
        ),
    )
    hf_overrides: Mapping[str, Any] | None = field(
        default=None,
        metadata=option(
            help="Override fields of config.json of a pooling model.",
            section="Model",
            group="pooling",
            metavar="JSON",
            late=True,
        ),
    )
    mm_processor_kwargs: Mapping[str, Any] | None = field(
        default=None,
        metadata=option(
            help="Replace fields of the checkpoint's image processor: '{\"max_pixels\": 262144}'.",
            section="Pictures",
            metavar="JSON",
            late=True,
        ),
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = by_value(each, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
            check_value(each, value)
        for rule in (
            self._check_dtype,
            self._check_blocks,
            self._check_prefix_cache,
            self._read_media_access,
            self._read_quantization,
            self._check_policy,
            self._check_states,
            self._read_speculation,
            self._check_pooling,
            self._check_portable,
            self._check_sizes,
        ):
            rule()

    def _check_dtype(self) -> None:
        if not isinstance(self.dtype, str):
            raise ConfigError(f"dtype must be a name, not {shown(self.dtype)}")

    def _check_blocks(self) -> None:
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_memory_bytes both set the number of blocks; give one")
        if self.uses_blocks and self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {self.block_size}"
            )

    def _read_media_access(self) -> None:
        folder, domains = self.allowed_local_media_path, self.allowed_media_domains
        if not isinstance(folder, str | PathLike | None):
            raise ConfigError(f"allowed_local_media_path must be a folder, not {shown(folder)}")
        domains = () if domains is None else domains
        if not isinstance(domains, list | tuple) or not all(isinstance(each, str) for each in domains):
            raise ConfigError(f"allowed_media_domains must be a list of host names, not {shown(domains)}")
        object.__setattr__(self, "allowed_media_domains", tuple(domains))
        object.__setattr__(self, "allowed_local_media_path", str(folder) if folder else None)

    def _read_quantization(self) -> None:
        if isinstance(self.quantization, str) and self.quantization in _OTHER_NAMES:
            object.__setattr__(self, "quantization", _OTHER_NAMES[self.quantization])
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                "quantization must be 'auto', 'none', 'int8', 'packed', 'packed-int8', 'gguf', 'gguf-int8', or the "
                f"checkpoint's own {', '.join(STORED_AS)}, not {shown(self.quantization)}. Quantised checkpoints need "
                "none of these"
            )

    def _check_policy(self) -> None:
        try:
            find_policy(self.scheduling_policy)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _read_speculation(self) -> None:
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))

    def _check_pooling(self) -> None:
        for name in ("pooler_config", "hf_overrides"):
            check_pooling(name, getattr(self, name))
        if not isinstance(self.mm_processor_kwargs, Mapping | None):
            raise ConfigError(
                f"mm_processor_kwargs must be an object of names and values, not {shown(self.mm_processor_kwargs)}"
            )
        of_text = ("speculative_config", "keep_finished", "shadow_rate", "enable_lora")
        if self.pools and (given := [name for name in of_text if getattr(self, name)]):
            raise ConfigError(f"{given[0]} applies to generation only; leave it out")

    def _check_sizes(self) -> None:
        check_ascending("prefill_lanes", self.prefill_lanes)
        if self.key_buckets is not None:
            check_ascending("key_buckets", self.key_buckets)

    def _check_portable(self) -> None:
        """Raise ConfigError for an option whose bits are not known on every processor: a new one, until it is."""
        if not self.is_portable:
            return
        for each in fields(self):
            value, about = getattr(self, each.name), option_of(each)
            is_known = value in about.portable if about.portable else about.bits is not None
            if not is_known and value != each.default:
                raise ConfigError(
                    f"bits 'portable' has no {each.name}={shown(value)}: its bits are not known on every processor. "
                    f"Leave {each.name} out, or use bits 'machine'"
                )
        if (speculation := self.speculation) is not None and speculation.method not in _PORTABLE_PROPOSERS:
            raise ConfigError(
                f"bits 'portable' supports speculation by {' and '.join(_PORTABLE_PROPOSERS)}, not by "
                f"{shown(speculation.method)}"
            )

    def _check_states(self) -> None:
        given = [
            name for name in ("mamba_block_size", "mamba_cache_states") if getattr(self, name) is not None
        ]
        if not self.saves_states:
            if given:
                raise ConfigError(
                    f"{given[0]} needs mamba_cache_mode 'align': add it, or leave {given[0]} out"
                )
            return
        if not self.enable_prefix_caching:
            raise ConfigError("mamba_cache_mode 'align' needs enable_prefix_caching: leave one of them out")
        if self.pools:
            raise ConfigError("mamba_cache_mode 'align' is for requests that generate: leave it out")
        unit = math.lcm(self.chunk_size, self.block_size)
        if self.state_interval % unit:
            raise ConfigError(
                f"mamba_block_size {self.mamba_block_size} is no multiple of {unit}, which chunk_size "
                f"{self.chunk_size} and block_size {self.block_size} need: give "
                f"{-(-self.state_interval // unit) * unit}, or leave it out"
            )

    def _check_prefix_cache(self) -> None:
        if self.prefix_cache_dir is None:
            return
        if isinstance(self.prefix_cache_dir, PurePath):
            object.__setattr__(self, "prefix_cache_dir", str(self.prefix_cache_dir))
        if not isinstance(self.prefix_cache_dir, str) or not self.prefix_cache_dir:
            raise ConfigError(f"prefix_cache_dir must be a directory, not {shown(self.prefix_cache_dir)}")
        if not self.uses_blocks:
            raise ConfigError(
                "prefix_cache_dir keeps blocks of the pool: add kv_cache_memory_bytes 'auto', or give num_blocks"
            )
        if not self.enable_prefix_caching:
            raise ConfigError("prefix_cache_dir needs enable_prefix_caching: leave one of them out")
        if self.tensor_parallel_size > 1:
            raise ConfigError("prefix_cache_dir is for models on one device: leave tensor_parallel_size out")
        if self.pools:
            raise ConfigError("prefix_cache_dir is for requests that generate: leave it out")

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Mapping[str, OtherOption]) -> Self:
        """Build from options by name; `others` translates another engine's. Raises ConfigError for an invalid one."""
        return cls(**own_options(options, others))

    @property
    def num_slots(self) -> int:
        """`max_num_seqs` as a number. Raises ConfigError if it is still "auto"."""
        if self.max_num_seqs == AUTO:
            raise ConfigError('max_num_seqs "auto" is resolved when an engine starts; give a number')
        return self.max_num_seqs

    @property
    def is_portable(self) -> bool:
        """Whether results must have the same bits on every processor."""
        return self.bits == "portable"

    @property
    def pools(self) -> bool:
        """Whether the engine pools prompts instead of generating."""
        return self.runner == "pooling"

    @property
    def uses_blocks(self) -> bool:
        """Whether there is a pool of KV blocks."""
        return self.num_blocks is not None or self.kv_cache_memory_bytes is not None

    @property
    def reuses_slots(self) -> bool:
        """Whether prefixes are cached in slots, not in blocks."""
        return self.enable_prefix_caching and not self.uses_blocks

    @property
    def saves_states(self) -> bool:
        """Whether states of recurrent layers are saved for prompts that share a prefix."""
        return self.mamba_cache_mode == "align"

    @property
    def state_interval(self) -> int:
        """`mamba_block_size` as a number."""
        unit = math.lcm(self.chunk_size, self.block_size)
        return self.mamba_block_size or -(-STATE_INTERVAL // unit) * unit

    @property
    def saved_states(self) -> int:
        """How many states of recurrent layers there is room for."""
        if not self.saves_states:
            return 0
        return self.mamba_cache_states or STATES_PER_SLOT * self.num_slots

    @property
    def parks(self) -> bool:
        """Whether preempted requests may be parked in host memory."""
        return self.preemption or self.uses_blocks

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The speculative configuration; None without speculation."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    @property
    def verify_shapes(self) -> tuple[tuple[int, int], ...]:
        """(lanes, width) of the verify programs."""
        return () if self.speculation is None else self.speculation.shapes(self.num_slots)

    @property
    def device_rows(self) -> int:
        """Rows of the decode program: the slots, one for the shadow probe, and at least SMALLEST_BATCH."""
        return max(self.num_slots + (self.shadow_rate > 0), SMALLEST_BATCH)

    @property
    def head_rows(self) -> int:
        """Rows of output head and sampler in every prefill program."""
        return max(self.prefill_lanes[-1], SMALLEST_BATCH)

    @property
    def call_positions(self) -> int:
        """The most positions that one call writes to one slot."""
        return self.chunk_size * self.prefill_lanes[-1]

    @property
    def max_chunks(self) -> int | None:
        """The most chunks of a step: the lanes of the largest prefill program; None with `max_num_batched_tokens`."""
        return self.prefill_lanes[-1] if self.max_num_batched_tokens is None else None

    @property
    def token_budget(self) -> int:
        """Rows of work per step."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return self.num_slots + self.chunk_size * self.prefill_lanes[-1]

    def context_length(self, model_limit: int) -> int:
        """Positions per slot for a model with this limit. Raises ConfigError if `max_model_len` exceeds it."""
        if self.max_model_len is None:
            return min(model_limit, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > model_limit:
            raise ConfigError(
                f"max_model_len {self.max_model_len} exceeds the model's max_position_embeddings {model_limit}; "
                f"use at most {model_limit}"
            )
        return self.max_model_len

    def buckets(self, context_length: int) -> tuple[int, ...]:
        """Key lengths for which attention is compiled, multiples of the span; the last covers the whole context."""
        longest = whole_spans(context_length)
        sizes = self.key_buckets or (SMALLEST_KEY_BUCKET, round(math.sqrt(SMALLEST_KEY_BUCKET * longest)))
        return (*sorted({whole_spans(size) for size in sizes if whole_spans(size) < longest}), longest)

    def options(self) -> dict[str, Any]:
        """All options by name that are compared with those in files; without speculation, timers, and caches of
        prefixes on disk and of pictures and the places of these, which change no result.

        Options that were added later are omitted if they have their default, so that older files stay valid.
        """
        given = asdict(self)
        return {
            each.name: given[each.name]
            for each in fields(self)
            if option_of(each).compared and not (option_of(each).late and given[each.name] == each.default)
        }

    def bit_options(self) -> dict[str, Any]:
        """All options by name that bits of a result may depend on, as far as is known without the device."""
        bitless = ("step_timeout_s", "keep_finished")
        return {name: value for name, value in self.options().items() if name not in bitless}


# With bits "portable", results may depend on these.
PORTABLE_OPTIONS = frozenset(each.name for each in fields(EngineConfig) if option_of(each).bits == "known")


def own_options(options: Mapping[str, Any], others: Mapping[str, OtherOption]) -> dict[str, Any]:
    """Translate `options` to fields of `EngineConfig`, as in `EngineConfig.of`; omits those that are None."""
    known = {each.name for each in fields(EngineConfig)}
    found: dict[str, Any] = {}
    names: dict[str, str] = {}  # of the options that gave them
    for name, value in options.items():
        option = others.get(name)
        target: str | None = name
        if option is None and name not in known:
            hint = did_you_mean(name, sorted(known | others.keys()))
            raise ConfigError(f"unknown option {shown(name)}{hint or '; EngineConfig lists the options'}")
        if value is None:
            continue
        if option is not None:
            if option.accepted is not None and value not in option.accepted:
                values = ", ".join(map(shown, option.accepted)) if len(option.accepted) < 9 else "0 to 20"
                instead = f" ({values} is)" if values else ""
                raise ConfigError(f"{name}={shown(value)} is not possible here{instead}: {option.why}")
            target = option.becomes
            if isinstance(value, Hashable):
                value = option.renamed.get(value, value)
        if target is None:
            continue
        if target in found:
            raise ConfigError(f"{names[target]} and {name} are the same option; give one of them")
        names[target] = name
        found[target] = value
    return found


_MOST = 1 << 24  # dimensions of a vector, or positions


def _is(kind: Any) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _size(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST


_FIELDS: Mapping[str, Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "pooler_config": {
        "pooling_type": (lambda value: value in POOLING_TYPES, " or ".join(POOLING_TYPES)),
        "use_activation": (_is(bool), "true or false"),
    },
    "hf_overrides": {
        "architectures": (_list_of(_is(str)), "a list of names"),
        "problem_type": (_is(str), "text"),
        "classifier_from_token": (_list_of(_is(str)), "a list of tokens"),
        "is_original_qwen3_reranker": (_is(bool), "true or false"),
        "is_matryoshka": (_is(bool), "true or false"),
        "matryoshka_dimensions": (_list_of(_size), "a list of sizes"),
        "rope_parameters": (_is(Mapping), "an object"),
        "rope_scaling": (_is(Mapping), "an object"),
        "rope_theta": (is_number, "a number"),
        "max_position_embeddings": (_size, "a number of tokens"),
        "max_model_len": (_size, "a number of tokens"),
    },
}


OF_EVERY_MODEL = frozenset(
    ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "max_model_len")
)


def check_pooling(name: str, given: object) -> None:
    """Raise ConfigError unless `given` is None or a mapping with valid fields for the option `name`."""
    known = _FIELDS[name]
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be an object of names and values, not {shown(given)}")
    for key, value in given.items():
        if key not in known:
            remedy = ": edit the checkpoint's config.json" if name == "hf_overrides" else ""
            raise ConfigError(f"{name} may hold {', '.join(known)}, not {shown(key)}{remedy}")
        fits, words = known[key]
        if not fits(value):
            raise ConfigError(f"{key} of {name} must be {words}, not {shown(value)}")
