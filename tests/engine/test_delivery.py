"""Requests get the tokens that were sampled for them, and their text whenever it is read, in pieces of any size."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequences import live_sequence
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.decoded_rows import DecodedRows
from xla_engine.engine.requests.output_collector import AllSeen, OutputCollector, Seen
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.graphs.sampling.logprobs import TopLogprobs
from xla_engine.observability.distributions import Histograms
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Decoded, FinishReason, Sample, Slot
from xla_engine.scheduler import Row as ScheduledRow

SLOTS = 4


class Spelling:
    """In the place of a tokenizer: each token is a letter, and one of them has no text."""

    BROKEN = 25

    def incremental(self, skip: bool) -> Spelling:
        return self

    def push(self, token_id: int) -> str:
        if token_id == self.BROKEN:
            raise ValueError("no text")
        return chr(ord("a") + token_id)

    def push_all(self, token_ids: list[int]) -> Iterator[str]:
        return map(self.push, token_ids)

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(self.push, ids))

    def token_string(self, token_id: int) -> str:
        return self.decode([token_id])


def live(name: str, collector: OutputCollector | None = None, **params: object) -> LiveSequence:
    wanted = SamplingParams.from_mapping(params)
    return live_sequence(name, (1,), wanted, Spelling(), collector=collector)


@dataclass
class Row:
    """A request, its decode slot or None, and its expected tokens."""

    request: LiveSequence
    slot: int | None = None
    samples: list[Sample] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def check(self) -> None:
        output = self.request.output()
        (found,) = output.outputs
        assert found.token_ids == tuple(sample.token_id for sample in self.samples)
        assert found.text == "".join(chr(ord("a") + token) for token in found.token_ids)
        assert output.metrics is not None and output.metrics.token_times == tuple(self.times)
        if found.logprobs is not None:
            assert found.logprobs == tuple(sample.logprob for sample in self.samples)
        if found.top_logprobs is not None:
            tops = [sample.extra for sample in self.samples if isinstance(sample.extra, TopLogprobs)]
            assert [
                set(top) - {token} for top, token in zip(found.top_logprobs, found.token_ids, strict=True)
            ] == [set(top.token_ids) - {token} for top, token in zip(tops, found.token_ids, strict=True)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_request_gets_what_its_slot_sampled_while_it_had_it(seed: int) -> None:
    """Requests join and leave the rows, continue in another slot, and are read, at any step."""
    draw, histogram = random.Random(seed), Histograms().inter_token_seconds
    kinds: list[dict[str, object]] = [{}, {"logprobs": 0}, {"logprobs": 2}]
    rows = [Row(live(str(number), **draw.choice(kinds))) for number in range(9)]
    decoded: DecodedRows | None = None
    for step in range(40):
        free = set(range(SLOTS)) - {row.slot for row in rows}
        for row in rows:
            if row.slot is not None and draw.random() < 0.05:
                row.slot, decoded = None, None
            elif row.slot is None and free and draw.random() < 0.1:
                row.slot, decoded = free.pop(), None
        if decoded is None:
            table = {row.request.request_id: row.request for row in rows}
            planned = [
                ScheduledRow(slot=Slot(index=row.slot, epoch=step), request_id=row.request.request_id)
                for row in rows
                if row.slot is not None
            ]
            decoded = DecodedRows(planned, table)
            assert decoded.lasts and not decoded.immediate
        tokens = [draw.randrange(Spelling.BROKEN) for _ in range(SLOTS)]
        logprobs = [-draw.random() for _ in range(SLOTS)]
        extra = {
            row.slot: TopLogprobs(1, (draw.randrange(9), 10), (-0.5, -0.75))
            for row in rows
            if row.slot is not None and row.request._params.logprobs
        }
        columns = Decoded(tokens=tokens, logprobs=logprobs, extra=extra)
        decoded.keep(step, columns, float(step), histogram)
        for row in rows:
            if row.slot is not None:
                row.samples.append(Sample(tokens[row.slot], logprobs[row.slot], extra.get(row.slot)))
                row.times.append(float(step))
        for row in draw.sample(rows, 2):
            row.check()
    for row in rows:
        row.check()
    lives = [row.times for row in rows if row.times]
    assert histogram.now().count == sum(len(times) - 1 for times in lives)
    assert histogram.now().total == sum(times[-1] - times[0] for times in lives)


def test_followers_hear_of_every_token_and_others_of_the_end(tiny: XlaBatchEngine) -> None:
    every, ends = OutputCollector(), OutputCollector(every_token=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tiny.submit([1, 2], params, request_id="every", collector=every)
    tiny.submit([3, 4], params, request_id="ends", collector=ends)
    told: dict[str, list[int]] = {"every": [], "ends": []}
    while tiny.has_work:
        tiny.advance()
        for collector in (every, ends):
            for reader in collector.take():
                told[reader.request_id].append(len(reader.output().outputs[0].token_ids))
    assert told["every"] == sorted(set(told["every"])) and len(told["every"]) > 3
    assert told["ends"] == [6]


def test_text_that_cannot_be_made_is_told_when_the_request_goes_on() -> None:
    """An earlier reader gets the tokens, and the text so far."""
    request = live("bad")
    for token in (1, 2):
        request.keep(Sample(token), 0.0)
    assert request.output().outputs[0].text == "bc"
    for token in (3, Spelling.BROKEN):
        request.keep(Sample(token), 0.0)
    found = request.output().outputs[0]
    assert (found.token_ids, found.text, found.finish_reason) == ((1, 2, 3, Spelling.BROKEN), "bcd", None)
    with pytest.raises(ValueError, match="no text"):
        request.decode_text()
    assert request.finish(FinishReason.LENGTH, 1.0) is FinishReason.ERROR
    output = request.output()
    assert output.outputs[0].finish_reason == "error" and output.error == "no text"


@pytest.mark.parametrize(
    ("reason", "told", "stands"),
    [
        (FinishReason.ABORT, "the engine was drained", "no text"),
        (FinishReason.ERROR, "the device is gone", "the device is gone"),
    ],
)
def test_text_that_cannot_be_made_is_the_error_unless_there_was_one(
    reason: FinishReason, told: str, stands: str
) -> None:
    """A request that has no reader ends for another reason, and its text then cannot be decoded."""
    request = live("bad")
    request.keep(Sample(Spelling.BROKEN), 0.0)
    assert request.finish(reason, 1.0, told) is FinishReason.ERROR
    assert request.output().error == stands


@pytest.mark.parametrize("only_ended", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_news_add_up_to_the_output(embedded: XlaBatchEngine, n: int, only_ended: bool) -> None:
    """Whenever a reader looks, each token and character is news once; sequences that still run can be left out."""
    params = SamplingParams(
        n=n, max_tokens=40, seed=4, logprobs=2, prompt_logprobs=1, stop=["ret"], temperature=1
    )
    embedded.submit("def add(a, b):", params, request_id="whole")
    (whole,) = embedded.drain()
    seen: AllSeen = defaultdict(Seen)
    collector = OutputCollector(every_token=not only_ended)
    embedded.submit("def add(a, b):", params, request_id="parts", collector=collector)
    draw, told = random.Random(n), []
    while not told or not told[-1].finished:
        embedded.advance()
        if draw.random() < 0.4:
            told += [request.news(seen, only_ended=only_ended) for request in collector.take()]
    for expected in whole.outputs:
        parts = [each for output in told for each in output.outputs if each.index == expected.index]
        assert len(parts) == 1 or not only_ended
        assert [each.finish_reason for each in parts[:-1]] == [None] * (len(parts) - 1)
        assert "".join(each.text for each in parts) == expected.text
        for name in ("token_ids", "logprobs", "top_logprobs"):
            assert tuple(chain.from_iterable(getattr(each, name) for each in parts)) == getattr(
                expected, name
            )
        last = parts[-1]
        assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert told[-1].prompt_logprobs is not None and tuple(told[-1].prompt_logprobs) == whole.prompt_logprobs
    assert told[-1].metrics is not None and told[-1].metrics.finished_time is not None
