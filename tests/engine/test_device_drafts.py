"""Drafts of a draft model, an MTP layer or an EAGLE-3 head on the device: they are correct and change no bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.test_speculation import run, seen
from tests.engine.test_speculation_families import CONFIG, DENSE, HYBRID, WIDTH, cases_of
from tests.support.eagle3 import ByNumpy, head_config, head_tensors, write_head
from tests.support.host_layers import to_host
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import NoProposer
from xla_engine.engine.speculation.speculator import Acceptance
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence.cases import draw_cases
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.steps import draft_head
from xla_engine.graphs.steps.draft_sampling import proposed
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint, random_checkpoint
from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.model_files import open_model
from xla_engine.runner.drafting.proposers import joining_shapes, load_mtp, mtp_config
from xla_engine.sampling_params import SamplingParams

TAPS = (1, 0, 2)  # layers before which a head sees the model; it has two
GOLDEN = Path(__file__).parents[1] / "golden" / "families"
BY_MODEL = {"method": "draft_model", "model": "given", "num_speculative_tokens": WIDTH - 1}
BY_LAYER = {"method": "mtp", "num_speculative_tokens": WIDTH - 1}


def mtp_layer(model: ModelConfig) -> Checkpoint:
    """Random weights of an MTP layer for a model."""
    config = mtp_config(model)
    layer = random_checkpoint(config, seed=4, scale=0.2)
    draw = np.random.default_rng(5)
    more: dict[str, Any] = {
        name: (draw.standard_normal(shape) * 0.2).astype(ml_dtypes.bfloat16 if len(shape) > 1 else np.float32)
        for name, shape in joining_shapes(config).items()
    }
    return replace(layer, weights={**layer.weights, **more})


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, marks=pytest.mark.release), pytest.param(40, marks=pytest.mark.full)],
    ids=["slots", "blocks"],
)
def by_model(request: pytest.FixtureRequest) -> Iterator[XlaBatchEngine]:
    """The draft model is the model itself, so that every draft should be right."""
    config = replace(
        TINY_ENGINE, block_size=32, num_blocks=request.param, prefill_lanes=(2,), speculative_config=BY_MODEL
    )
    with XlaBatchEngine(tiny_checkpoint(), None, config, draft=tiny_checkpoint()) as engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        yield engine


def test_a_draft_model_changes_no_bit(tiny: XlaBatchEngine, by_model: XlaBatchEngine) -> None:
    """With all lags, preempted requests, and slots that get new owners."""
    for lag, preempts in ((0, False), (1, True), (2, True)):
        cases = [
            replace(case, params=replace(case.params, n=1))
            for case in draw_cases(tiny, 20, seed=lag, max_new_tokens=48, every_field=True)
        ]
        expected = run(tiny, cases, 1)
        by_model.lag = lag
        assert seen(run(by_model, cases, 2, preempts=preempts)) == seen(expected)
    by_model.lag = 1


def test_the_model_itself_drafts_what_it_samples(tiny: XlaBatchEngine, by_model: XlaBatchEngine) -> None:
    """Its keys stay correct after rejected drafts, new owners and prompts of many chunks; its noise is the row's."""
    draw = np.random.default_rng(0)
    cases = []
    for case in draw_cases(tiny, 12, seed=3):
        params = SamplingParams(
            temperature=0.8, max_tokens=40, seed=1, ignore_eos=True, repetition_penalty=1.3
        )
        prompt = tuple(int(token) for token in draw.integers(0, 199, int(draw.integers(1, 200))))
        cases.append(replace(case, prompt_token_ids=prompt, params=params))
    expected = run(tiny, cases, 1)
    by_model.draft_with(NoProposer())
    before = by_model.stats()
    assert seen(run(by_model, cases, 1)) == seen(expected)
    after = by_model.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    assert drafted > 300 and accepted > 0.97 * drafted, (accepted, drafted)
    assert after.steps - before.steps < 0.6 * sum(40 for _ in cases)


class DrawnWidths:
    """Stands for `WidthChooser`: any width up to 8 in any step."""

    def __init__(self) -> None:
        self.looks, self.is_on, self.acceptance, self.seen = True, True, Acceptance(), set[int]()
        self._draw = random.Random(0)

    def choose(self, rows: int, proposals: Sequence[tuple[int, int]]) -> int:
        self.seen.add(width := self._draw.randrange(9))
        return width


