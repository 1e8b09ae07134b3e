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
import math
import random
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xla_engine.graphs.attention.backend import KEY_SPAN
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_TOKEN, BlockTable, Chunk, Plan, Row, Sample, Slot

_logger = logging.getLogger("xla_engine.self_check")

_CHUNKS = 2.5  # of a probe's prompt beyond the bucket below: keys enough to be summed in another order
_SAMPLES = 3  # of the probe: one by the prefill graph, the rest by decode
_LEAST_NEIGHBOURS = 4
_PROBE_PARAMS = SamplingParams(temperature=3.0, top_p=0.95, logprobs=0)  # far from greedy: peers' limits show
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
    cut_invariant: a prompt's last token has the same bits in a chunk of its own. Otherwise its whole chunk runs again
        when all of a prompt is cached.
    differences: what differed, in words, the first difference of each comparison.
    seconds: what the check took.
    """

    row_invariant: bool
    lane_invariant: bool
    bucket_invariant: bool
    prefill_equals_decode: bool
    cut_invariant: bool
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


class _TooFewPagesError(Exception):
    """The pool cannot hold a crowd."""


def run_self_check(runner: Runner, vocab_size: int) -> SelfCheck | None:
    """Check a runner with a blank cache, and restrict it to its largest graphs where sizes change bits.

    Nothing is compiled. Afterwards the runner is as it was, but for stale values in the cache. None, and the largest
    graphs only, where a pool of pages is too small for it.
    """
    began = time.perf_counter()
    lane_choices, bucket_choices = runner.lane_choices, runner.bucket_choices
    probes = [_Probe(runner, vocab_size, size) for size in bucket_choices]
    try:
        rows, lanes, buckets, prefill, cuts = _compare(probes, lane_choices)
    except _TooFewPagesError:
        lane_choices, bucket_choices = lane_choices[-1:], bucket_choices[-1:]
        return None
    finally:
        runner.reset()
        runner.lane_choices, runner.bucket_choices = lane_choices, bucket_choices
    if lanes:
        runner.lane_choices = lane_choices[-1:]
    if buckets:
        runner.bucket_choices = bucket_choices[-1:]
    check = SelfCheck(
        row_invariant=not rows,
        lane_invariant=not lanes,
        bucket_invariant=not buckets,
        prefill_equals_decode=not prefill,
        cut_invariant=not cuts,
        differences=rows + lanes + buckets + prefill + cuts,
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


def _compare(probes: Sequence[_Probe], lane_choices: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """Differences between rows, between lane counts, between key buckets, between prefill and decode, between cuts.

    `probes` are those of the key buckets, ascending. The longest comes first, as long as no slot holds anything.
    """
    *shorter, longest = probes
    most, fewer = lane_choices[-1], lane_choices[:-1]
    alone = longest.alone(most)
    prefill = [
        f"by prefill against decode: {difference}"
        for difference in _difference([*alone[:1], *longest.by_prefill(most, alone)], alone)
    ]
    cuts = [
        f"the last token in a chunk of its own: {difference}"
        for difference in _difference(longest.last_token_alone(most), alone)
    ]
    rows: list[str] = []
    lanes: list[str] = []
    buckets: list[str] = []
    for probe in (longest, *shorter):
        size, crowd = probe.bucket, probe.crowd(most)
        samples = probe.for_rows(crowd, most, size)
        where, expected = ("alone", alone) if probe is longest else ("there", samples[0])
        rows += [
            f"slot {slot} among neighbours, {size} keys, against slot 0 {where}: {difference}"
            for slot, found in zip(probe.slots, samples, strict=True)
            for difference in _difference(found, expected)
        ]
        if probe is not longest:  # the same crowd: only the bucket differs
            buckets += [
                f"slot {slot} with {size} keys against {longest.bucket}: {difference}"
                for slot, found, same in zip(
                    probe.slots, samples, probe.for_rows(crowd, most, longest.bucket), strict=True
                )
                for difference in _difference(found, same)
            ]
        lanes += [
            f"slot {probe.slots[-1]} with {size} keys in {count} lanes against {most}: {difference}"
            for count in fewer
            for difference in _difference(probe.between_neighbours(count), samples[-1])
        ]
    return (tuple(found) for found in (rows, lanes, buckets, prefill, cuts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A prompt in a slot, and what the device is told about it.

    Run are the first `head` positions and those from `tail` on; the keys between are whatever the slot holds.
    last_alone: the last token is a chunk of its own.
    """

    slot: int
    tokens: tuple[int, ...]
    head: int
    tail: int
    settings: RowSettings
    last_alone: bool = False


