"""vLLM's options of `LLM` that are no options here: what each becomes, or why it is refused.

The page docs/from_vllm.md prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOption:
    """One option of vLLM.

    why: what it comes to here, or why other values are refused.
    accepted: the values that are taken; None takes any.
    becomes: the field of `EngineConfig` that takes its value; None leaves the value out.
    renamed: what values are called there.
    """

    why: str
    accepted: tuple[Any, ...] | None = None
    becomes: str | None = None
    renamed: Mapping[Any, Any] = field(default_factory=dict)


_ONE_PROCESS = "an engine is one process"
_NO_OTHER = "`tensor_parallel_size` is how devices share a model"
_TEXT = "text models only"
VLLM_OPTIONS: Mapping[str, VllmOption] = {
    "gpu_memory_utilization": VllmOption(becomes="memory_utilization", why="is called `memory_utilization`"),
    "num_gpu_blocks_override": VllmOption(becomes="num_blocks", why="is called `num_blocks`"),
    "generation_config": VllmOption(
        accepted=("auto", "vllm", "engine", "model"),
        becomes="generation_config",
        renamed={"auto": "model", "vllm": "engine"},
        why="`auto` is called `model`, `vllm` is called `engine`",
    ),
    "trust_remote_code": VllmOption(why="no code of a checkpoint is ever run"),
    "enforce_eager": VllmOption(why="every program is compiled before the first request"),
    "disable_log_stats": VllmOption(
        why="a log is written where `logging` is configured; `engine.stats()` counts"
    ),
    "use_tqdm_on_load": VllmOption(why="a start shows one line, on a terminal or in a notebook"),
    "download_dir": VllmOption(accepted=(None,), why="the hub's own cache is used; set `HF_HOME`"),
    "disable_custom_all_reduce": VllmOption(why="devices gather and add nothing up"),
    "distributed_executor_backend": VllmOption(accepted=(None, "uni", "mp"), why=_ONE_PROCESS),
    "pipeline_parallel_size": VllmOption(accepted=(1,), why=_NO_OTHER),
    "enable_expert_parallel": VllmOption(accepted=(False,), why=_NO_OTHER),
    "enable_chunked_prefill": VllmOption(
        accepted=(None, True), why="prompts are always read in chunks beside running requests"
    ),
    "async_scheduling": VllmOption(why="is the option `lag`, and on by default"),
    "max_seq_len_to_capture": VllmOption(why="every program covers the whole length"),
    "max_logprobs": VllmOption(
        accepted=tuple(range(21)), why="up to 20 are always possible; the device's table has no room for more"
    ),
    "tokenizer": VllmOption(accepted=(None,), why="the checkpoint's own tokenizer.json is used"),
    "tokenizer_mode": VllmOption(accepted=("auto", "hf"), why="the checkpoint's own tokenizer.json is used"),
    "skip_tokenizer_init": VllmOption(
        accepted=(False,), why="use `SamplingParams(detokenize=False)` for no text"
    ),
    "revision": VllmOption(
        accepted=(None,),
        why="the hub's main revision is loaded; give the directory of another one as the model",
    ),
    "tokenizer_revision": VllmOption(accepted=(None,), why="the tokenizer comes with the model"),
    "load_format": VllmOption(accepted=("auto", "safetensors", "gguf"), why="the files tell their format"),
    "task": VllmOption(
        accepted=("auto", "generate", "embed", "classify", "score"),
        becomes="runner",
        renamed=dict.fromkeys(("embed", "classify", "score"), "pooling"),
        why="is called `runner`; `embed`, `classify` and `score` are `pooling`",
    ),
    "convert": VllmOption(
        accepted=("auto", "none", "embed", "classify"), why='`runner="pooling"` and the checkpoint say it'
    ),
    "override_pooler_config": VllmOption(becomes="pooler_config", why="is called `pooler_config`"),
    "kv_cache_dtype": VllmOption(accepted=("auto",), why="keys and values have the model's type"),
    "cpu_offload_gb": VllmOption(accepted=(0,), why="weights stay on the device"),
    "max_cpu_loras": VllmOption(why="an adapter that made room for another is read from its files again"),
    "lora_dtype": VllmOption(accepted=(None, "auto"), why="adapters have the type of the weights"),
    "fully_sharded_loras": VllmOption(accepted=(False,), why="each device has A whole: it is small"),
    "hf_token": VllmOption(accepted=(None,), why="set `HF_TOKEN`"),
    "limit_mm_per_prompt": VllmOption(accepted=(None, {}), why=_TEXT),
    "mm_processor_kwargs": VllmOption(accepted=(None, {}), why=_TEXT),
    "logits_processors": VllmOption(accepted=(None, []), why="no Python runs between model and sampler"),
    "enable_trace_replay": VllmOption(
        accepted=(False,), why="`xla_engine.LLM.score` gives the log-probabilities of a known continuation"
    ),
    "enable_prompt_embeds": VllmOption(accepted=(False,), why="prompts are texts or token ids"),
    "kv_transfer_config": VllmOption(accepted=(None,), why="an engine computes its cache itself"),
    "config_format": VllmOption(accepted=("auto", "hf"), why="transformers' config.json is read"),
    "profiler_config": VllmOption(
        accepted=(None,), why="`xla_engine.vllm.LLM` takes it; else `engine.start_profile(directory)`"
    ),
    "compilation_config": VllmOption(why="every program is compiled by XLA before the first request"),
    "disable_sliding_window": VllmOption(accepted=(False,), why="windows are part of the model"),
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `LLM` as fields of `EngineConfig`. Raises ConfigError for those that can have no effect here."""
    known = {entry.name for entry in fields(EngineConfig)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = VLLM_OPTIONS.get(name)
        target: str | None = name
        if option is not None:
            if option.accepted is not None and value not in option.accepted:
                values = ", ".join(map(shown, option.accepted)) if len(option.accepted) < 9 else "0 to 20"
                raise ConfigError(f"{name}={shown(value)} is not possible here ({values} is): {option.why}")
            target, value = option.becomes, option.renamed.get(value, value) if option.renamed else value
        elif name not in known:
            hint = did_you_mean(name, sorted(known | VLLM_OPTIONS.keys()))
            raise ConfigError(
                f"unknown option {shown(name)}{hint or '; see EngineConfig for those there are'}"
            )
        if target is None:
            continue
        if target in found:
            raise ConfigError(f"{name} and {target} are one option; give it once")
        found[target] = value
    return found


def options_table() -> str:
    """The table as Markdown."""
    lines = ["| option of vLLM | accepted | here |", "|---|---|---|"]
    for name, option in VLLM_OPTIONS.items():
        accepted = option.accepted or ()
        values = ", ".join(f"`{value!r}`" for value in accepted) if len(accepted) < 9 else "0 to 20"
        lines.append(f"| `{name}` | {values or 'any value'} | {option.why} |")
    return "\n".join(lines) + "\n"
