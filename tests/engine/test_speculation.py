"""Speculation changes no bit: with any drafts, at any width and lag, together with every other feature."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_engine.graphs.steps.verify as verify_module
from tests.conftest import TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.speculation.proposer import Proposal, Proposer, Recorded
from xla_engine.engine.speculation.speculator import Speculator, WidthChooser
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.errors import ConfigError
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.outputs import RequestOutput
from xla_engine.runner.step_costs import StepCosts
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Plan
from xla_engine.structured_outputs import StructuredOutputsParams

WIDTH = 4
SPECULATING = replace(
    TINY_ENGINE, block_size=32, speculative_config={"method": "suffix", "num_speculative_tokens": WIDTH - 1}
)


@pytest.fixture(
    scope="module", params=[pytest.param(None, marks=pytest.mark.full), 40], ids=["slots", "blocks"]
)
def speculating(request: pytest.FixtureRequest) -> Iterator[XlaBatchEngine]:
    config = replace(SPECULATING, num_blocks=request.param)
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        yield engine


@pytest.fixture
def engine(speculating: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The same for all tests of this file, with its own choice of widths."""
    speculator = speculating.state.speculator
    assert speculator is not None
    own = speculator.chooser
    yield speculating
    speculator.chooser = own


def choose_with(engine: XlaBatchEngine, chooser: WidthChooser) -> None:
    assert engine.state.speculator is not None
    engine.state.speculator.chooser = chooser


def run(
    engine: XlaBatchEngine, cases: Sequence[Case], seed: int, *, preempts: bool = False
) -> dict[str, RequestOutput]:
    """Submit the cases a few turns apart; some lose their slots."""
    draw = random.Random(seed)
    found: dict[str, RequestOutput] = {}
    recoveries = engine.stats().recoveries
    for case in cases:
        engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
        for _ in range(draw.randrange(3)):
            found.update({output.request_id: output for output in engine.step() if output.finished})
            engine.scheduler.check()
            if preempts and draw.random() < 0.3:
                how = draw.choice([None, *engine.ways_to_preempt])
                engine.preempt(draw.choice(cases).request_id, how=how, to_back=draw.random() < 0.5)
    found.update({output.request_id: output for output in engine.drain()})
    engine.scheduler.check()
    assert len(found) == len(cases) and engine.stats().recoveries == recoveries, engine.last_fault
    return found