class _Probe:
    """One request for one key bucket, and the neighbours it may have.

    It is just too long for the bucket below, and for one block of keys where the bucket has more. Most of its keys
    are not computed, as that would take seconds: they are the same in all slots, which is enough to compare.
    """

    def __init__(self, runner: Runner, vocab_size: int, bucket: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._draw = random.Random(bucket)
        self.bucket = bucket
        below = max((size for size in runner.bucket_choices if size < bucket), default=0)
        if not below and bucket > KEY_SPAN:
            below = KEY_SPAN
        chunk, room = runner.config.chunk_size, min(runner.context_length, bucket)
        self._samples = min(_SAMPLES, room - 1)
        length = min(below + int(_CHUNKS * chunk), room - self._samples)
        self._tokens = self._random_tokens(length)
        # Whole pages are computed, or none of their positions.
        self._head = math.lcm(chunk, runner.config.block_size if runner.config.paged else 1)
        self._tail = min(below, length - 1) // self._head * self._head
        rows = runner.config.device_rows
        self.slots = (0, rows // 2, rows - 1)

    def alone(self, lanes: int) -> list[Sample]:
        """The samples of the first slot by itself."""
        (samples,) = self._run(lanes, self.bucket, [self._in_slot(0)])
        return samples

    def crowd(self, lanes: int) -> list[_Prompt]:
        """A random neighbour, the probe in each of its slots, and neighbours that fill the last prefill call."""
        probes = [self._in_slot(slot) for slot in self.slots]
        used = sum(1 for probe in probes for _ in self._chunks(probe)) + _LEAST_NEIGHBOURS
        others = [slot for slot in range(self._runner.config.device_rows) if slot not in self.slots]
        drawn = self._draw.sample(others, min(len(others), _LEAST_NEIGHBOURS + -used % lanes))
        first, *rest = (self._neighbour(slot, kind) for kind, slot in enumerate(drawn))
        return [first, *probes, *rest]

    def for_rows(self, crowd: Sequence[_Prompt], lanes: int, keys: int) -> list[list[Sample]]:
        """The samples of each of its slots among a crowd."""
        return self._run(lanes, keys, crowd)[1 : 1 + len(self.slots)]

    def between_neighbours(self, lanes: int) -> list[Sample]:
        """The first sample of its last slot, in lanes that neighbours share."""
        probe = self._in_slot(self.slots[-1], samples=1)
        prompts = [self._neighbour(1, 1, samples=1), probe, self._neighbour(2, 2, samples=1)]
        return self._run(lanes, self.bucket, prompts)[1]

    def by_prefill(self, lanes: int, samples: Sequence[Sample]) -> list[Sample]:
        """Each sample after the first again, by prefilling the prompt and the samples before it."""
        sampled = tuple(sample.token_id for sample in samples[:-1])
        if not sampled:
            return []
        prompts = [self._in_slot(slot, sampled[: slot + 1], samples=1) for slot in range(len(sampled))]
        return [first for (first,) in self._run(lanes, self.bucket, prompts)]

    def last_token_alone(self, lanes: int) -> list[Sample]:
        """The first sample, by a chunk of the last token alone."""
        (samples,) = self._run(lanes, self.bucket, [replace(self._in_slot(0, samples=1), last_alone=True)])
        return samples

    def _in_slot(self, slot: int, forced: tuple[int, ...] = (), *, samples: int | None = None) -> _Prompt:
        """The probe, with samples of its own `forced` behind it."""
        settings = RowSettings(
            max_tokens=samples or self._samples, stop_token_ids=(), params=_PROBE_PARAMS, seed=0
        )
        return _Prompt(
            slot=slot, tokens=self._tokens + forced, head=self._head, tail=self._tail, settings=settings
        )

    def _neighbour(self, slot: int, kind: int, *, samples: int | None = None) -> _Prompt:
        chunk = self._runner.config.chunk_size
        length = self._draw.randint(1, min(chunk, self._runner.context_length - self._samples))
        settings = RowSettings(
            max_tokens=samples or self._samples,
            stop_token_ids=(),
            params=_NEIGHBOUR_PARAMS[kind % len(_NEIGHBOUR_PARAMS)],
            seed=self._draw.getrandbits(64),
        )
        return _Prompt(slot=slot, tokens=self._random_tokens(length), head=0, tail=0, settings=settings)

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._vocab_size) for _ in range(count))

    def _run(self, lanes: int, keys: int, prompts: Sequence[_Prompt]) -> list[list[Sample]]:
        """Prefill the prompts in order through one lane count and one key bucket, then decode all; samples per prompt.

        All prompts ask for the same number of samples, so that every row is inactive in the end.
        """
        self._runner.lane_choices, self._runner.bucket_choices = (lanes,), (keys,)
        if not self._runner.keeps_every_position:
            self._runner.blank()  # what a ring holds of positions not computed depends on what ran before
        every = [(chunk, prompt) for prompt in prompts for chunk in self._chunks(prompt)]
        # Chunks before a gap run apart: in a ring those behind it may take their place.
        before = tuple(chunk for chunk, prompt in every if chunk.start < prompt.tail)
        chunks = tuple(chunk for chunk, prompt in every if chunk.start >= prompt.tail)
        rows = tuple(Row(slot=_slot(prompt), request_id=str(prompt.slot)) for prompt in prompts)
        settings = {str(prompt.slot): prompt.settings for prompt in prompts}
        decodes = prompts[0].settings.max_tokens - 1
        tables = self._tables(prompts) if self._runner.config.paged else ()
        plans = [_plan(before, (), tables)] if before else []
        plans += [_plan(chunks, rows if decodes else (), tables), *[_plan((), rows)] * (decodes - 1)]
        results = [self._runner.wait(step) for step in [self._runner.start(plan, settings) for plan in plans]]
        samples = [[sample] for result in results for sample in result.first]
        for result in results[bool(before) :] if decodes else ():
            for row, prompt in zip(samples, prompts, strict=True):
                if result.decode.tokens[prompt.slot] != NO_TOKEN:
                    row.append(result.decode.sample(prompt.slot))
        return samples

    def _tables(self, prompts: Sequence[_Prompt]) -> tuple[BlockTable, ...]:
        """A page for all positions that a prompt writes; where it writes nothing, one that nobody writes."""
        config = self._runner.config
        size, (untouched, *free) = config.block_size, range(config.num_blocks or 1)
        tables = []
        for prompt in prompts:
            end = len(prompt.tokens) + prompt.settings.max_tokens - 1
            gap = range(min(prompt.head, prompt.tail), prompt.tail)
            wanted = [at not in gap for at in range(0, end, size)]
            if len(free) < sum(wanted):
                raise _TooFewPagesError
            own, free = iter(free[: sum(wanted)]), free[sum(wanted) :]
            blocks = tuple(next(own) if writes else untouched for writes in wanted)
            tables.append(BlockTable(slot=_slot(prompt), request_id=str(prompt.slot), blocks=blocks))
        return tuple(tables)

    def _chunks(self, prompt: _Prompt) -> Iterator[Chunk]:
        size, end = self._runner.config.chunk_size, len(prompt.tokens)
        cut = end - 1 if prompt.last_alone else end
        starts = (*range(0, min(prompt.head, prompt.tail), size), *range(prompt.tail, cut, size))
        for start in (*starts, *([cut] if cut < end else [])):
            stop = min(start + size, end if start == cut else cut)
            yield Chunk(
                slot=_slot(prompt),
                request_id=str(prompt.slot),
                start=start,
                tokens=prompt.tokens[start:stop],
                is_last=stop == end,
            )


def _slot(prompt: _Prompt) -> Slot:
    return Slot(index=prompt.slot, epoch=0)


def _plan(chunks: tuple[Chunk, ...], decode: tuple[Row, ...], tables: tuple[BlockTable, ...] = ()) -> Plan:
    return Plan(step=0, admitted=(), chunks=chunks, decode=decode, decisions=(), tables=tables)


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