@pytest.mark.full
def test_steps_of_any_width_change_no_bit(tiny: XlaBatchEngine) -> None:
    """Widths that no program was made for run in one with more room."""
    options = {**BY_MODEL, "num_speculative_tokens": "auto"}
    config = replace(
        TINY_ENGINE, block_size=32, num_blocks=40, prefill_lanes=(2,), speculative_config=options
    )
    cases = draw_cases(tiny, 24, seed=5, max_new_tokens=48, every_field=True)
    cases = [replace(case, params=replace(case.params, n=1)) for case in cases]
    expected = run(tiny, cases, 1)
    with XlaBatchEngine(tiny_checkpoint(), None, config, draft=tiny_checkpoint()) as engine:
        assert engine.state.speculator is not None
        engine.state.speculator.chooser = widths = DrawnWidths()
        assert seen(run(engine, cases, 2, preempts=True)) == seen(expected)
        assert widths.seen == set(range(9)) and engine.stats().accepted_tokens > 100
        assert engine.stats().compiles_after_warmup == 0


def test_a_draft_model_must_fit() -> None:
    config = replace(TINY_ENGINE, prefill_lanes=(2,), speculative_config=BY_MODEL)
    with pytest.raises(ConfigError, match="has no draft model"):
        XlaBatchEngine(tiny_checkpoint(), None, replace(config, speculative_config={"method": "draft_model"}))
    for model, why in (
        (replace(TINY, vocab_size=200), "200 token ids and the model 199"),
        (replace(TINY, max_position_embeddings=128), "has 128 positions, but requests may have 300"),
        (replace(HYBRID, vocab_size=199), "recurrent layers"),
    ):
        with pytest.raises(ConfigError, match=why):
            XlaBatchEngine(tiny_checkpoint(), None, config, draft=tiny_checkpoint(model=model))


@pytest.mark.full
@pytest.mark.parametrize("tokens", [WIDTH - 1, pytest.param("auto", marks=pytest.mark.release)])
@pytest.mark.parametrize("itself", [pytest.param(True, marks=pytest.mark.release), False])
def test_the_embedded_model_has_drafts(embedded: XlaBatchEngine, tokens: Any, itself: bool) -> None:
    """They come from its own draft model, or from the model itself if its directory is named."""
    options = {"method": "draft_model", "num_speculative_tokens": tokens}
    if itself:
        options["model"] = str(embedded.checkpoint.path)
    engine_config = replace(embedded.config, max_num_seqs=4, prefill_lanes=(2,), speculative_config=options)
    params = SamplingParams(temperature=0.7, max_tokens=30, seed=5, logprobs=1)
    found = []
    for engine in (embedded, XlaBatchEngine.from_pretrained(None, engine_config)):
        engine.submit("def parse(line):\n", params, request_id="a")
        found += [output.outputs for output in engine.drain()]
        if engine is not embedded:
            assert engine.stats().accepted_tokens > 0 or options["num_speculative_tokens"] == "auto"
            engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name", [pytest.param("dense", marks=pytest.mark.release), pytest.param("hybrid", marks=pytest.mark.full)]
)
def test_an_mtp_layer_changes_no_bit_and_sees_every_position(name: str) -> None:
    """The layer's cache of a decoded sequence equals its cache of the same sequence as a prompt."""
    model = {"dense": DENSE, "hybrid": HYBRID}[name]
    checkpoint = tiny_checkpoint(model=model)
    config = replace(CONFIG, speculative_config=BY_LAYER)
    with XlaBatchEngine(checkpoint, None, config, draft=mtp_layer(model)) as engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        with XlaBatchEngine(checkpoint, None, CONFIG) as plain:
            for lag, preempts in ((0, False), (1, True), (2, False)):
                cases = cases_of(plain, lag)
                expected = run(plain, cases, 1)
                engine.lag = lag
                assert seen(run(engine, cases, 2, preempts=preempts)) == seen(expected)
        assert engine.stats().drafted_tokens > 100
        sees_every_position(engine)


