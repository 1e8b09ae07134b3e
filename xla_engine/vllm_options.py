"""vLLM's options of `LLM` that are no options here: what each becomes, or why it is refused (`EngineConfig.of`).

The page docs/from_vllm.md prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping

from xla_engine.config import OtherOption

_ONE_PROCESS = "an engine is one process"
_NO_OTHER = "`tensor_parallel_size` is how devices share a model"
_TEXT = "text models only"
VLLM_OPTIONS: Mapping[str, OtherOption] = {
    "gpu_memory_utilization": OtherOption(becomes="memory_utilization", why="is called `memory_utilization`"),
    "num_gpu_blocks_override": OtherOption(becomes="num_blocks", why="is called `num_blocks`"),
    "generation_config": OtherOption(
        accepted=("auto", "vllm", "engine", "model"),
        becomes="generation_config",
        renamed={"auto": "model", "vllm": "engine"},
        why="`auto` is called `model`, `vllm` is called `engine`",
    ),
    "trust_remote_code": OtherOption(why="no code of a checkpoint is ever run"),
    "enforce_eager": OtherOption(why="every program is compiled before the first request"),
    "disable_log_stats": OtherOption(
        why="a log is written where `logging` is configured; `engine.stats()` counts"
    ),
    "use_tqdm_on_load": OtherOption(why="a start shows one line, on a terminal or in a notebook"),
    "download_dir": OtherOption(accepted=(None,), why="the hub's own cache is used; set `HF_HOME`"),
    "disable_custom_all_reduce": OtherOption(why="devices gather and add nothing up"),
    "distributed_executor_backend": OtherOption(accepted=(None, "uni", "mp"), why=_ONE_PROCESS),
    "pipeline_parallel_size": OtherOption(accepted=(1,), why=_NO_OTHER),
    "enable_expert_parallel": OtherOption(accepted=(False,), why=_NO_OTHER),
    "enable_chunked_prefill": OtherOption(
        accepted=(None, True), why="prompts are always read in chunks beside running requests"
    ),
    "async_scheduling": OtherOption(why="is the option `lag`, and on by default"),
    "max_seq_len_to_capture": OtherOption(why="every program covers the whole length"),
    "max_logprobs": OtherOption(
        accepted=tuple(range(21)), why="up to 20 are always possible; the device's table has no room for more"
    ),
    "tokenizer": OtherOption(accepted=(None,), why="the checkpoint's own tokenizer.json is used"),
    "tokenizer_mode": OtherOption(accepted=("auto", "hf"), why="the checkpoint's own tokenizer.json is used"),
    "skip_tokenizer_init": OtherOption(
        accepted=(False,), why="use `SamplingParams(detokenize=False)` for no text"
    ),
    "revision": OtherOption(
        accepted=(None,),
        why="the hub's main revision is loaded; give the directory of another one as the model",
    ),
    "tokenizer_revision": OtherOption(accepted=(None,), why="the tokenizer comes with the model"),
    "load_format": OtherOption(accepted=("auto", "safetensors", "gguf"), why="the files tell their format"),
    "task": OtherOption(
        accepted=("auto", "generate", "embed", "classify", "score"),
        becomes="runner",
        renamed=dict.fromkeys(("embed", "classify", "score"), "pooling"),
        why="is called `runner`; `embed`, `classify` and `score` are `pooling`",
    ),
    "convert": OtherOption(
        accepted=("auto", "none", "embed", "classify"), why='`runner="pooling"` and the checkpoint say it'
    ),
    "override_pooler_config": OtherOption(becomes="pooler_config", why="is called `pooler_config`"),
    "kv_cache_dtype": OtherOption(accepted=("auto",), why="keys and values have the model's type"),
    "cpu_offload_gb": OtherOption(accepted=(0,), why="weights stay on the device"),
    "max_cpu_loras": OtherOption(why="an adapter that made room for another is read from its files again"),
    "lora_dtype": OtherOption(accepted=(None, "auto"), why="adapters have the type of the weights"),
    "fully_sharded_loras": OtherOption(accepted=(False,), why="each device has A whole: it is small"),
    "hf_token": OtherOption(accepted=(None,), why="set `HF_TOKEN`"),
    "limit_mm_per_prompt": OtherOption(accepted=(None, {}), why=_TEXT),
    "mm_processor_kwargs": OtherOption(accepted=(None, {}), why=_TEXT),
    "logits_processors": OtherOption(accepted=(None, []), why="no Python runs between model and sampler"),
    "enable_trace_replay": OtherOption(
        accepted=(False,), why="`xla_engine.LLM.score` gives the log-probabilities of a known continuation"
    ),
    "enable_prompt_embeds": OtherOption(accepted=(False,), why="prompts are texts or token ids"),
    "kv_transfer_config": OtherOption(accepted=(None,), why="an engine computes its cache itself"),
    "config_format": OtherOption(accepted=("auto", "hf"), why="transformers' config.json is read"),
    "profiler_config": OtherOption(
        accepted=(None,), why="`xla_engine.vllm.LLM` takes it; else `engine.start_profile(directory)`"
    ),
    "compilation_config": OtherOption(why="every program is compiled by XLA before the first request"),
    "disable_sliding_window": OtherOption(accepted=(False,), why="windows are part of the model"),
}


def options_table() -> str:
    """The table as Markdown."""
    lines = ["| option of vLLM | accepted | here |", "|---|---|---|"]
    for name, option in VLLM_OPTIONS.items():
        accepted = option.accepted or ()
        values = ", ".join(f"`{value!r}`" for value in accepted) if len(accepted) < 9 else "0 to 20"
        lines.append(f"| `{name}` | {values or 'any value'} | {option.why} |")
    return "\n".join(lines) + "\n"
