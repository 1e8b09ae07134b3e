"""The scheduler's configuration, from the engine's options, the runner's capabilities and the self-check."""

from xla_engine.config import EngineConfig
from xla_engine.runner.encoder_runner import EncoderRunner
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.scheduler import SchedulerConfig
from xla_engine.scheduler.policy import PREEMPTIVE


def scheduler_config(
    config: EngineConfig, runner: Runner | EncoderRunner, found: SelfCheck | None, cache_key: str
) -> SchedulerConfig:
    """found: the result of the self-check, None if it did not run. cache_key: the model's fingerprint."""
    shown = found if runner.has_one_row_code else None
    host_bytes = int(config.swap_space * 2**30) if config.parks else 0
    return SchedulerConfig(
        max_num_seqs=config.num_slots,
        chunk_size=config.chunk_size,
        max_num_batched_tokens=config.token_budget,
        max_chunks=config.max_chunks,
        max_waiting=config.max_waiting,
        scheduling_policy=config.scheduling_policy,
        priority_aging=config.priority_aging,
        quantum=config.quantum,
        enable_prefix_caching=config.enable_prefix_caching
        and (runner.keeps_every_position or config.saves_states),
        block_size=config.block_size,
        mamba_block_size=config.state_interval if config.saves_states else None,
        mamba_cache_states=max(config.saved_states, 1),
        num_blocks=config.num_blocks,
        cache_key=cache_key,
        prefill_equals_decode=shown is not None and shown.prefill_equals_decode,
        cut_invariant=shown is not None and shown.cut_invariant,
        keeps_finished=config.keep_finished > 0,
        feature_places=0 if runner.features is None else runner.features.places,
        whole_tiles=runner.features is not None and runner.features.sees_ahead,
        feature_place_tokens=1 if runner.features is None else runner.features.place_tokens,
        encode_stages=1 if runner.features is None else runner.features.tower.slices.by_tokens,
        stores_blocks=config.prefix_cache_dir is not None,
        preemption=config.preemption and config.scheduling_policy in PREEMPTIVE,
        swap_tokens=host_bytes // max(runner.kv_bytes_per_token, 1),
    )
