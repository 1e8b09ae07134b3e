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
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.probe import Probe, TooFewBlocksError
from xla_engine.scheduler import Sample

_logger = logging.getLogger("xla_engine.self_check")


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
    seconds: what the check took. samples: that prefill and decode were compared in. one_row_code: a row goes through
        the same C++ code in prefill and decode. isa: the instruction set of the C++ operations, if any serve.
    """

    row_invariant: bool
    lane_invariant: bool
    bucket_invariant: bool
    prefill_equals_decode: bool
    cut_invariant: bool
    differences: tuple[str, ...]
    seconds: float
    samples: int = 0
    one_row_code: bool = False
    isa: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing that level A rests on differed."""
        return self.row_invariant and self.lane_invariant and self.bucket_invariant

    @property
    def promise(self) -> str:
        """What the engine can promise on this machine, in one sentence, and by which instruction set."""
        by = "" if self.isa is None else f" ({self.isa})"
        if not self.row_invariant:
            return (
                f"the bits of a request depend on its row or its neighbours: level A cannot be promised{by}"
            )
        if not self.ok:
            return f"level A: same bits whatever the batch, with the largest graphs only{by}"
        if not self.prefill_equals_decode:
            return f"level A: same bits whatever the batch{by}"
        if not self.one_row_code:  # found, not promised: it may differ in one sample of a hundred
            found = f"prefill gave the bits of decode in {self.samples} samples"
            return f"level A: same bits whatever the batch; {found}{by}"
        return f"level A: same bits whatever the batch, and prefill gives the bits of decode{by}"


def run_self_check(runner: Runner, vocab_size: int) -> SelfCheck | None:
    """Check a runner with a blank cache, and restrict it to its largest graphs where sizes change bits.

    Nothing is compiled. Afterwards the runner is as it was, but for stale values in the cache. None, and the largest
    graphs only, where a pool of blocks is too small for it.
    """
    began = time.perf_counter()
    lane_choices, bucket_choices = runner.lane_choices, runner.bucket_choices
    probes = [Probe(runner, vocab_size, size) for size in bucket_choices]
    try:
        rows, lanes, buckets, prefill, cuts = _compare(probes, lane_choices)
    except TooFewBlocksError:
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
        samples=probes[-1].samples,
        one_row_code=runner.has_one_row_code,
        isa=runner.isa,
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


def _compare(probes: Sequence[Probe], lane_choices: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
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
        samples = probe.among(crowd, most, size)
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
                    probe.slots, samples, probe.among(crowd, most, longest.bucket), strict=True
                )
                for difference in _difference(found, same)
            ]
        lanes += [
            f"slot {slot} with {size} keys in {count} lanes against {most}: {difference}"
            for count in fewer
            for slot, found in zip(probe.slots, samples, strict=True)
            for difference in _difference(probe.between_neighbours(slot, count), found)
        ]
    return (tuple(found) for found in (rows, lanes, buckets, prefill, cuts))


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
