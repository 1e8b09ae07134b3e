"""A device without a model on which the requests of a caller's choice make their steps fail."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from xla_engine.engine.adapters import NO_ADAPTER
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.driver import Driver
from xla_engine.engine.intake import Intake
from xla_engine.engine.loop import Loop
from xla_engine.engine.recovery import Recovery
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.validation import CheckedRequest, RequestValidator
from xla_engine.engine.state import EngineState
from xla_engine.outputs import RequestOutput
from xla_engine.runner.in_flight import InFlight, PromptScores
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_TOKEN, Decoded, Plan, Sample, Scheduler, SchedulerConfig, Slot, StepResult
from xla_engine.scheduler.pipeline import StepPipeline

CHUNK = 4  # prompt tokens of a lane


@dataclass(frozen=True)
class Culprit:
    """A request that makes a step fail: when its prompt is read (token 0), or when it samples its n-th token."""

    token: int = 0
    verb: Literal["start", "wait"] = "wait"


def token(request_id: str, number: int) -> int:
    """What a request samples as its n-th token, from 0 on."""
    return zlib.crc32(f"{request_id}/{number}".encode()) % 97


class FailingDevice:
    """In place of a `Runner`. dead: every step fails. failed: steps that did."""

    def __init__(self, slots: int, culprits: Mapping[str, Culprit]) -> None:
        self.dead = False
        self.failed = 0
        self._slots = slots
        self._culprits = culprits
        self._sampled: dict[Slot, int] = {}  # tokens of each occupancy
        self._answers: dict[int, StepResult] = {}

    def start(self, plan: Plan, settings: Mapping[str, RowSettings], drafts: object = None) -> InFlight:
        self._fail(plan, "start")
        step = InFlight(plan=plan, first=(), decode=None)
        first = [Sample(self._next(chunk.slot, chunk.request_id)) for chunk in plan.first_rows]
        tokens = [NO_TOKEN] * self._slots
        for row in plan.decode:
            tokens[row.slot.index] = self._next(row.slot, row.request_id)
        self._answers[id(plan)] = StepResult(first=first, decode=Decoded(tokens=tokens))
        return step

    def wait(self, step: InFlight) -> StepResult:
        self._fail(step.plan, "wait")
        return self._answers.pop(id(step.plan))

    def prompt_scores(self, step: InFlight) -> list[PromptScores]:
        return []

    def discard(self, request_id: str) -> None:
        """It keeps nothing of anybody's."""

    def rebuild(self) -> None:
        self._sampled.clear()
        self._answers.clear()

    def _next(self, slot: Slot, request_id: str) -> int:
        number = self._sampled[slot] = self._sampled.get(slot, -1) + 1
        return token(request_id, number)

    def _fail(self, plan: Plan, verb: str) -> None:
        """A step fails with each culprit whose token it would sample, or whose prompt it reads."""
        ahead = verb == "start"  # the tokens of this step are not counted yet
        guilty = [(chunk.request_id, 0) for chunk in plan.chunks]
        guilty += [(row.request_id, self._sampled.get(row.slot, 0) + ahead) for row in plan.decode]
        for name, number in guilty:
            if (culprit := self._culprits.get(name)) is None or culprit.verb != verb:
                continue
            if number == culprit.token or (number > culprit.token > 0):
                self.failed += 1
                raise RuntimeError(f"poison of {name}")
        if self.dead:
            self.failed += 1
            raise RuntimeError("gone")


class FailingEngine:
    """The parts of an engine on such a device."""

    def __init__(self, slots: int, culprits: Mapping[str, Culprit], *, lag: int = 1) -> None:
        self.device = FailingDevice(slots, culprits)
        config = SchedulerConfig(
            max_num_seqs=slots, chunk_size=CHUNK, max_num_batched_tokens=slots * (1 + 2 * CHUNK)
        )
        self.state = state = EngineState(
            pipeline=StepPipeline(Scheduler(config), lag=lag), runner=self.device, table=RequestTable(None)
        )
        validator = RequestValidator(
            vocab_size=97, eos_token_ids=(), max_model_len=1000, tokenizer=None, max_num_seqs=slots
        )
        delivery = Delivery(state)
        recovery = Recovery(state, delivery)
        self.intake = Intake(state, delivery, recovery, validator, lambda _: NO_ADAPTER, seed=0)
        self.advance = Driver(state, Loop(state, delivery, recovery, self.intake)).advance
        self.collector = OutputCollector(every_token=False)

    def submit(self, name: str, *, prompt: int = 1, tokens: int = 1) -> None:
        """Queue a request with a prompt of the given length that samples the given number of tokens."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        opened = self.state.table.open(
            name,
            CheckedRequest(None, (1,) * prompt, params),
            mask=None,
            seed=0,
            collector=self.collector,
            now=0.0,
            options={},
        )
        self.intake.queue(name, opened)

    def drain(self, most_turns: int = 20_000) -> dict[str, RequestOutput]:
        """Run to the end; what each request ended with."""
        for _ in range(most_turns):
            if not self.state.has_work:
                break
            self.advance()
        assert not self.state.has_work, "it runs on"
        outputs = [request.output() for request in self.collector.take()]
        assert all(output.finished for output in outputs)
        return {output.request_id: output for output in outputs}