def sees_every_position(engine: XlaBatchEngine) -> None:
    """A layer's cache of a decoded sequence equals its cache of the same sequence as a prompt."""
    prompt = tuple(range(5, 45))
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=30, ignore_eos=True)
    engine.blank()
    engine.draft_with(NoProposer())
    engine.submit(prompt, params, request_id="a")
    (output,) = engine.drain()
    stepwise = keys_and_values(engine)
    engine.blank()
    sequence = (*prompt, *output.outputs[0].token_ids)
    engine.submit(sequence, SamplingParams(max_tokens=1), request_id="b")
    engine.drain()
    at_once = keys_and_values(engine)
    positions = len(sequence) - 6  # the last ones come in a step that did not follow
    for one, other in zip(stepwise, at_once, strict=True):
        assert one[0, :, :positions].any()
        assert np.array_equal(one[0, :, :positions], other[0, :, :positions])


def keys_and_values(engine: XlaBatchEngine) -> tuple[np.ndarray, np.ndarray]:
    proposer: Any = engine.runner._device_proposer
    *_, state = proposer.takes
    (form,) = proposer.verify.args
    ((keys, values),) = to_host(form.layer, state.cache)
    return keys, values


class Seen:
    """The drafts of a head: for each row of a step its length and the drafts, -1 after the last."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []

    def proposed(self, rows: Any, drafts: Any, at: Any, wanted: Any, tokens: Any) -> Any:
        jax.debug.callback(self._keep, rows.length[at.slot], wanted, tokens)
        return proposed(rows, drafts, at, wanted, tokens)

    def _keep(self, length: Any, wanted: Any, tokens: Any) -> None:
        self.steps += [
            (int(end), [int(token) for token in row if token >= 0])
            for end, asked, row in zip(*map(np.asarray, (length, wanted, tokens)), strict=True)
            if asked
        ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, marks=pytest.mark.release), pytest.param(30, marks=pytest.mark.full)],
    ids=["slots", "blocks"],
)
def by_head(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[XlaBatchEngine, Path, Seen]]:
    """A random EAGLE-3 head: with blocks one that knows half of the token ids, with slots one that knows all, has an
    embedding of its own and the other residual stream."""
    knows, other = (100, False) if request.param else (TINY.vocab_size, True)
    named = {"eagle_aux_hidden_state_layer_ids": list(TAPS), "norm_before_residual": other}
    fields = head_config(TINY, knows, **named)
    tensors = head_tensors(fields, len(TAPS) * TINY.hidden_size, "layers.0." if other else "midlayer.")
    if other:
        embed = np.random.default_rng(7).standard_normal((knows, TINY.hidden_size))
        tensors["embed_tokens.weight"] = embed.astype(ml_dtypes.bfloat16)
    path = write_head(tmp_path_factory.mktemp("head"), fields, tensors)
    options = {"method": "eagle3", "model": str(path), "num_speculative_tokens": WIDTH - 1}
    config = replace(
        TINY_ENGINE,
        max_num_seqs=4,
        block_size=32,
        num_blocks=request.param,
        prefill_lanes=(2,),
        speculative_config=options,
    )
    seen = Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_head, "proposed", seen.proposed)
        engine = XlaBatchEngine(tiny_checkpoint(), None, config)
    with engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        yield engine, path, seen


def test_an_eagle3_head_changes_no_bit(
    tiny: XlaBatchEngine, by_head: tuple[XlaBatchEngine, Path, Seen]
) -> None:
    """With all lags, cached prefixes, preempted requests, and rows that another proposer drafts for in between."""
    engine, _, _ = by_head
    before = engine.stats()
    for lag, preempts in ((0, False), (1, True), (2, True)):
        cases = [
            replace(case, params=replace(case.params, n=1))
            for case in draw_cases(tiny, 12, seed=lag, max_new_tokens=40, every_field=True)
        ]
        cases += [
            replace(case, request_id=f"{case.request_id} again")
            for case in cases
            if len(case.prompt_token_ids) > 32
        ]
        expected = run(tiny, cases, 1)
        engine.lag = lag
        engine.draft_with(NoProposer() if lag == 1 else SuffixProposer())
        assert seen(run(engine, cases, 2, preempts=preempts)) == seen(expected)
    engine.lag = 1
    after = engine.stats()
    assert after.drafted_tokens - before.drafted_tokens > 300
    assert after.cached_tokens > before.cached_tokens
    assert after.compiles_after_warmup == 0


def test_an_eagle3_head_guesses_as_numpy_does(by_head: tuple[XlaBatchEngine, Path, Seen]) -> None:
    """Compare from the layers' outputs to the tokens, for prompts of several chunks and steps of several tokens."""
    engine, path, found = by_head
    right = ByNumpy(model=engine.checkpoint, head=path, taps=TAPS)
    wrong = [
        replace(right, taps=(1, 1, 2)),
        replace(right, taps=(0, 1, 2)),
        *(replace(right, **{name: True}) for name in ("unnormed", "closed", "same_token")),
    ]
    engine.draft_with(SuffixProposer())
    draw = np.random.default_rng(1)
    guessed: list[list[int]] = []
    expected: list[list[list[int]]] = [[] for _ in range(1 + len(wrong))]
    for count in (3, 21, 50):
        engine.blank()
        prompt = tuple(int(token) for token in draw.integers(0, 199, count))
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        found.steps.clear()
        engine.submit(prompt, params, request_id="a")
        (output,) = engine.drain()
        jax.effects_barrier()
        sequence = (*prompt, *output.outputs[0].token_ids)
        streams = right.streams(sequence)
        for end, drafts in found.steps:
            guessed.append(drafts)
            for kept, reference in zip(expected, (right, *wrong), strict=True):
                kept.append(reference.guesses(streams, sequence[: end + 1], len(drafts)))
    assert len(guessed) > 30 and engine.stats().accepted_tokens > 0
    alike = [np.mean([one == other for one, other in zip(kept, guessed, strict=True)]) for kept in expected]
    assert alike[0] > 0.9 and max(alike[1:]) < 0.5, alike


