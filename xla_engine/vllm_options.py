"""vLLM's options of `LLM` that do not exist here: how each is translated, or why it is refused (`EngineConfig.of`).

Every field of vLLM 0.33's `EngineArgs` is either here or a field of `EngineConfig`. The page docs/from_vllm.md prints
this table.
"""

# ruff: noqa: C408 - keywords are easier to read than 200 quoted names
from collections.abc import Mapping
from typing import Any

from xla_engine.config import OtherOption

# Any value is accepted and ignored, because it would change no result.
_HARMLESS = {
    "the engine never runs code from a checkpoint": "trust_remote_code code_revision",
    "XLA compiles every program before the first request": """enforce_eager compilation_config optimization_level
        performance_mode max_seq_len_to_capture cudagraph_capture_sizes max_cudagraph_capture_size
        enable_flashinfer_autotune""",
    "configure Python's `logging` to see the log; `engine.stats()` has the counters": """disable_log_stats
        aggregate_engine_logging enable_log_requests enable_logging_iteration_details jit_monitor_mode
        jit_monitor_verbose""",
    "progress is one line, on a terminal or in a notebook": "use_tqdm_on_load",
    "files are memory-mapped, and each array is read once": """safetensors_load_strategy
        safetensors_prefetch_num_threads safetensors_prefetch_block_size max_parallel_loading_workers
        pt_load_map_location ignore_patterns""",
    "devices gather values; there is no all-reduce": "disable_custom_all_reduce disable_nccl_for_dp_synchronization",
    "an engine runs on one machine, without a network": """master_addr master_port distributed_timeout_seconds
        cpu_distributed_timeout_seconds""",
    "is called `lag`, and is on by default": "async_scheduling",
    "an evicted adapter is read from its files again": "max_cpu_loras",
    "the hash algorithm is fixed; results do not depend on it": "prefix_caching_hash_algo",
    "is an option of `xla-engine serve`; it has no effect offline": "served_model_name",
    "there is one kind of cache and no cascade attention": """disable_cascade_attn
        disable_hybrid_kv_cache_manager""",
    "requests are tokenised in the caller's thread": "renderer_num_workers enable_shm_tensor_arena",
}

