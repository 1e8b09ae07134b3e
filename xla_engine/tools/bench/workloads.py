"""Workloads of the benchmark: prompts of random token ids or of text, numbers of new tokens, arrival times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from xla_engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, with one entry per request in `prompts`, `max_tokens` and `arrivals`.

    prompts: token ids.
    max_tokens: new tokens, always generated in full, as no token ends a text.
    arrivals: seconds after the start; zero for all that come at once.
    """

    name: str
    about: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    arrivals: tuple[float, ...]

    @property
    def longest(self) -> int:
        """Positions the longest request needs."""
        return max(len(prompt) + count for prompt, count in zip(self.prompts, self.max_tokens, strict=True))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def new_tokens(self) -> int:
        return sum(self.max_tokens)

    def head(self, count: int, tokens: int) -> Workload:
        """The first `count` requests with at most `tokens` new tokens, all at once. For warming up."""
        return Workload(
            name=self.name,
            about=self.about,
            prompts=self.prompts[:count],
            max_tokens=tuple(min(wanted, tokens) for wanted in self.max_tokens[:count]),
            arrivals=(0.0,) * len(self.prompts[:count]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSizes:
    """The sizes of workloads.

    batch: slots.
    vocab_size: token ids are below it.
    positions: prompt and new tokens of a request at most.
    seed: of prompts and lengths.
    prompt, new: prompt and new tokens of the workloads whose requests are all alike.
    rate: Poisson arrivals per second of the ragged workload; None: all at once.
    text: token ids of which prompts are pieces; prompts are random ids if it is shorter than they are.
    """

    batch: int
    vocab_size: int
    positions: int = 2048
    seed: int = 0
    prompt: int = 128
    new: int = 128
    rate: float | None = None
    text: tuple[int, ...] = ()


def make_workload(name: str, sizes: WorkloadSizes) -> Workload:
    """The workload `name` of `WORKLOADS`. Raises ConfigError for another name."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is not known; use some of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](sizes)


def uniform(sizes: WorkloadSizes) -> Workload:
    """As many requests as slots, all alike (128 in, 128 out unless told otherwise): the decode rate."""
    about = f"{sizes.batch} requests, {sizes.prompt} in, {sizes.new} out"
    return _at_once("uniform", about, sizes, [(sizes.prompt, sizes.new)] * sizes.batch)


def prefill(sizes: WorkloadSizes) -> Workload:
    """The same prompts with one new token each: the prefill rate."""
    about = f"{sizes.batch} requests, {sizes.prompt} in, 1 out"
    return _at_once("prefill", about, sizes, [(sizes.prompt, 1)] * sizes.batch)


def prefill_heavy(sizes: WorkloadSizes) -> Workload:
    """Long prompts, short answers: 1,000 in and 16 out, as many as slots."""
    about = f"{sizes.batch} requests, 1000 in, 16 out"
    return _at_once("prefill-heavy", about, sizes, [(1000, 16)] * sizes.batch)


def ragged(sizes: WorkloadSizes) -> Workload:
    """Heavy-tailed lengths, eight times as many requests as slots: admission into freed slots.

    Prompt and output lengths are independent log-normals of deviation 1 (in the logarithm) with medians 64 and 48,
    cut off at 4..512 and 4..384 (for a model of few positions, where both fit). Means are then about 100 and 75,
    between those of the Alpaca (19 in, 58 out) and ShareGPT (161 in, 338 out) traces in Kwon et al., "Efficient memory
    management for large language model serving with PagedAttention" (2023), section 6.1, figure 11, whose
    histograms have such tails.
    """
    draw = random.Random(f"ragged/{sizes.seed}/{sizes.batch}")
    longest = min(512, sizes.positions // 2), min(384, sizes.positions // 2)
    lengths = [
        (_log_normal(draw, 64, 4, longest[0]), _log_normal(draw, 48, 4, longest[1]))
        for _ in range(8 * sizes.batch)
    ]
    arrivals = [0.0] * len(lengths)
    how = "all at once"
    if sizes.rate is not None:
        how = f"Poisson, {sizes.rate:g} per second"
        for index in range(1, len(lengths)):
            arrivals[index] = arrivals[index - 1] + draw.expovariate(sizes.rate)
    about = f"{len(lengths)} requests, log-normal lengths, {how}"
    return _make("ragged", about, sizes, lengths, arrivals)


def pair(sizes: WorkloadSizes) -> Workload:
    """Two requests; the second arrives while the first runs, at a time that the measurement chooses."""
    about = f"a second request while one runs, {sizes.prompt} in, {sizes.new} out"
    return _at_once("pair", about, sizes, [(sizes.prompt, sizes.new)] * 2)


WORKLOADS: dict[str, Callable[[WorkloadSizes], Workload]] = {
    "uniform": uniform,
    "prefill": prefill,
    "prefill-heavy": prefill_heavy,
    "ragged": ragged,
    "pair": pair,
}


def _log_normal(draw: random.Random, median: float, low: int, high: int) -> int:
    return min(max(round(draw.lognormvariate(math.log(median), 1.0)), low), high)


def _at_once(name: str, about: str, sizes: WorkloadSizes, lengths: list[tuple[int, int]]) -> Workload:
    return _make(name, about, sizes, lengths, [0.0] * len(lengths))


def _make(
    name: str, about: str, sizes: WorkloadSizes, lengths: list[tuple[int, int]], arrivals: list[float]
) -> Workload:
    draw = random.Random(f"prompts/{sizes.seed}")

    def prompt_of(length: int) -> tuple[int, ...]:
        if len(sizes.text) < length:
            return tuple(draw.choices(range(sizes.vocab_size), k=length))
        start = draw.randrange(len(sizes.text) - length + 1)
        return sizes.text[start : start + length]

    return Workload(
        name=name,
        about=about,
        prompts=tuple(prompt_of(prompt) for prompt, _ in lengths),
        max_tokens=tuple(new for _, new in lengths),
        arrivals=tuple(arrivals),
    )
