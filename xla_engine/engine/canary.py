"""A request of the engine's own, which asks a device that has failed whether it still runs anything."""

from __future__ import annotations

from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Plan, Request, Scheduler, SchedulerConfig, StepResult

_NAME = "canary"  # of the request, in plans that the engine's scheduler does not see


class Canary:
    """One token in, one out by prefill and one by decode, on a device whose state is blank.

    settings: for the runner.
    """

    def __init__(self, config: SchedulerConfig, *, pools: bool) -> None:
        """config: of the engine's scheduler. pools: the model pools prompts and decodes nothing."""
        limits = {
            name: getattr(config, name)
            for name in ("max_num_seqs", "chunk_size", "max_num_batched_tokens", "block_size", "num_blocks")
        }
        params = PoolingParams() if pools else SamplingParams(temperature=0.0, max_tokens=2)
        tokens = params.token_limit
        self.settings = {_NAME: RowSettings(max_tokens=tokens, stop_token_ids=(), params=params, seed=0)}
        self._scheduler = Scheduler(SchedulerConfig(**limits))
        self._scheduler.submit(Request(request_id=_NAME, prompt_token_ids=(0,), max_tokens=tokens))

    def plan(self) -> Plan:
        """Its next step; the one before must have been committed."""
        return self._scheduler.plan()

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take what a step has brought."""
        self._scheduler.commit(plan, result)

    @property
    def is_over(self) -> bool:
        """Whether the device has answered all of it."""
        return not self._scheduler.has_unfinished