def seen(outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
    """Everything in the results that a caller can see, except times."""
    return {name: output.outputs for name, output in outputs.items()}


def known(outputs: Mapping[str, RequestOutput]) -> dict[str, Sequence[int]]:
    found = {}
    for name, output in outputs.items():
        for each in output.outputs:
            found[name if len(output.outputs) == 1 else f"{name}/{each.index}"] = each.token_ids
    return found

    def __missing__(self, name: str) -> Sequence[int]:
        return ()


def proposers(outputs: Mapping[str, Sequence[int]]) -> dict[str, Proposer]:
    return {
        "oracle": Recorded(outputs),
        "liar": Recorded(outputs, right=0.0),
        "corrupted": Recorded(outputs, right=0.7),
        "suffix": SuffixProposer(),
    }


@pytest.mark.parametrize("who", default(["oracle", "liar", "corrupted", "suffix"], 2))
def test_no_proposer_changes_a_bit(tiny: XlaBatchEngine, engine: XlaBatchEngine, who: str) -> None:
    """With temperatures, penalties, biases, masks, stops, log-probabilities, all lags, and preempted requests."""
    for lag, preempts in ((0, False), (1, False), (1, True), (2, True)):
        cases = [
            replace(case, params=replace(case.params, n=1))
            for case in draw_cases(tiny, 24, seed=lag + 7 * preempts, max_new_tokens=48, every_field=True)
        ]
        plain = run(tiny, cases, 1)
        engine.lag = lag
        engine.draft_with(proposers(known(plain))[who])
        before = engine.stats()
        found = run(engine, cases, 2, preempts=preempts)
        assert seen(found) == seen(plain)
        after = engine.stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        assert 0 <= accepted <= drafted
        # exact, but that a drafted token that stops its request is not counted as accepted
        if who == "oracle":
            for each in found.values():
                end = each.outputs[0]
                by_token = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
                assert each.num_drafted_tokens - each.num_accepted_tokens in ((0, 1) if by_token else (0,))
            assert drafted > 0.6 * sum(len(each.outputs[0].token_ids) for each in found.values())
        if who == "liar":  # look-up on the device, and the engine itself in a replay, may still be right
            assert accepted < drafted


def test_outputs_say_how_many_drafts_were_right(tiny: XlaBatchEngine, engine: XlaBatchEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    case = Case(request_id="a", prompt_token_ids=(5, 6, 7), params=params)
    plain = run(tiny, [case], 0)
    assert plain["a"].num_drafted_tokens == plain["a"].num_accepted_tokens == 0
    engine.lag = 1
    engine.draft_with(Recorded(known(plain)))
    steps = engine.stats().steps
    found = run(engine, [case], 0)
    assert seen(found) == seen(plain)
    assert found["a"].num_drafted_tokens == found["a"].num_accepted_tokens > 12
    assert engine.stats().steps - steps < 10


def test_sequences_of_one_request_speculate_by_themselves(
    tiny: XlaBatchEngine, engine: XlaBatchEngine
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, n=3, seed=4, ignore_eos=True, logprobs=1)
    case = Case(request_id="a", prompt_token_ids=(5, 6, 7), params=params)
    plain = run(tiny, [case], 0)
    engine.lag = 1
    engine.draft_with(SuffixProposer())
    assert seen(run(engine, [case], 0)) == seen(plain)


def test_a_replay_is_drafted_by_what_it_had(tiny: XlaBatchEngine, engine: XlaBatchEngine) -> None:
    """A request that runs again after a fault knows its tokens."""
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True, logprobs=0)
    case = Case(request_id="a", prompt_token_ids=(5, 6, 7), params=params)
    plain = run(tiny, [case], 0)
    engine.lag = 1
    engine.draft_with(SuffixProposer(shares=False))
    engine.submit(case.prompt_token_ids, case.params, request_id="a")
    for _ in range(30):
        engine.step()
    accepted = engine.stats().accepted_tokens
    engine.preempt("a", how="replay")
    (found,) = engine.drain()
    assert found.outputs == plain["a"].outputs
    assert engine.stats().accepted_tokens - accepted > 10


@pytest.mark.full
def test_one_slot_speculates_in_the_blocks_of_one_request(tiny: XlaBatchEngine) -> None:
    """Its self-check uses the blocks of one request, because no two requests ever run together."""
    blocks = -(-TINY_ENGINE.buckets(TINY_ENGINE.context_length(512))[-1] // 32)
    config = replace(SPECULATING, max_num_seqs=1, num_blocks=blocks, prefill_lanes=(2,))
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        check = engine.self_check
        assert check is not None and check.ok and check.samples > 0 and check.positions > 0
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        cases = [each for each in draw_cases(tiny, 6, seed=3) if each.params.n == 1]
        assert seen(run(engine, cases, 1)) == seen(run(tiny, cases, 1))
        assert engine.stats().drafted_tokens > 0


@pytest.mark.full
def test_auto_runs_as_any_width_does(tiny: XlaBatchEngine) -> None:
    config = replace(SPECULATING, speculative_config={"method": "ngram"})
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        assert engine.state.speculator is not None and engine.state.speculator.chooser is not None
        cases = draw_cases(tiny, 24, seed=5, every_field=True)
        plain = run(tiny, cases, 1)
        for seed in range(3):
            engine.draft_with(proposers(known(plain))[["oracle", "corrupted", "suffix"][seed]])
            assert seen(run(engine, cases, seed, preempts=True)) == seen(plain)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"method": "magic"}, "must be one of ngram, suffix"),
        ({"method": "eagle", "model": "there"}, "is not supported"),
        ({"method": "ngram", "model": "there"}, "names the draft model"),
        ({"method": "draft_model", "model": 7}, "a path or a name"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "1 to 15"),
        (
            {"method": "ngram", "prompt_lookup_max": 4},
            "has the fields method, num_speculative_tokens and model",
        ),
        ({}, "needs a method"),
        ("ngram", "must be a mapping"),
    ],
)
def test_what_is_not_there_is_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(speculative_config=options)


def test_where_bits_would_differ_it_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("xla_engine.graphs.inventory.Inventory.compile")
    with pytest.raises(ConfigError, match="do not run the same code"):
        XlaBatchEngine(tiny_checkpoint(), None, replace(SPECULATING, isa="none"))
    with pytest.raises(ConfigError, match="no self-check"):
        XlaBatchEngine(tiny_checkpoint(), None, replace(SPECULATING, self_check=False))


def test_a_model_alone_is_a_draft_model() -> None:
    found = EngineConfig(speculative_config={"model": "there", "num_speculative_tokens": 3}).speculation
    assert found is not None and (found.method, found.model) == ("draft_model", "there")
    assert type(found).of(found.given()) == found


def test_speculation_is_no_part_of_a_result() -> None:
    assert SPECULATING.options() == replace(SPECULATING, speculative_config=None).options()


