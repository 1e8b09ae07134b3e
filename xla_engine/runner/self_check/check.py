"""The start-up self-check: whether a request gets the same bits in every row and every program on this machine.

Law 1 rests on properties of compiled programs that no source code can guarantee: a row's bits must not depend on its
index, its neighbours, the number of rows, the number of prefill lanes, or the key bucket. The check runs a probe
request through the engine's own executables, alone and among neighbours. It compares its samples, and the output of
the last layer at every position of its prompt, bit for bit. A vision tower runs a probe tile by itself and right after
another tile, whose programs may not have ended.

If lane counts or key buckets change bits, the runner keeps only the largest, which fits any load: slower, but with the
same bits whatever the batch. If programs of few rows change bits, every step runs all rows. If a row's place or
neighbours change bits, nothing can be done. Each case is logged as a warning of the logger `xla_engine.self_check`;
not with `warnings`, because the machine is at fault, not the calling code.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from xla_engine.errors import ConfigError
from xla_engine.runner.adapters import random_adapter
from xla_engine.runner.backends import library_of
from xla_engine.runner.call_sizes import Sizes
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.probe import (
    MOST_SAMPLES,
    Found,
    Probe,
    TooFewBlocksError,
    enough_blocks,
)
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.utils.comparison import TokenSample, first_difference

_logger = logging.getLogger("xla_engine.self_check")
# Samples of each probe, and whether it has neighbours; the later attempts are for small pools of blocks.
_ATTEMPTS = ((MOST_SAMPLES, True), (3, True), (MOST_SAMPLES, False), (3, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The result of the check.

    row_invariant: the probe's samples are the same alone and in a crowd, in the first, a middle and the last slot.
    few_invariant: and the same through the decode programs of few rows.
    lane_invariant, bucket_invariant: and the same through every prefill lane count, and every key bucket.
    tile_invariant: the vision tower, if there is one, makes the same of a tile alone and beside another.
    prefill_equals_decode: tokens sampled by decode have the bits they have when the prefix before them is prefilled.
        Level B, for information: no request depends on it.
    cut_invariant: a prompt's last token has the same bits in a chunk of its own. Otherwise its whole chunk runs again
        when all of a prompt is cached.
    differences: what differed, in words, the first difference of each comparison.
    seconds: what the check took. samples, positions: of the probe, that were compared for the first four: tokens with
        their log-probabilities, and positions of prompts. decoded: samples that prefill and decode were compared in.
    one_row_code: a row goes through the same C++ code in prefill and decode. isa: the instruction set of the C++
        operations, if any serve. library: where these came from. day: of the earlier start that compared, if one did.
    """

    row_invariant: bool
    few_invariant: bool
    lane_invariant: bool
    bucket_invariant: bool
    prefill_equals_decode: bool
    cut_invariant: bool
    differences: tuple[str, ...]
    seconds: float
    samples: int = 0
    positions: int = 0
    decoded: int = 0
    one_row_code: bool = False
    isa: str | None = None
    library: str | None = None
    day: str | None = None
    tile_invariant: bool = True

    @property
    def ok(self) -> bool:
        """Whether level A holds: no difference in rows, few rows, lanes, key buckets or tiles."""
        sizes = self.few_invariant and self.lane_invariant and self.bucket_invariant
        return self.row_invariant and self.tile_invariant and sizes

    @property
    def promise(self) -> str:
        """The guarantee on this machine in one sentence, with what was compared and by which code it runs."""
        by = "" if self.isa is None else f", by C++ that {self.library} ({self.isa})"
        if not self.row_invariant:
            return (
                f"the bits of a request depend on its row or its neighbours: level A cannot be promised{by}"
            )
        if not self.tile_invariant:
            return (
                f"features of a picture depend on other pictures: level A can be promised for text only{by}"
            )
        if not self.ok:
            return f"level A: same bits whatever the batch, with the largest graphs only{by}"
        shown = f"; {self.samples} samples and {self.positions} prompt positions compared"
        shown += "" if self.day is None else f" on {self.day}"
        if self.prefill_equals_decode and self.one_row_code:  # one code: true of every sample
            shown = f", and prefill gives the bits of decode{shown}"
        elif self.prefill_equals_decode:  # found, not promised: it may differ in one sample of a hundred
            shown = f"{shown}; prefill gave the bits of decode in {self.decoded} samples"
        return f"level A: same bits whatever the batch{shown}{by}"