# vLLM's default is accepted and anything else is refused, because the engine does not have the feature.
_DEFAULT_ONLY: Mapping[str, Mapping[str, Any]] = {
    "pictures are for the models of docs/images.md, with the checkpoint's own processor": dict(
        limit_mm_per_prompt={}, enable_mm_embeds=False, interleave_mm_strings=False,
        media_io_kwargs={}, mm_processor_cache_gb=4, mm_processor_cache_type="lru", mm_hasher_algorithm="blake3",
        mm_shm_cache_max_object_size_mb=128, mm_encoder_only=False, mm_encoder_tp_mode="weights",
        mm_encoder_attn_backend=None, mm_encoder_attn_dtype=None, mm_encoder_fp8_scale_path=None,
        mm_encoder_fp8_scale_save_path=None, mm_encoder_fp8_scale_save_margin=1.5, skip_mm_profiling=False,
        video_pruning_rate=None, video_pruning_method="evs", mm_tensor_ipc="direct_rpc", mm_processor_device="auto",
        mm_ipc_gpu_memory_gb=0, mm_device_do_normalize=True, default_mm_loras=None, enable_tower_connector_lora=False,
        disable_chunked_mm_input=False, enable_mm_processor_stats=False, language_model_only=False,
        io_processor_plugin=None, ec_transfer_config=None, ec_manager_config={},
    ),
    "use `tensor_parallel_size` to split a model over devices": dict(
        pipeline_parallel_size=1, enable_expert_parallel=False, prefill_context_parallel_size=1,
        decode_context_parallel_size=1, dcp_comm_backend=None, dcp_q_replicate=None, dcp_kv_cache_interleave_size=1,
        cp_kv_cache_interleave_size=None, enable_hc_sp=False, enable_batch_sharded_sampling=None,
        enable_ep_weight_filter=False, all2all_backend="allgather_reducescatter", enable_elastic_ep=False,
        elastic_ep_max_dp_size=None, eplb_config={}, enable_eplb=False, expert_placement_strategy="linear",
        enable_nccl_comm_suspend=False,
    ),
    "`data_parallel_size` starts engines as processes on this machine and needs no further settings": dict(
        nnodes=1, node_rank=0, data_parallel_rank=None, data_parallel_start_rank=None, data_parallel_size_local=None,
        data_parallel_address=None, data_parallel_rpc_port=None, data_parallel_hybrid_lb=False,
        data_parallel_external_lb=False, data_parallel_multi_port_external_lb=False, data_parallel_backend="mp",
        dp_sync_interval=16, enable_dbo=False, ubatch_size=0, dbo_decode_token_threshold=32,
        dbo_prefill_token_threshold=512, _api_process_count=1, _api_process_rank=0, fault_tolerance_config={},
        enable_fault_tolerance=False, watchdog_config={}, ray_workers_use_nsight=False,
    ),
    "bind the process with `taskset` or `numactl`; `JAX_PLATFORMS` and `CUDA_VISIBLE_DEVICES` choose devices": dict(
        numa_bind=False, numa_bind_nodes=None, numa_bind_cpus=None, device_ids=None,
    ),
    "`attention_backend` and `linear_backend` select kernels; the rest follows from model and platform": dict(
        moe_backend="auto", sparse_indexer_topk_backend="auto", attention_config={}, kernel_config={},
        ir_op_priority={}, mamba_config={}, mamba_backend="triton", mamba_ssu_algorithm=None, monokernel=False,
        gdn_prefill_backend=None, kda_prefill_backend=None, kda_decode_backend=None, use_replayssm=False,
        replayssm_buffer_len=16, engram_config=None, use_fp64_gumbel=False, model_impl="auto",
        model_class_overrides={}, additional_config={},
    ),
    "recurrent states are float32": dict(
        mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto",
        enable_mamba_shared_prefix_checkpoint=False, enable_mamba_cache_stochastic_rounding=False,
        mamba_cache_philox_rounds=0,
    ),
    "keys and values stay on the device, and all layers have the same `kv_cache_dtype`": dict(
        kv_cache_dtype_skip_layers=[], kv_offloading_size=None,
        kv_offloading_backend="native", kv_sharing_fast_prefill=False, swa_bounded_replay=True,
    ),
    "KV caches are not transferred between engines": dict(
        kv_transfer_config=None, kv_events_config=None, prefix_match_unit=None, prefix_cache_retention_interval=0,
    ),
    "weights stay on the device": dict(
        cpu_offload_gb=0, cpu_offload_params=set(), offload_backend="auto", offload_group_size=0,
        offload_num_in_group=1, offload_prefetch_step=1, offload_params=set(),
    ),
    "close the engine and open it again; compiled programs are cached": dict(
        enable_sleep_mode=False, sleep_mode_backend="cumem", sleep_mode_offload_cudagraph=False,
        sleep_preserve_parameter_names=[], enable_cumem_allocator=False,
    ),
    "this engine has its own scheduler: see `scheduling_policy`, `max_num_batched_tokens`, `max_waiting`": dict(
        scheduler_cls=None, scheduler_reserve_full_isl=True, prefill_schedule_interval=1, watermark=0.0,
        max_num_scheduled_tokens=None, long_prefill_token_threshold=0, long_prefill_token_threshold_adaptive=False,
        max_num_active_seqs=None, max_num_queued_tokens=None, stream_interval=1,
    ),
    "use `speculative_config`": dict(spec_method=None, spec_model=None, spec_tokens=None),
    'the checkpoint says how; `quantization` may name that, or be "none", "int8", "packed" or "packed-int8"': dict(
        quantization_config=None, allow_deprecated_quantization=False,
    ),
    "the checkpoint's own files are used; pass another directory as the model": dict(
        model_weights="", hf_config_path=None, model_loader_extra_config={}, tokenizer=None, tokenizer_revision=None,
    ),
    "the adapter's files name its modules; its dtype is that of the weights": dict(
        lora_target_modules=None, specialize_active_lora=False, enable_mixed_moe_lora_format=False,
        enable_moe_shared_loras=False, max_lora_cls_labels=None,
    ),
    "workers, outputs and stages cannot be replaced": dict(
        worker_cls="auto", worker_extension_cls="", aux_output_config={}, enable_return_routed_experts=False,
        return_sampling_mask=False, watermark_config=None, diffusion_config=None, tokens_only=False,
        fail_on_environ_validation=False, shutdown_timeout=0,
    ),
    "set it on the request: `StructuredOutputsParams`, `SamplingParams`": dict(
        structured_outputs_config={}, override_generation_config={},
    ),
    "the server parses reasoning: `xla-engine serve --reasoning-parser`": dict(
        reasoning_parser="", reasoning_parser_plugin=None, reasoning_config=None,
    ),
    "see `engine.metrics_text()` and step logs (docs/observability.md)": dict(
        show_hidden_metrics_for_version=None,
        per_request_spec_decode_metrics="none", kv_cache_metrics=False, kv_cache_metrics_sample=0.01,
        custom_histogram_buckets=None, cudagraph_metrics=False, enable_layerwise_nvtx_tracing=False,
        enable_mfu_metrics=False,
    ),
    "the server sends traces: `xla-engine serve --otlp-traces-endpoint`": dict(
        otlp_traces_endpoint=None, collect_detailed_traces=None,
    ),
    "configure Python's `logging`": dict(logging_config=None, log_level=None, log_config_file=None),
    "use `LLM.update_weights`": dict(weight_transfer_config=None),
}  # fmt: skip

