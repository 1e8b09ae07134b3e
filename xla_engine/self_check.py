"""Start-up self-check: does this machine give a request the same bits in every row and through every graph?

Law 1 rests on three properties of the compiled programs that no source code can promise: a row's bits depend neither
on its index nor on its neighbours, nor on the number of prefill lanes, nor on the key bucket. A probe request is run
through the engine's own executables, alone and in a crowd, and its samples are compared bit for bit.

Where lane counts or key buckets do change bits, the runner keeps only the largest, which any load fits: slower, but
the same bits whatever the batch. Where rows do, nothing can be done. Either is logged as a warning of the logger
`xla_engine.self_check`: logging and not `warnings`, since it is the machine that is at fault, not the calling code.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler import Chunk, Plan, Row, Sample, Slot
from xla_engine.runner import RowSettings, Runner
from xla_engine.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)

_CHUNKS = 2.5  # of the probe's prompt: keys enough to be summed in another order
_SAMPLES = 3  # of the probe: one by the prefill graph, the rest by decode
_LEAST_NEIGHBOURS = 4
_PROBE_PARAMS = SamplingParams(temperature=1.0, top_p=0.95, logprobs=0)
_NEIGHBOUR_PARAMS = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.5, min_p=0.1, logprobs=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What the check saw.

    row_invariant: the probe's samples are the same alone and in a crowd, in the first, a middle and the last slot.
    lane_invariant, bucket_invariant: and the same through every prefill lane count, and every key bucket.
    prefill_equals_decode: tokens sampled by decode have the bits they have when the prefix before them is prefilled.
        Level B, for information: no request depends on it.
    differences: what differed, in words, the first difference of each comparison.
    seconds: what the check took.
    """

    row_invariant: bool
    lane_invariant: bool
    bucket_invariant: bool
    prefill_equals_decode: bool
    differences: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing that level A rests on differed."""
        return self.row_invariant and self.lane_invariant and self.bucket_invariant

    @property
    def promise(self) -> str:
        """What the engine can promise on this machine, in one sentence."""
        if not self.row_invariant:
            return "the bits of a request depend on its row or its neighbours: level A cannot be promised"
        if not self.ok:
            return "level A: same bits whatever the batch, with the largest graphs only"
        if not self.prefill_equals_decode:
            return "level A: same bits whatever the batch"
        return "level A: same bits whatever the batch, and prefill gives the bits of decode"


def run_self_check(runner: Runner, vocab_size: int) -> SelfCheck:
    """Check an idle runner that has just started, and restrict it to its largest graphs where sizes change bits.

    Nothing is compiled. Afterwards the runner is as it was, but for stale values in the cache.
    """
    began = time.perf_counter()
    lane_choices, bucket_choices = runner.lane_choices, runner.bucket_choices
    probe = _Probe(runner, vocab_size)
    try:
        rows, lanes, buckets, prefill = (
            tuple(found) for found in probe.compare(lane_choices, bucket_choices)
        )
    finally:
        runner.lane_choices, runner.bucket_choices = lane_choices, bucket_choices
    runner.reset()
    if lanes:
        runner.lane_choices = lane_choices[-1:]
    if buckets:
        runner.bucket_choices = bucket_choices[-1:]
    check = SelfCheck(
        row_invariant=not rows,
        lane_invariant=not lanes,
        bucket_invariant=not buckets,
        prefill_equals_decode=not prefill,
        differences=rows + lanes + buckets + prefill,
        seconds=time.perf_counter() - began,
    )
    _warn(check, lane_choices, bucket_choices)
    return check


def _warn(check: SelfCheck, lane_choices: tuple[int, ...], bucket_choices: tuple[int, ...]) -> None:
    if check.ok:
        return
    causes = []
    if not check.row_invariant:
        causes.append("rows are not invariant")
    if not check.lane_invariant:
        causes.append(f"prefill always runs {lane_choices[-1]} lanes, as other lane counts change bits")
    if not check.bucket_invariant:
        causes.append(f"attention always covers {bucket_choices[-1]} keys, as other key buckets change bits")
    _logger.warning("self-check: %s; %s. %s", "; ".join(causes), check.promise, check.differences[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A prompt in a slot, and what the device is told about it."""

    slot: int
    tokens: tuple[int, ...]
    settings: RowSettings