WithPool = Callable[[int], Runner]
"""Makes a runner that shares the weights of another and has a pool of so many blocks."""


def run_self_check(runner: Runner, vocab_size: int, with_pool: WithPool | None = None) -> SelfCheck | None:
    """Check a runner with a blank cache, and restrict it to its largest programs if sizes change bits.

    Compiles nothing, and leaves the runner as it was, except for stale values in the cache. If the pool of blocks is
    too small, a runner `with_pool` is compiled and checked instead: its programs are the same but for the size of the
    pool. If there can be none, a warning is logged, the runner keeps only its largest programs, and the result is
    None. For an engine of one slot, blocks for one request are enough.
    """
    began = time.perf_counter()
    sizes, largest = runner.sizes, Sizes(runner.sizes.lanes[-1:], runner.sizes.keys[-1:], ())
    found = None
    if runner.spec.lora is not None:  # with an adapter, as requests may have one
        runner.weights.write_adapter(1, random_adapter(runner.spec))
    for samples, crowds in _ATTEMPTS if runner.config.num_slots == 1 else _ATTEMPTS[:2]:
        try:
            found = _compare(runner, vocab_size, samples, crowds=crowds)
            break
        except TooFewBlocksError:
            continue
        finally:
            runner.reset()
            runner.sizes = sizes
    if runner.spec.lora is not None:
        runner.weights.write_adapter(1, None)
    if found is None:
        return _in_other_pool(runner, vocab_size, largest, with_pool)
    tiles = [] if runner.features is None else tile_differences(runner.features.tower)
    runner.sizes = Sizes(
        lanes=(largest if found.lanes else sizes).lanes,
        keys=(largest if found.buckets else sizes).keys,
        few=(largest if found.few else sizes).few,
    )
    check = SelfCheck(
        row_invariant=not found.rows,
        few_invariant=not found.few,
        lane_invariant=not found.lanes,
        bucket_invariant=not found.buckets,
        prefill_equals_decode=not found.prefill,
        cut_invariant=not found.cuts,
        differences=(
            *(*found.rows, *found.few, *found.lanes, *found.buckets, *tiles, *found.prefill, *found.cuts),
        ),
        tile_invariant=not tiles,
        seconds=time.perf_counter() - began,
        samples=found.samples,
        positions=found.positions,
        decoded=found.decoded,
        one_row_code=runner.has_one_row_code,
        isa=runner.isa,
        library=library_of(runner.spec),
    )
    _warn(check, largest)
    return check


def _in_other_pool(
    runner: Runner, vocab_size: int, largest: Sizes, with_pool: WithPool | None
) -> SelfCheck | None:
    """The check of a runner with a larger pool, which decides the sizes of this one, too."""
    config, blocks = runner.config, enough_blocks(runner.config)
    if runner.spec.lora is not None or runner.features is not None:
        why = "with adapters or pictures there is no check in a temporary pool"
    elif with_pool is None:
        why = "there is no temporary pool"
    else:
        try:
            with contextlib.closing(with_pool(blocks)) as other:
                check = run_self_check(other, vocab_size)
                runner.compiles.mark_warm()
                if check is not None:
                    runner.sizes = other.sizes
                    return check
            why = f"{blocks} blocks are too few, too"
        except ConfigError as error:
            why = f"a temporary pool of {blocks} blocks does not fit: {error}"
    runner.sizes = largest
    _logger.warning(
        "self-check: not run, because it needs more than the %s blocks of the pool, and %s. Every step runs the "
        "largest programs, and generated tokens are neither recomputed nor reused. Use num_blocks %d or more",
        config.num_blocks,
        why,
        blocks,
    )
    return None


def tile_differences(tower: VisionTower) -> list[str]:
    """What differs if a tile goes through the tower's programs beside another, in words."""
    shape = (2, *tower.examples[0].shape)
    probe, other = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    alone = np.concatenate(tower.glance(probe))
    started = tower.glance(other), tower.glance(probe)
    behind = np.concatenate(started[1])
    if alone.tobytes() == behind.tobytes():
        return []
    row = int((behind != alone).any(axis=1).argmax())
    return [f"a tile after another one against alone: token {row} has features of other bits"]


