"""Stop strings: the same end however the text is cut, no text is taken back, and which end has precedence."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequences import live_sequence
from tests.support.stop_strings import by_definition
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import FinishReason, Sample
from xla_engine.text.detokenizer import IncrementalDetokenizer
from xla_engine.text.stop_strings import GeneratedText, StopStrings

FEW = st.text("ab", max_size=40)  # two letters, so that strings overlap each other and themselves
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6).map(tuple)


class Vocabulary:
    """A tokenizer as far as a request needs one."""

    def incremental(self, skip_special_tokens: bool) -> Pieces:
        return Pieces(TEXTS)


class Pieces(IncrementalDetokenizer):
    """A detokenizer whose n-th token is the n-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]


def generate(pieces: list[str], stop: tuple[str, ...], include: bool) -> tuple[str, str | None, list[str]]:
    """Text, match, and what was shown after each token."""
    text, shown = GeneratedText(Pieces(pieces), stop, include_stop=include), []
    for token_id in range(len(pieces)):
        match = text.push(token_id)
        shown.append(text.text)
        if match is not None:
            return text.text, match, shown
    text.end()
    return text.text, None, shown


@settings(max_examples=400, deadline=None)
@given(text=FEW, stop=STOPS, cuts=st.lists(st.integers(0, 40)), include=st.booleans())
def test_any_cut_of_the_text_gives_the_same_result(
    text: str, stop: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    """Compared with the definition; the visible text only grows, and the result begins with it."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    result, match, shown = generate(pieces, stop, include)
    assert (result, match) == by_definition(text, stop, include)
    for earlier, later in zip(shown, [*shown[1:], result], strict=True):
        assert later.startswith(earlier)


@settings(max_examples=200, deadline=None)
@given(text=FEW, stop=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    _, match, shown = generate(list(text), stop, include=False)
    for count, visible in enumerate(shown if match is None else shown[:-1], 1):
        so_far = text[:count]
        pending = max(n for n in range(count + 1) if n == 0 or any(s.startswith(so_far[-n:]) for s in stop))
        assert visible == so_far[: count - pending]


@settings(max_examples=100, deadline=None)
@given(text=FEW, stop=STOPS, cut=st.integers(0, 40))
def test_a_stop_string_may_begin_but_not_end_where_stops_are_not_yet_allowed(
    text: str, stop: tuple[str, ...], cut: int
) -> None:
    """With `min_tokens`, the first piece ends nothing, and the search continues from there."""
    head, tail = text[:cut], text[cut:]
    stream = GeneratedText(Pieces([head, tail]), stop)
    assert stream.push(0, may_stop=False) is None
    match = stream.push(1)
    expected = next(
        (end for end in range(len(head) + 1, len(text) + 1) if any(text[:end].endswith(s) for s in stop)),
        None,
    )
    assert (match is not None) == (expected is not None)
    if match is not None and expected is not None:
        assert stream.text == text[: expected - len(match)]


def test_many_and_long_stop_strings_cost_one_look_at_each_character() -> None:
    """The automaton takes at most two steps for each character of text, for any number of strings."""
    strings = tuple("a" * 40 + chr(0x4E00 + n) for n in range(200))
    stops, steps = StopStrings(strings), 0
    step = stops._fail.__getitem__

    class Counted(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
            nonlocal steps
            steps += 1
            return step(index)

    stops._fail = Counted(stops._fail)
    text = ("a" * 39 + "b") * 50
    assert stops.search(0, text) == (0, None)
    assert steps <= len(text)
    assert stops.search(0, "a" * 70 + "\u4e07")[1] == (71, strings[7])


# -- precedence ------------------------------------------------------------------------------------------

EOS, STOP_ID, STRING, PLAIN = 0, 1, 2, 3
TEXTS = ["<eos>", "<id>", "x.", "y"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("last", "at_cap", "reason", "stop_reason", "text", "text_with_stop"),
    [
        (EOS, False, "stop", None, "y", "y<eos>"),
        (EOS, True, "stop", None, "y", "y<eos>"),
        (STOP_ID, False, "stop", STOP_ID, "y", "y<id>"),
        (STOP_ID, True, "stop", STOP_ID, "y", "y<id>"),
        (STRING, False, "stop", ".", "yx", "yx."),
        (STRING, True, "stop", ".", "yx", "yx."),
        (PLAIN, True, "length", None, "yy", "yy"),
        (PLAIN, False, None, None, "yy", "yy"),
    ],
)
def test_what_ends_a_request_goes_before_what_would_have(
    last: int,
    at_cap: bool,
    reason: str | None,
    stop_reason: object,
    text: str,
    text_with_stop: str,
    include: bool,
) -> None:
    """A stop id (eos named as none) before a stop string before the length; each with its text.

    The texts of stop ids contain stop strings here, which must not count.
    """
    params = SamplingParams(stop=[".", ">"], include_stop_str_in_output=include, stop_token_ids=[STOP_ID])
    request = live_sequence("r", (9,), params, Vocabulary(), stop_ids=(EOS, STOP_ID), eos_ids=(EOS,))
    assert not request.add(Sample(PLAIN), 0.0)
    matched = request.add(Sample(last), 0.0)
    assert matched == (last == STRING)
    if matched or last in (EOS, STOP_ID):
        request.finish(FinishReason.STOP, 0.0)
    elif at_cap:
        request.finish(FinishReason.LENGTH, 0.0)
    output = request.output().outputs[0]
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert output.text == (text_with_stop if include else text)
    assert output.token_ids == (PLAIN, last)  # the tokens of the stop are there


# -- through the engine ----------------------------------------------------------------------------------

PROMPT = "def area(width, height):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=0)


def run(engine: XlaBatchEngine, params: SamplingParams) -> tuple[str, tuple[int, ...], str | None, object]:
    engine.submit(PROMPT, params)
    (output,) = engine.drain()
    found = output.outputs[0]
    return found.text, found.token_ids, found.finish_reason, found.stop_reason


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_engine_stops_at_the_string_and_frees_the_slot(embedded: XlaBatchEngine, lag: int) -> None:
    """With every substring of the unstopped text as stop string, text, tokens and reason follow from that text."""
    embedded.lag = lag
    text, tokens, _, _ = run(embedded, GREEDY)
    assert embedded.tokenizer is not None
    decoded = [embedded.tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    for begin, length in [(0, 1), (3, 2), (9, 5), (12, 1), (17, 9)]:
        stop = text[begin : begin + length]
        at = text.index(stop)
        count = next(n for n, so_far in enumerate(decoded) if stop in so_far)
        params = replace(GREEDY, stop=stop)
        assert run(embedded, params) == (text[:at], tokens[:count], "stop", stop)
        included = replace(params, include_stop_str_in_output=True)
        assert run(embedded, included) == (text[: at + length], tokens[:count], "stop", stop)
        capped = replace(params, max_tokens=count)  # the string goes before the length
        assert run(embedded, capped) == (text[:at], tokens[:count], "stop", stop)

    embedded.submit(PROMPT, replace(GREEDY, stop=text[9:14]))
    while not any(output.finished for output in embedded.step()):
        assert any(view.request is not None for view in embedded.snapshot().slots)
    assert all(view.request is None for view in embedded.snapshot().slots)


def test_stop_strings_need_a_tokenizer(tiny: XlaBatchEngine) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json, so stop strings cannot be found"):
        tiny.submit([1], SamplingParams(stop="x"))
    assert not tiny.has_unfinished