class _Probe:
    """One request over some chunks, and the neighbours it may have. It fits into the smallest key bucket."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._draw = random.Random(0)
        room = min(runner.context_length, runner.bucket_choices[0])
        self._samples = min(_SAMPLES, room - 1)
        length = int(_CHUNKS * runner.config.chunk_size)
        self._tokens = self._random_tokens(min(length, room - self._samples))
        rows = runner.config.device_rows
        self._slots = (0, rows // 2, rows - 1)

    def compare(
        self, lane_choices: tuple[int, ...], bucket_choices: tuple[int, ...]
    ) -> tuple[list[str], list[str], list[str], list[str]]:
        """Differences between rows, between lane counts, between key buckets, between prefill and decode."""
        most, longest = lane_choices[-1], bucket_choices[-1]
        (alone,) = self._run(most, longest, [self._in_slot(0)])
        probes, crowd = self._crowd(most)  # one crowd for all buckets: only the bucket differs
        among = {size: self._run(most, size, crowd)[probes] for size in bucket_choices}
        expected = among[longest]
        rows = [
            f"slot {slot} among neighbours against slot 0 alone: {difference}"
            for slot, samples in zip(self._slots, expected, strict=True)
            for difference in _difference(samples, alone)
        ]
        buckets = [
            f"slot {slot} with {size} keys against {longest}: {difference}"
            for size in bucket_choices[:-1]
            for slot, samples, same in zip(self._slots, among[size], expected, strict=True)
            for difference in _difference(samples, same)
        ]
        lanes = [
            f"slot {self._slots[-1]} with {size} keys in {count} lanes against {most}: {difference}"
            for count in lane_choices[:-1]
            for size in bucket_choices
            for difference in _difference(self._between_neighbours(count, size), among[size][-1])
        ]
        by_prefill = [*alone[:1], *self._by_prefill(most, longest, alone)]
        prefill = [
            f"by prefill against decode: {difference}" for difference in _difference(by_prefill, alone)
        ]
        return rows, lanes, buckets, prefill

    def _crowd(self, lanes: int) -> tuple[slice, list[_Prompt]]:
        """The probe in each of its slots at once, among random neighbours that fill the last call; where it stands."""
        probes = [self._in_slot(slot) for slot in self._slots]
        used = sum(1 for probe in probes for _ in self._chunks(probe)) + _LEAST_NEIGHBOURS
        others = [slot for slot in range(self._runner.config.device_rows) if slot not in self._slots]
        first, *rest = self._draw.sample(others, min(len(others), _LEAST_NEIGHBOURS + -used % lanes))
        prompts = [self._neighbour(first), *probes, *map(self._neighbour, rest)]
        return slice(1, 1 + len(probes)), prompts

    def _between_neighbours(self, lanes: int, keys: int) -> list[Sample]:
        """The first sample of the probe in its last slot, in lanes that neighbours share."""
        probe = self._in_slot(self._slots[-1], samples=1)
        prompts = [self._neighbour(1, samples=1), probe, self._neighbour(2, samples=1)]
        return self._run(lanes, keys, prompts)[1]

    def _by_prefill(self, lanes: int, keys: int, samples: Sequence[Sample]) -> list[Sample]:
        """Each sample after the first again, by prefilling the prompt and the samples before it."""
        sampled = tuple(sample.token_id for sample in samples[:-1])
        if not sampled:
            return []
        prompts = [self._in_slot(slot, sampled[: slot + 1], samples=1) for slot in range(len(sampled))]
        return [first for (first,) in self._run(lanes, keys, prompts)]

    def _in_slot(self, slot: int, forced: tuple[int, ...] = (), *, samples: int | None = None) -> _Prompt:
        """The probe, with samples of its own `forced` behind it."""
        settings = RowSettings(
            max_tokens=samples or self._samples, stop_token_ids=(), params=_PROBE_PARAMS, seed=0
        )
        return _Prompt(slot=slot, tokens=self._tokens + forced, settings=settings)

    def _neighbour(self, slot: int, *, samples: int | None = None) -> _Prompt:
        chunk = self._runner.config.chunk_size
        length = self._draw.randint(1, min(chunk, self._runner.context_length - self._samples))
        settings = RowSettings(
            max_tokens=samples or self._samples,
            stop_token_ids=(),
            params=_NEIGHBOUR_PARAMS[slot % len(_NEIGHBOUR_PARAMS)],
            seed=self._draw.getrandbits(64),
        )
        return _Prompt(slot=slot, tokens=self._random_tokens(length), settings=settings)

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._vocab_size) for _ in range(count))

    def _run(self, lanes: int, keys: int, prompts: Sequence[_Prompt]) -> list[list[Sample]]:
        """Prefill the prompts in order through one lane count and one key bucket, then decode all; samples per prompt.

        All prompts ask for the same number of samples, so that every row is inactive in the end.
        """
        self._runner.lane_choices, self._runner.bucket_choices = (lanes,), (keys,)
        chunks = tuple(chunk for prompt in prompts for chunk in self._chunks(prompt))
        rows = tuple(Row(slot=_slot(prompt), request_id=str(prompt.slot)) for prompt in prompts)
        settings = {str(prompt.slot): prompt.settings for prompt in prompts}
        decodes = prompts[0].settings.max_tokens - 1
        plans = [_plan(chunks, rows if decodes else ()), *[_plan((), rows)] * (decodes - 1)]
        results = [self._runner.wait(step) for step in [self._runner.start(plan, settings) for plan in plans]]
        samples = [[sample] for sample in results[0].first]
        for result in results:
            for row, sampled in zip(samples, result.decode, strict=bool(decodes)):
                row.extend(sampled)
        return samples

    def _chunks(self, prompt: _Prompt) -> Iterator[Chunk]:
        size = self._runner.config.chunk_size
        for start in range(0, len(prompt.tokens), size):
            yield Chunk(
                slot=_slot(prompt),
                request_id=str(prompt.slot),
                start=start,
                tokens=prompt.tokens[start : start + size],
                is_last=start + size >= len(prompt.tokens),
            )


def _slot(prompt: _Prompt) -> Slot:
    return Slot(index=prompt.slot, epoch=0)


def _plan(chunks: tuple[Chunk, ...], decode: tuple[Row, ...]) -> Plan:
    return Plan(step=0, admitted=(), chunks=chunks, decode=decode, decisions=())


def _difference(found: Sequence[Sample], expected: Sequence[Sample]) -> Iterator[str]:
    """The first sample of `found` whose token or logprob bits are not the expected ones, in words."""
    for index, (left, right) in enumerate(zip(found, expected, strict=False)):
        if _bits(left) != _bits(right):
            yield f"sample {index} is {_describe(left)}, not {_describe(right)}"
            return


def _bits(sample: Sample) -> tuple[int, bytes]:
    return sample.token_id, struct.pack("<f", sample.logprob)


def _describe(sample: Sample) -> str:
    return f"token {sample.token_id} logprob {sample.logprob:.9g}"