def _warn(check: SelfCheck, largest: Sizes) -> None:
    if check.ok:
        return
    (lanes,), (keys,), _ = largest
    causes = (
        (check.row_invariant, "rows are not invariant"),
        (check.tile_invariant, "a tile's features are not invariant"),
        (check.few_invariant, "every decode step runs all rows, as programs of few rows change bits"),
        (check.lane_invariant, f"prefill always runs {lanes} lanes, as other lane counts change bits"),
        (check.bucket_invariant, f"attention always covers {keys} keys, as other key buckets change bits"),
    )
    found = "; ".join(cause for holds, cause in causes if not holds)
    _logger.warning("self-check: %s; %s. %s", found, check.promise, check.differences[0])


@dataclass(slots=True)
class _Differences:
    """What differs, in words: between rows, programs of few rows, lane counts, key buckets, prefill and decode, cuts.

    samples, positions, decoded: how many were compared, as in `SelfCheck`.
    """

    rows: list[str] = field(default_factory=list)
    few: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)
    prefill: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    samples: int = 0
    positions: int = 0
    decoded: int = 0

    def compare(self, kind: list[str], what: str, found: Found, expected: Found) -> None:
        """Add the first difference, if there is any, to one of the lists."""
        self.samples += min(len(found.samples), len(expected.samples))
        self.positions += len(found.hidden.keys() & expected.hidden.keys())
        kind.extend(f"{what}: {difference}" for difference in _difference(found, expected))


def _compare(runner: Runner, vocab_size: int, samples: int, *, crowds: bool) -> _Differences:
    """Compare everything. The longest bucket comes first, as long as no slot holds anything."""
    sizes = runner.sizes
    *shorter, longest = (Probe(runner, vocab_size, size, samples, crowds=crowds) for size in sizes.keys)
    most, fewer = sizes.lanes[-1], sizes.lanes[:-1]
    seen = _Differences()
    alone = longest.alone(most)
    again = Found([*alone.samples[:1], *longest.by_prefill(most, alone.samples)], {})
    seen.compare(seen.prefill, "by prefill against decode", again, alone)
    seen.compare(seen.cuts, "the last token in a chunk of its own", longest.last_token_alone(most), alone)
    seen.decoded, seen.samples, seen.positions = len(again.samples), 0, 0
    for probe in (longest, *shorter):
        size, crowd = probe.bucket, probe.crowd(most)
        among = list(zip(probe.slots, probe.among(crowd, most, size), strict=True))
        where, expected = ("alone", alone) if probe is longest else ("there", among[0][1])
        for slot, found in among if probe is longest else among[1:]:
            what = f"slot {slot} among neighbours, {size} keys, against slot 0 {where}"
            seen.compare(seen.rows, what, found, expected)
        for few in sizes.few if probe is longest else ():  # its slots hold the prompt's keys now
            for slot, found in zip(probe.slots, probe.in_few_rows(most, few), strict=False):
                seen.compare(seen.few, f"slot {slot} in a program of {few} rows", found, alone)
        if probe is not longest:  # the same crowd: only the bucket differs
            others = probe.among(crowd, most, longest.bucket)
            for (slot, found), same in zip(among, others, strict=True):
                what = f"slot {slot} with {size} keys against {longest.bucket}"
                seen.compare(seen.buckets, what, found, same)
        for count in fewer:
            for slot, found in among:
                what = f"slot {slot} with {size} keys in {count} lanes against {most}"
                seen.compare(seen.lanes, what, probe.between_neighbours(slot, count), found)
    return seen


def _difference(found: Found, expected: Found) -> Iterator[str]:
    """The first position of the prompt, or the first sample, whose bits are not the expected ones, in words."""
    for position in sorted(found.hidden.keys() & expected.hidden.keys()):
        if found.hidden[position] != expected.hidden[position]:
            yield f"the hidden state of position {position} has other bits"
            return
    shared = min(len(found.samples), len(expected.samples))
    ours, theirs = ([TokenSample(*each[:2]) for each in side.samples[:shared]] for side in (found, expected))
    if (difference := first_difference(theirs, ours)) is not None:
        yield f"sample {difference.position} is {difference.found}, not {difference.expected}"