@pytest.mark.full
def test_a_grammar_s_forced_text_comes_in_few_steps() -> None:
    """Each key of a schema takes a step or two; the bits are those of one token a step."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 6}, "is_active": {"type": "boolean"}},
        "required": ["first_name", "is_active"],
        "additionalProperties": False,
    }
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    found, steps = [], []
    for options in (None, {"method": "suffix", "num_speculative_tokens": 7}):
        config = EngineConfig(
            max_num_seqs=4, max_model_len=128, prefill_lanes=(2,), speculative_config=options
        )
        with XlaBatchEngine.from_pretrained(None, config) as engine:
            for seed in range(4):
                params = SamplingParams(
                    max_tokens=60,
                    temperature=0.8 * (seed % 2),
                    seed=seed,
                    logprobs=1,
                    structured_outputs=constraint,
                    bad_words=["zz"] if seed == 3 else None,
                )
                engine.submit("x = ", params, request_id=str(seed))
            found.append({output.request_id: output.outputs for output in engine.drain()})
            steps.append(engine.stats().steps)
    assert found[0] == found[1]
    assert steps[1] * 1.5 < steps[0]


def test_without_speculation_programs_and_tables_are_what_they_were(
    tiny: XlaBatchEngine, engine: XlaBatchEngine
) -> None:
    plain = {report.name for report in tiny.inventory_report()}
    more = {report.name for report in engine.inventory_report()} - plain
    assert not any(name.startswith("verify") for name in plain)
    assert sum(name.startswith("verify") for name in more) == 3
    assert tiny.runner.state.tables.draft_masks is None
    assert tiny.state.speculator is None


@pytest.mark.parametrize(
    "fault",
    [
        "writes too far",
        pytest.param("keeps one too many", marks=pytest.mark.full),
        pytest.param("one noise a step", marks=pytest.mark.full),
    ],
)
def test_wrong_rules_are_found(tiny: XlaBatchEngine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison detects accepted wrong drafts, keys in the wrong place, and noise that depends on the step."""
    if fault == "keeps one too many":
        monkeypatch.setattr(verify_module.jnp, "cumprod", _ones_first)
    elif fault == "writes too far":
        through_layers = verify_module.through_layers

        def shifted(*given: Any, **named: Any) -> Any:
            *rest, fed = given
            later = fed.lanes._replace(start=fed.lanes.start + 1)
            return through_layers(*rest, fed._replace(lanes=later), **named)

        monkeypatch.setattr(verify_module, "through_layers", shifted)
    else:

        def sample(logits: jax.Array, rows: Any, position: jax.Array, *rest: Any, **named: Any) -> Any:
            return sampling.sample(logits, rows, position - position % WIDTH, *rest, **named)

        monkeypatch.setattr(verify_module, "sample", sample)
    config = replace(SPECULATING, compile_cache=False, max_num_seqs=4, prefill_lanes=(2,))
    try:
        speculating = XlaBatchEngine(tiny_checkpoint(), None, config)
    except ConfigError as error:  # programs of few rows go by the same rules, and the start looks at them
        assert "the self-check found" in str(error) and fault != "keeps one too many"
        return
    with speculating as engine:
        monkeypatch.undo()
        params = SamplingParams(temperature=1.0, max_tokens=24, seed=1, logprobs=0, ignore_eos=True)
        cases = [
            Case(request_id=str(seed), prompt_token_ids=(5, 6, 7), params=replace(params, seed=seed))
            for seed in range(4)
        ]
        plainly = run(tiny, cases, 1)
        stop = [each.token_ids[7] for each in (output.outputs[0] for output in plainly.values())]
        cases = [
            replace(case, params=replace(case.params, stop_token_ids=[token]))
            for case, token in zip(cases, stop, strict=True)
        ]
        outputs = known(plainly)
        plainly = run(tiny, cases, 1)
        engine.draft_with(Recorded(outputs, 0.6))
        assert seen(run(engine, cases, 1)) != seen(plainly)


_cumprod = jnp.cumprod


def _ones_first(values: jax.Array, axis: int | None = None) -> jax.Array:
    """The planted fault: all drafts count as right."""
    return jnp.ones_like(values) if values.ndim == 2 else _cumprod(values, axis=axis)