_TABLE: Mapping[str, OtherOption] = {
    "gpu_memory_utilization": OtherOption(becomes="memory_utilization", why="is called `memory_utilization`"),
    "num_gpu_blocks_override": OtherOption(becomes="num_blocks", why="is called `num_blocks`"),
    "max_num_queued_reqs": OtherOption(becomes="max_waiting", why="is called `max_waiting`"),
    "max_model_len": OtherOption(
        becomes="max_model_len", renamed={-1: None, "auto": None}, why="-1 and `auto` mean None"
    ),
    "generation_config": OtherOption(
        accepted=("auto", "vllm", "engine", "model"),
        becomes="generation_config",
        renamed={"auto": "model", "vllm": "engine"},
        why="`auto` is called `model`, `vllm` is called `engine`",
    ),
    "task": OtherOption(
        accepted=("auto", "generate", "embed", "classify", "score"),
        becomes="runner",
        renamed=dict.fromkeys(("embed", "classify", "score"), "pooling"),
        why="is called `runner`; `embed`, `classify` and `score` are `pooling`",
    ),
    "override_pooler_config": OtherOption(becomes="pooler_config", why="is called `pooler_config`"),
    "convert": OtherOption(
        accepted=("auto", "none", "embed", "classify"),
        why='`runner="pooling"` and the checkpoint determine it',
    ),
    "download_dir": OtherOption(accepted=(), why="the cache of the hub is used; set `HF_HOME`"),
    "hf_token": OtherOption(accepted=(), why="set `HF_TOKEN`"),
    "distributed_executor_backend": OtherOption(accepted=("uni", "mp"), why="an engine is one process"),
    "enable_chunked_prefill": OtherOption(accepted=(True,), why="prefill is always chunked"),
    "max_logprobs": OtherOption(
        accepted=tuple(range(21)),
        why="20 log-probabilities per token are always available, and are the maximum",
    ),
    "tokenizer_mode": OtherOption(accepted=("auto", "hf"), why="the checkpoint's own tokenizer.json is used"),
    "skip_tokenizer_init": OtherOption(
        accepted=(False,), why="use `SamplingParams(detokenize=False)` to get no text"
    ),
    "revision": OtherOption(accepted=("main",), why="use `OWNER/NAME@REVISION` as the model"),
    "load_format": OtherOption(
        accepted=("auto", "safetensors", "gguf"), why="the format is detected from the files"
    ),
    "config_format": OtherOption(accepted=("auto", "hf"), why="transformers' config.json is read"),
    "lora_dtype": OtherOption(accepted=("auto",), why="adapters have the dtype of the weights"),
    "fully_sharded_loras": OtherOption(
        accepted=(False,), why="each device holds the whole of A, which is small"
    ),
    "logits_processors": OtherOption(accepted=([],), why="no Python runs between model and sampler"),
    "enable_trace_replay": OtherOption(
        accepted=(False,), why="`xla_engine.LLM.score` gives the log-probabilities of a known continuation"
    ),
    "enable_prompt_embeds": OtherOption(accepted=(False,), why="prompts are texts or token ids"),
    "profiler_config": OtherOption(
        accepted=({},),
        why="`xla_engine.vllm.LLM` accepts it; otherwise use `engine.start_profile(directory)`",
    ),
    "disable_sliding_window": OtherOption(accepted=(False,), why="sliding windows are part of the model"),
}

VLLM_OPTIONS: Mapping[str, OtherOption] = {
    **_TABLE,
    **{name: OtherOption(why=why) for why, names in _HARMLESS.items() for name in names.split()},
    **{
        name: OtherOption(accepted=() if value is None else (value,), why=why)
        for why, names in _DEFAULT_ONLY.items()
        for name, value in names.items()
    },
}