def test_an_eagle3_head_sees_every_position(by_head: tuple[XlaBatchEngine, Path, Seen]) -> None:
    sees_every_position(by_head[0])


def test_a_checkpoint_without_an_mtp_layer_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"tensor mtp\.\S+ of the MTP layer is missing"):
        load_mtp(load_checkpoint(embedded_model_directory()))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_vision"])
def test_an_mtp_layer_is_read_as_any_other_layer(name: str, tmp_path: Path) -> None:
    """A copy of the model's last full attention layer gives the leaves of that layer; norms are stored less one."""
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    _, family = read_model(open_model(tmp_path))
    main = load_checkpoint(tmp_path)
    full = max(index for index in range(main.config.num_hidden_layers) if not main.config.is_recurrent(index))
    prefix = family.layer.format(index=full)
    size = main.config.hidden_size
    tensors |= {
        "mtp.layers.0." + tensor.removeprefix(prefix): leaf
        for tensor, leaf in tensors.items()
        if tensor.startswith(prefix)
    }
    draw = np.random.default_rng(0)
    for tensor, shape in (
        ("norm", (size,)),
        ("pre_fc_norm_embedding", (size,)),
        ("pre_fc_norm_hidden", (size,)),
        ("fc", (size, 2 * size)),
    ):
        tensors[f"mtp.{tensor}.weight"] = draw.standard_normal(shape).astype(ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    main = load_checkpoint(tmp_path)  # which leaves the layer alone
    layer = load_mtp(main)
    for leaf in (leaf for leaf in layer.weights if leaf.startswith("layers.0.")):
        same = main.weights[leaf.replace("layers.0.", f"layers.{full}.")]
        assert np.array_equal(layer.weights[leaf], same), leaf
    assert np.array_equal(layer.weights["mtp_join"], tensors["mtp.fc.weight"])
    for leaf, tensor in (
        ("mtp_token_norm", "pre_fc_norm_embedding"),
        ("mtp_hidden_norm", "pre_fc_norm_hidden"),
        ("final_norm", "norm"),
    ):
        assert np.array_equal(layer.weights[leaf], 1 + tensors[f"mtp.{tensor}.weight"].astype(np.float32))