def test_a_row_that_makes_its_verify_steps_fail_ends_alone(
    engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps fail only when it may sample several tokens; requests in the same steps get their usual results."""
    cases = [
        replace(
            case,
            prompt_token_ids=case.prompt_token_ids[:200],
            params=replace(case.params, max_tokens=12, min_tokens=0, ignore_eos=True),
        )
        for case in draw_cases(engine, 6, seed=41)
    ]
    alone = seen(run(engine, cases, seed=1))
    real = engine.runner.wait

    def wait(step: Any) -> Any:
        if any(row.request_id == "case-2" for row in step.plan.verify):
            raise RuntimeError("planted")
        return real(step)

    monkeypatch.setattr(engine.runner, "wait", wait)
    for case in cases:
        engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
    found = {output.request_id: output for output in engine.drain()}
    assert found["case-2"].outputs[0].finish_reason == "error" and "planted" in str(found["case-2"].error)
    others = {name: outputs for name, outputs in seen(found).items() if name != "case-2"}
    assert others == {name: outputs for name, outputs in alone.items() if name != "case-2"}


class Silent(SuffixProposer):
    """Proposes nothing, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.told: dict[str, list[int]] = {}

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        self.told.setdefault(name, []).extend(tokens)

    def propose(self, name: str, most: int) -> Proposal:
        self.asked.append(name)
        return Proposal()


CHEAP = StepCosts(decode={1: 1.0}, verify={(TINY_ENGINE.max_num_seqs, WIDTH): 1.5})


def _free(count: int) -> list[Case]:
    params = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True)
    return [
        Case(request_id=str(seed), prompt_token_ids=(5, 6, 7), params=replace(params, seed=seed))
        for seed in range(count)
    ]


def test_rows_without_drafts_are_looked_at_by_few_and_seldom(
    engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look asks for some of the rows and takes no tokens, so that no text is made early; a proposer hears everything
    in the end."""
    takes: list[str] = []
    decode = LiveSequence.decode_text
    monkeypatch.setattr(
        LiveSequence, "decode_text", lambda self: takes.append(self.request_id) or decode(self)
    )
    choose_with(engine, chooser := WidthChooser(CHEAP))
    monkeypatch.setattr("xla_engine.engine.speculation.speculator.SAMPLE", 3)
    engine.lag = 1
    counts = []
    for looks in (True, False):
        if not looks:
            chooser._wait = 1 << 20
        engine.draft_with(proposer := Silent())
        takes.clear()
        before = engine.stats()
        found = run(engine, _free(6), 0)
        after = engine.stats()
        assert after.drafted_tokens == before.drafted_tokens
        assert proposer.told == {name: list(tokens) for name, tokens in known(found).items()}
        counts.append(len(takes))
        assert len(proposer.asked) <= 3 * (after.steps - before.steps) / 7
        assert bool(proposer.asked) is looks
    assert counts[0] == counts[1]


def test_a_row_is_looked_up_once_in_a_turn(
    tiny: XlaBatchEngine, engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of drafts to verify determines the width of a step."""
    asked: list[str] = []
    turns: list[list[str]] = []

    class Counted(Recorded):
        def propose(self, name: str, most: int) -> Proposal:
            asked.append(name)
            return super().propose(name, most)

    engine.lag = 1
    choose_with(engine, WidthChooser(CHEAP))
    outputs = known(run(tiny, _free(6), 0))
    drafts = Speculator.drafts

    def ended(self: Speculator, plan: Plan) -> dict[str, Any]:
        found = drafts(self, plan)
        turns.append(sorted(asked))
        asked.clear()
        return found

    monkeypatch.setattr(Speculator, "drafts", ended)
    engine.draft_with(Counted(outputs))
    before = engine.stats().accepted_tokens
    assert known(run(engine, _free(6), 0)) == outputs
    assert engine.stats().accepted_tokens > before
    assert any(turns) and all(len(each) == len(set(each)) for each in turns)


class OfText(Recorded):
    """Reports that a match of three tokens found its drafts."""

    def propose(self, name: str, most: int) -> Proposal:
        return super().propose(name, most)._replace(match=3)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_looks_learn_whether_guesses_come_true_before_a_step_is_spent(
    tiny: XlaBatchEngine, engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch, right: float
) -> None:
    choose_with(engine, chooser := WidthChooser(CHEAP))
    engine.lag = 1
    plain = run(tiny, _free(6), 0)
    engine.draft_with(OfText(known(plain), right))
    before = engine.stats()
    assert seen(run(engine, _free(6), 0)) == seen(plain)
    after = engine.stats()
    drafted, accepted = (
        getattr(after, field) - getattr(before, field) for field in ("drafted_tokens", "accepted_tokens")
    )
    if right:
        assert accepted > 6 * 64 / 3 and chooser.acceptance.of(3) > 0.8
    else:
        assert drafted == 0 and chooser.acceptance.of(3) < 0.1


def test_drafts_that_are_always_wrong_are_few(
    tiny: XlaBatchEngine, engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_with(engine, WidthChooser(CHEAP))
    engine.lag = 1
    plain = run(tiny, _free(6), 0)
    engine.draft_with(Recorded(known(plain), right=0.0))
    before = engine.stats().drafted_tokens
    assert seen(run(engine, _free(6), 0)) == seen(plain)
    drafted = engine.stats().drafted_tokens - before
    assert 0 < drafted < 6 * 64 / 6
