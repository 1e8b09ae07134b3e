"""The probe request of the self-check, which runs alone and among neighbours through the engine's executables."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import KEY_SPAN
from xla_engine.runner.call_sizes import Sizes
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_TOKEN, BlockTable, Chunk, Moves, Plan, Row, Sample, Slot

_CHUNKS = 2.5  # of a probe's prompt beyond the bucket below: keys enough to be summed in another order
_LEAST_NEIGHBOURS = 4
MOST_SAMPLES = 8
_PROBE_PARAMS = SamplingParams(temperature=3.0, top_p=0.95, logprobs=0)  # far from greedy: peers' limits show
_NEIGHBOUR_PARAMS = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.5, min_p=0.1, logprobs=0),
)


def enough_blocks(config: EngineConfig) -> int:
    """A number of blocks in which every probe fits among its neighbours."""
    head = math.lcm(config.chunk_size, config.block_size)
    longest = (
        2 * head + math.ceil(_CHUNKS * config.chunk_size) + MOST_SAMPLES
    )  # computed positions of a prompt
    prompts = min(config.device_rows, 3 + _LEAST_NEIGHBOURS + config.prefill_lanes[-1])
    return 1 + prompts * (longest // config.block_size + 2)


class TooFewBlocksError(Exception):
    """The pool has too few blocks for the probe and its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in a slot, with the inputs of its chunks.

    Run are the first `head` positions and those from `tail` on; the keys between are whatever the slot holds.
    is_cached: whether the slot holds the keys of an earlier run of the prompt, so that its last chunk is enough.
    last_alone: the last token is a chunk of its own.
    """

    slot: int
    tokens: tuple[int, ...]
    head: int
    tail: int
    settings: RowSettings
    is_cached: bool = False
    last_alone: bool = False


class Found(NamedTuple):
    """The results of a prompt: its samples, and by position the bits of the residual stream after the last layer."""

    samples: Sequence[Sample]
    hidden: Mapping[int, bytes]


class Probe:
    """One request for one key bucket, and the neighbours it may have.

    It is just too long for the bucket below, and for one block of keys where the bucket has more. Most of its keys
    are not computed, as that would take seconds: they are the same in all slots, which is enough to compare.
    """

    def __init__(
        self, runner: Runner, vocab_size: int, bucket: int, samples: int, *, crowds: bool = True
    ) -> None:
        """samples: one by the prefill graph, the rest by decode; at most as many as there are rows.

        crowds: false for an engine of one slot whose blocks hold one request: no request has a neighbour there.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self._draw = random.Random(bucket)
        self._adapter = int(runner.spec.lora is not None)
        self.bucket = bucket
        below = max((size for size in runner.sizes.keys if size < bucket), default=0)
        if not below and bucket > KEY_SPAN:
            below = KEY_SPAN
        chunk, room = runner.config.chunk_size, min(runner.context_length, bucket)
        rows = runner.config.device_rows
        self.samples = min(samples, room - 1, rows)  # each is prefilled in a slot of its own
        length = min(below + int(_CHUNKS * chunk), room - self.samples)
        self._tokens = self._random_tokens(length)
        # Whole blocks are computed, or none of their positions.
        self._head = math.lcm(chunk, runner.config.block_size if runner.config.uses_blocks else 1)
        self._tail = min(below, length - 1) // self._head * self._head
        self._crowds = crowds
        self._holds_keys = runner.keeps_every_position and not runner.config.uses_blocks
        self.slots = (0, rows // 2, rows - 1) if crowds else (0,)

    def alone(self, lanes: int) -> Found:
        """The first slot by itself."""
        (found,) = self._run(lanes, self.bucket, [self._in_slot(0)])
        return found

    def in_few_rows(self, lanes: int, few: int) -> list[Found]:
        """Its slots, as many as a decode program of `few` rows holds, through that program. Each ran before."""
        probes = [replace(self._in_slot(slot), is_cached=self._holds_keys) for slot in self.slots[:few]]
        return self._run(lanes, self.bucket, probes, (few,))

    def crowd(self, lanes: int) -> list[Prompt]:
        """A random neighbour, the probe in each of its slots, and neighbours for the rest of the last prefill call."""
        probes = [self._in_slot(slot) for slot in self.slots]
        if not self._crowds:
            return probes
        used = sum(1 for probe in probes for _ in self._chunks(probe)) + _LEAST_NEIGHBOURS
        others = [slot for slot in range(self._runner.config.device_rows) if slot not in self.slots]
        drawn = self._draw.sample(others, min(len(others), _LEAST_NEIGHBOURS + -used % lanes))
        first, *rest = (self._neighbour(slot, kind) for kind, slot in enumerate(drawn))
        return [first, *probes, *rest]

    def among(self, crowd: Sequence[Prompt], lanes: int, keys: int) -> list[Found]:
        """Each of its slots among a crowd."""
        first = int(self._crowds)
        return self._run(lanes, keys, crowd)[first : first + len(self.slots)]

    def between_neighbours(self, slot: int, lanes: int) -> Found:
        """One of its slots to its first sample, in lanes that neighbours share."""
        probe = self._in_slot(slot, samples=1)
        if not self._crowds:
            return self._run(lanes, self.bucket, [probe])[0]
        prompts = [self._neighbour(1, 1, samples=1), probe, self._neighbour(2, 2, samples=1)]
        return self._run(lanes, self.bucket, prompts)[1]

    def by_prefill(self, lanes: int, samples: Sequence[Sample]) -> list[Sample]:
        """Each sample after the first again, by prefilling the prompt and the samples before it; after `alone`."""
        sampled = tuple(sample.token_id for sample in samples[:-1])
        if not sampled:
            return []
        found = []
        for count in range(1, len(sampled) + 1):
            prompt = self._in_slot(0, sampled[:count], samples=1)
            ((first,), _), *_ = self._run(lanes, self.bucket, [replace(prompt, is_cached=self._holds_keys)])
            found.append(first)
        return found

    def last_token_alone(self, lanes: int) -> Found:
        """The first slot to its first sample, with the last token in a chunk of its own; after `by_prefill`."""
        prompt = replace(self._in_slot(0, samples=1), last_alone=True, is_cached=self._holds_keys)
        (found,) = self._run(lanes, self.bucket, [prompt])
        return found

    def _in_slot(self, slot: int, forced: tuple[int, ...] = (), *, samples: int | None = None) -> Prompt:
        """The probe, with samples of its own `forced` behind it."""
        settings = RowSettings(
            max_tokens=samples or self.samples,
            stop_token_ids=(),
            params=_PROBE_PARAMS,
            seed=0,
            adapter=self._adapter,
        )
        return Prompt(
            slot=slot, tokens=self._tokens + forced, head=self._head, tail=self._tail, settings=settings
        )

    def _neighbour(self, slot: int, kind: int, *, samples: int | None = None) -> Prompt:
        chunk = self._runner.config.chunk_size
        length = self._draw.randint(1, min(chunk, self._runner.context_length - self.samples))
        settings = RowSettings(
            max_tokens=samples or self.samples,
            stop_token_ids=(),
            params=_NEIGHBOUR_PARAMS[kind % len(_NEIGHBOUR_PARAMS)],
            seed=self._draw.getrandbits(64),
            adapter=self._adapter * (kind % 2),
        )
        return Prompt(slot=slot, tokens=self._random_tokens(length), head=0, tail=0, settings=settings)

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._vocab_size) for _ in range(count))

    def _run(
        self, lanes: int, keys: int, prompts: Sequence[Prompt], few: tuple[int, ...] = ()
    ) -> list[Found]:
        """Prefill the prompts in order through one lane count and one key bucket, then decode all.

        few: numbers of rows of decode programs, beside that of all rows.

        All prompts ask for the same number of samples, so that every row is inactive in the end.
        """
        self._runner.sizes = Sizes((lanes,), (keys,), few)
        if not self._runner.keeps_every_position:
            self._runner.blank()  # what a ring holds of positions not computed depends on what ran before
        every = [(chunk, prompt) for prompt in prompts for chunk in self._chunks(prompt)]
        # Chunks before a gap run apart: in a ring those behind it may take their place.
        before = tuple(chunk for chunk, prompt in every if chunk.start < prompt.tail)
        chunks = tuple(chunk for chunk, prompt in every if chunk.start >= prompt.tail)
        rows = tuple(Row(slot=_slot(prompt), request_id=str(prompt.slot)) for prompt in prompts)
        settings = {str(prompt.slot): prompt.settings for prompt in prompts}
        decodes = prompts[0].settings.max_tokens - 1
        tables = self._tables(prompts) if self._runner.config.uses_blocks else ()
        plans = [Plan(step=0, chunks=before, moves=Moves(tables=tables))] if before else []
        plans.append(Plan(step=0, chunks=chunks, decode=rows if decodes else (), moves=Moves(tables=tables)))
        plans += [Plan(step=0, decode=rows)] * (decodes - 1)
        dispatch = self._runner.dispatch
        usual, dispatch.reads_all = dispatch.reads_all, True
        steps = [self._runner.start(plan, settings) for plan in plans]
        dispatch.reads_all = usual
        results = [self._runner.wait(step) for step in steps]
        samples = [[sample] for result in results for sample in result.first]
        for result in results[bool(before) :] if decodes else ():
            for row, prompt in zip(samples, prompts, strict=True):
                if result.decode.tokens[prompt.slot] != NO_TOKEN:
                    row.append(result.decode.sample(prompt.slot))
        hidden: dict[str, dict[int, bytes]] = {str(prompt.slot): {} for prompt in prompts}
        for step in steps:
            for chunk, states in self._hidden(step, lanes):
                at = range(chunk.start, chunk.start + len(chunk.tokens))
                hidden[chunk.request_id].update(zip(at, map(bytes, states), strict=False))
        return [Found(row, hidden[str(prompt.slot)]) for row, prompt in zip(samples, prompts, strict=True)]

    def _hidden(self, step: InFlight, lanes: int) -> Iterator[tuple[Chunk, np.ndarray]]:
        """The chunks of a step, with what stands behind the last layer, f32 `[chunk size, D]`."""
        for index, chunk in enumerate(step.plan.chunks):
            call = np.asarray(step.first[index // lanes].hidden)
            yield chunk, call.reshape(lanes, self._runner.config.chunk_size, -1)[index % lanes]

    def _tables(self, prompts: Sequence[Prompt]) -> tuple[BlockTable, ...]:
        """A block for each position that a prompt writes; for other positions, a block that no prompt writes."""
        config = self._runner.config
        size, (untouched, *free) = config.block_size, range(config.num_blocks or 1)
        tables = []
        for prompt in prompts:
            end = len(prompt.tokens) + prompt.settings.max_tokens - 1
            gap = range(min(prompt.head, prompt.tail), prompt.tail)
            wanted = [at not in gap for at in range(0, end, size)]
            if len(free) < sum(wanted):
                raise TooFewBlocksError
            own, free = iter(free[: sum(wanted)]), free[sum(wanted) :]
            blocks = tuple(next(own) if writes else untouched for writes in wanted)
            tables.append(BlockTable(slot=_slot(prompt), request_id=str(prompt.slot), blocks=blocks))
        return tuple(tables)

    def _chunks(self, prompt: Prompt) -> Iterator[Chunk]:
        size, end = self._runner.config.chunk_size, len(prompt.tokens)
        cut = end - 1 if prompt.last_alone else end
        starts = (*range(0, min(prompt.head, prompt.tail), size), *range(prompt.tail, cut, size))
        starts = starts[-1:] if prompt.is_cached else starts
        for start in (*starts, *([cut] if cut < end else [])):
            stop = min(start + size, end if start == cut else cut)
            yield Chunk(
                slot=_slot(prompt),
                request_id=str(prompt.slot),
                start=start,
                tokens=prompt.tokens[start:stop],
                is_last=stop == end,
            )


def _slot(prompt: Prompt) -> Slot:
    return Slot(index=prompt.slot, epoch=0)
