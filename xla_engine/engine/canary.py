"""A request of the engine's own that tests whether a device that has failed still runs anything."""

from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Plan, Request, Scheduler, SchedulerConfig, StepResult

_NAME = "canary"  # the request's id, in plans that the engine's scheduler does not see


class Canary:
    """A prompt of one token; prefill samples the first token and decode the second, on a device with blank state.

    settings: its row settings, for the runner.
    """

    def __init__(self, config: SchedulerConfig, *, pools: bool) -> None:
        """config: that of the engine's scheduler. pools: whether the model pools prompts and does not decode."""
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
        """Plan its next step; the previous one must have been committed."""
        return self._scheduler.plan()

    def commit(self, plan: Plan, result: StepResult) -> None:
        self._scheduler.commit(plan, result)

    @property
    def is_over(self) -> bool:
        """Whether all its steps have been committed."""
        return not self._scheduler.has_unfinished
