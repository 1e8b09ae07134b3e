"""Options of llama.cpp and vLLM that this command line does not have: what to write instead, or why there is none."""

from collections.abc import Collection, Sequence

from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.vllm_options import VLLM_OPTIONS

_CONTEXT = "use --max-model-len N"
_LAYERS = (
    "there is nothing to set: a model runs as a whole on one device, which is the GPU if jax has its plugin"
)
_THREADS = "all cores of the process are used; start it with `taskset` or `numactl` to use fewer"
_STEP = "use --max-num-batched-tokens N, the tokens of a step"
_KEYS = "use --kv-cache-dtype int8 for keys and values in eight bits"
_SLOTS = "use --max-num-seqs N"
_MODEL = "use --model, with OWNER/NAME or OWNER/NAME:Q8_0 for a model of the Hugging Face hub"
_LIMIT = "use --max-tokens N"
_DRAFT = 'use --speculative-config \'{"method": "draft_model", "model": "..."}\''
_LORA = "use --enable-lora --lora-modules NAME=PATH, and NAME as the model of a request"
_ALWAYS = "there is nothing to set: this is always so"
_LLAMA_CPP = {
    **dict.fromkeys(("-c", "--ctx-size", "--n-ctx"), _CONTEXT),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers", "-ts", "--tensor-split", "-mg", "--main-gpu"), _LAYERS),
    **dict.fromkeys(("-t", "--threads", "-tb", "--threads-batch", "-C", "--cpu-mask"), _THREADS),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _STEP),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), _KEYS),
    **dict.fromkeys(("-np", "--parallel"), _SLOTS),
    **dict.fromkeys(("-m", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), _MODEL),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), _LIMIT),
    **dict.fromkeys(("-md", "--model-draft", "--draft", "--draft-max"), _DRAFT),
    **dict.fromkeys(("--lora", "--lora-scaled"), _LORA),
    **dict.fromkeys(("-fa", "--flash-attn", "--jinja", "-cb", "--cont-batching", "--mlock", "-kvu"), _ALWAYS),
    **dict.fromkeys(("--no-mmap", "--mmap"), "files are memory-mapped, and weights are copied to the device"),
    **dict.fromkeys(("-p",), "use --prompt TEXT with `run`"),
    **dict.fromkeys(("-s",), "use --seed N"),
    **dict.fromkeys(("--temp",), "use --temperature T"),
    **dict.fromkeys(("-a", "--alias"), "use --served-model-name NAME with `serve`"),
    **dict.fromkeys(("--api-key",), "use --api-key-file FILE with `serve`, or set XLA_ENGINE_API_KEY"),
    **dict.fromkeys(("--top-k", "--top-p", "--min-p", "--repeat-penalty"), (
        "use --override-generation-config '{\"top_p\": 0.9}', with the names of docs/sampling.md"
    )),
    **dict.fromkeys(("--mmproj",), "pictures need a Hugging Face directory; docs/images.md lists the models"),
}  # fmt: skip
_VLLM = {
    **dict.fromkeys(("-tp", "--tensor-parallel"), "use --tensor-parallel-size N"),
    **dict.fromkeys(("-dp", "--data-parallel"), "use --data-parallel-size N"),
    **dict.fromkeys(
        ("-pp", "-ep", "--pipeline-parallel"), "use --tensor-parallel-size N to split a model over devices"
    ),
    **dict.fromkeys(("-q",), "use --quantization NAME"),
}


def other_name(arguments: Sequence[str], known: Collection[str]) -> str | None:
    """What to say of the first argument that is an option elsewhere, or that looks like one of `known`; None if there
    is none."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not flag.startswith("-") or flag in known:
            continue
        if (advice := _LLAMA_CPP.get(flag) or _VLLM.get(flag) or _from_vllm(flag, known)) is not None:
            return f"No such option: {flag}; {advice}."
        if hint := did_you_mean(flag, known):
            return f"No such option: {flag}{hint}"
    return None


def _from_vllm(flag: str, known: Collection[str]) -> str | None:
    option = VLLM_OPTIONS.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
    if option is None:
        return None
    ours = f"--{(option.becomes or '').replace('_', '-')}"
    return f"use {ours}" if ours in known and ours != flag else option.why.replace("`", "")
