"""Perplexity and divergence: llama-perplexity's figures, the same to the last digit however the windows were run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command_line import assert_not_started, commands_use, invoke
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.errors import InvalidRequestError, LogitsFileError
from xla_engine.perplexity import LogitsFile, LogitsWriter, measure
from xla_engine.perplexity.figures import Comparison, divergence, log_softmax
from xla_engine.sampling_params import SamplingParams

MODEL = replace(TINY, num_hidden_layers=1)  # logits are compared, not what layers do to each other
CONFIG = replace(TINY_ENGINE, key_buckets=(300,), preemption=False)
CTX = 40
DRAW = random.Random(5)
STEM = [DRAW.randrange(1, TINY.vocab_size) for _ in range(CTX)]
# Windows that share their beginnings, so that a prefix cache has something to give.
TEXT = [
    token
    for at in (33, 4, 20, 39, 25)
    for token in [*STEM[:at], *(DRAW.randrange(1, TINY.vocab_size) for _ in range(CTX - at))]
] + [7] * 11
PRECISIONS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, XlaBatchEngine]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                XlaBatchEngine(
                    tiny_checkpoint(dtype, model=MODEL), None, replace(CONFIG, quantization=quantization)
                )
            )
            for name, (dtype, quantization) in PRECISIONS.items()
        }


@pytest.fixture(scope="module")
def base(engines: dict[str, XlaBatchEngine], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / "f32.logits"
    measure(engines["float32"], TEXT, ctx_size=CTX, save_logits=path)
    return path


def plain_log_probs(name: str) -> np.ndarray:
    """Of the tokens in the second half of each window, by whole forward passes: f64 `[C, S, V]`."""
    dtype, quantization = PRECISIONS[name]
    checkpoint = tiny_checkpoint(dtype, model=MODEL)
    reference = ForwardPass(checkpoint, CONFIG.max_model_len, quantized=quantization is not None)
    windows = np.array(TEXT[: 5 * CTX]).reshape(5, CTX)
    logits = np.array([reference.logits(window.tolist())[CTX // 2 : -1] for window in windows], np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def engine_log_probs(engine: XlaBatchEngine) -> np.ndarray:
    """The same from the engine's own logits, before anything of `measure` has seen them."""
    found = np.full((5, CTX, TINY.vocab_size), np.nan)

    def take(name: str, start: int, logits: np.ndarray) -> None:
        found[int(name), start : start + len(logits)] = logits

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with engine.runner.giving_logits(take):
        for window in range(5):
            engine.submit(TEXT[window * CTX : (window + 1) * CTX], params, request_id=str(window))
        engine.drain()
    logits = found[:, CTX // 2 : -1]
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("name", PRECISIONS)
def test_figures_are_those_of_plain_numpy(engines: dict[str, XlaBatchEngine], base: Path, name: str) -> None:
    report = measure(engines[name], TEXT, ctx_size=CTX, against=base)
    own, other = engine_log_probs(engines[name]), engine_log_probs(engines["float32"])
    targets = np.array(TEXT[: 5 * CTX]).reshape(5, CTX)[:, CTX // 2 + 1 :, None]
    nll, base_nll = (-np.take_along_axis(each, targets, -1).reshape(-1) for each in (own, other))
    count = 5 * 19
    assert report.perplexity.tokens == count
    assert report.perplexity.nll == pytest.approx((nll.mean(), nll.std(ddof=1) / count**0.5), rel=1e-9)
    assert report.perplexity.ppl.value == pytest.approx(np.exp(nll.mean()), rel=1e-9)
    found = report.comparison
    assert found is not None
    assert found.base.nll.value == pytest.approx(base_nll.mean(), rel=1e-9)
    assert found.log_ratio.value == pytest.approx((nll - base_nll).mean(), abs=1e-12)
    assert found.correlation == pytest.approx(np.corrcoef(nll, base_nll)[0, 1], rel=1e-9)
    kld = (np.exp(other) * (other - own)).sum(-1).reshape(-1)
    rounding = 1e-4  # of one position, by the 16 bits of the file
    assert found.kld.value == pytest.approx(kld.mean(), abs=5e-6)
    assert found.kld_quantiles["50%"] == pytest.approx(np.median(kld), abs=rounding)
    assert found.kld_quantiles["max"] == pytest.approx(kld.max(), abs=rounding)
    change = np.exp(-nll) - np.exp(-base_nll)
    assert found.delta_p.value == pytest.approx(change.mean(), abs=1e-12)
    assert found.delta_p_rms.value == pytest.approx(np.sqrt((change**2).mean()), abs=1e-12)
    assert found.delta_p_quantiles["1%"] == pytest.approx(np.percentile(change, 1), abs=1e-12)
    assert found.same_top.value == (own.argmax(-1) == other.argmax(-1)).mean()
    if name == "float32":
        assert found.same_top.value == 1 and found.log_ratio == (0, 0)
    else:
        assert found.kld.value > 2e-5 and abs(found.log_ratio.value) > 0
    labels = "\n".join(report.lines())
    for label in ("Mean KLD", "99.9% KLD", "Median KLD", "Maximum KLD", "RMS Δp", "Same top p"):
        assert label in labels


@pytest.mark.parametrize("name", PRECISIONS)
def test_logits_are_those_of_a_plain_forward_pass(engines: dict[str, XlaBatchEngine], name: str) -> None:
    """The reference multiplies in another order, so it rounds otherwise, but by less than 16 or 8 bits cost."""
    plain = plain_log_probs(name)
    apart = np.abs(engine_log_probs(engines[name]) - plain).mean()
    assert apart < (1e-5 if name == "float32" else np.abs(plain - plain_log_probs("float32")).mean())


@pytest.mark.parametrize("name", default(["bfloat16", "int8"]))
def test_no_digit_depends_on_batch_size_or_cache(
    engines: dict[str, XlaBatchEngine], base: Path, name: str, tmp_path: Path
) -> None:
    """1, 3 and 8 slots, 2 and 8 lanes or one number of them, cache off, cold and warm: one JSON line, one file."""
    dtype, quantization = PRECISIONS[name]
    lines, files = set[str](), set[bytes]()

    def add(engine: XlaBatchEngine) -> None:
        path = tmp_path / f"{len(files)}.logits"
        report = measure(engine, TEXT, ctx_size=CTX, against=base, save_logits=path)
        lines.add(json.dumps(report.to_json()))
        files.add(path.read_bytes())

    engine = engines[name]
    engine.reset_prefix_cache()
    add(engine)
    add(engine)
    for slots, lanes, caching in [(1, (2,), True), (3, (2, 8), False)]:
        config = replace(
            CONFIG,
            max_num_seqs=slots,
            prefill_lanes=lanes,
            enable_prefix_caching=caching,
            quantization=quantization,
        )
        with XlaBatchEngine(tiny_checkpoint(dtype, model=MODEL), None, config) as other:
            add(other)
    assert len(lines) == 1 and len(files) == 1


def test_figures_of_a_table_by_hand() -> None:
    nll, base = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.5, 2.5])
    found = Comparison.of(nll, base, np.array([0.0, 0.1, 0.4]), np.array([True, True, False]))
    assert found.log_ratio.value == pytest.approx(1 / 3)
    # standard deviation 0.2887 of 0, 0.5, 0.5; by sqrt(3)
    assert found.log_ratio.error == pytest.approx(1 / 6)
    assert found.ratio.value == pytest.approx(1.395612)
    assert found.kld_quantiles["50%"] == pytest.approx(0.1) and found.kld_quantiles["max"] == 0.4
    assert found.kld_quantiles["90%"] == pytest.approx(0.34)
    assert found.same_top.value == pytest.approx(2 / 3)
    assert found.same_top.error == pytest.approx(1 / 3)
    assert found.delta_p.value == pytest.approx((np.exp(-2) - np.exp(-1.5) + np.exp(-3) - np.exp(-2.5)) / 3)
    half, quarter = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert divergence(half, quarter) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert log_softmax(np.array([1000.0, 1000.0], np.float32)).tolist() == pytest.approx(half.tolist())


def test_a_file_holds_llama_perplexitys_rows(tmp_path: Path) -> None:
    """Magic, sizes and tokens; then scale, least and 16-bit steps above it, which end 16 below the largest."""
    path, tokens = tmp_path / "a.logits", np.arange(8, dtype=np.int32).reshape(2, 4)
    rows = np.array([[0.0, 3.0, -40.0], [1.0, 1.0, 1.0]], np.float32)
    with LogitsWriter(path, tokens, 3) as writer:
        writer.put(1, 0, rows[1])
        writer.put(0, 0, rows[0])
        writer.finish(np.array([[0.5], [0.25]]), np.array([[1], [0]]))
    raw = path.read_bytes()
    assert raw[:8] == b"_logits_" and np.frombuffer(raw, "<i4", 11, 8).tolist() == [4, 3, 2, *range(8)]
    scale, least = np.frombuffer(raw, "<f4", 2, 52)
    codes = np.frombuffer(raw, "<u2", 3, 60)
    total = np.log(np.exp(3.0) + 1)
    assert codes.tolist()[1:] == [65535, 0] and scale * 65535 == pytest.approx(16)
    assert scale * codes + least == pytest.approx([-total, 3 - total, -13 - total], abs=2e-4)
    with LogitsFile(path) as found:
        assert found.tokens.tolist() == tokens.tolist()
        assert found.row(0, 0, 2).nll == 0.5 and found.row(0, 0, 2).top == 1
        assert found.row(1, 0, 2).log_probs == pytest.approx(np.log([1 / 3] * 3), abs=1e-6)
    path.write_bytes(raw[:-32])  # as llama-perplexity leaves it
    with LogitsFile(path) as found:
        assert found.row(0, 0, 1).nll == pytest.approx(total - 3, abs=2e-4) and found.row(0, 0, 1).top == 1


def test_files_that_do_not_fit_are_refused(
    engines: dict[str, XlaBatchEngine], base: Path, tmp_path: Path
) -> None:
    engine, raw, bad = engines["float32"], base.read_bytes(), tmp_path / "bad.logits"

    def refused(text: list[int], words: str, content: bytes = raw, ctx_size: int = CTX) -> None:
        bad.write_bytes(content)
        with pytest.raises(LogitsFileError, match=words):
            measure(engine, text, ctx_size=ctx_size, against=bad)

    refused(TEXT, "it is truncated", raw[:-1])
    refused(TEXT, "it is truncated", raw[:3000])
    refused(TEXT, "holds no logits", raw[:10])
    refused(TEXT, "holds no logits", b"PK\x03\x04" + raw[4:])
    refused(TEXT, "header is damaged", raw[:8] + b"\0" * 12 + raw[20:])
    refused(
        [*TEXT[:50], 0 if TEXT[50] else 1, *TEXT[51:]], "another text, or with another tokenizer: token 50"
    )
    refused(TEXT, "give --ctx-size 40", ctx_size=20)
    refused(TEXT[:-100], "5 windows of 40 tokens, and this text 2")
    refused(TEXT, "it is truncated", raw[:12] + bytes([raw[12] + 2]) + raw[13:])
    refused(TEXT, "vocabulary of 200 tokens; this one has 199", raw[:12] + bytes([raw[12] + 1]) + raw[13:])
    rows_at = 20 + 4 * 5 * CTX
    refused(TEXT, "window 0, position 0 is not a number", raw[:rows_at] + b"\xff" * 8 + raw[rows_at + 8 :])
    assert measure(engine, TEXT, ctx_size=CTX, against=base).comparison is not None, "the engine lives on"


def test_a_text_shorter_than_a_window_is_refused(engines: dict[str, XlaBatchEngine]) -> None:
    engine = engines["float32"]
    with pytest.raises(InvalidRequestError, match="39 tokens, fewer than one window of 40"):
        measure(engine, TEXT[:39], ctx_size=CTX)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        measure(engine, "text", ctx_size=CTX)
    with pytest.raises(InvalidRequestError, match="nothing to score"):
        measure(engine, TEXT, ctx_size=3)


def test_logits_that_are_no_numbers_end_the_run(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("float32", model=MODEL)
    weights = {name: np.asarray(leaf) for name, leaf in checkpoint.weights.items()}
    weights["final_norm"] = np.full_like(weights["final_norm"], np.nan)
    path = tmp_path / "nan.logits"
    config = replace(CONFIG, self_check=False)
    with XlaBatchEngine(replace(checkpoint, weights=weights), None, config) as engine:
        with pytest.raises(InvalidRequestError, match=r"position 20: a logit is not a number"):
            measure(engine, TEXT, ctx_size=CTX, save_logits=path)
        assert not engine.has_work
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_command_compares_two_precisions_and_reads_what_it_saved(tmp_path: Path) -> None:
    """One run over both dtypes gives the digits of two runs with a file between them."""
    text, saved = tmp_path / "text.txt", tmp_path / "f32.logits"
    text.write_text("def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n" * 8)
    command = ("perplexity", text, "-c", "32", "--chunks", "2")
    one = invoke(*command, "--against-dtype", "float32", "--json")
    assert one.exit_code == 0, one.output
    found = json.loads(one.stdout)
    assert found["chunks"] == 2 and found["tokens"] == 30 and 0 < found["against"]["kld"] < 0.01
    assert invoke(*command, "--dtype", "float32", "--save-logits", saved).exit_code == 0
    two = invoke(*command, "--against", saved, "--json", "--max-num-seqs", "1", "--no-enable-prefix-caching")
    assert two.stdout == one.stdout


def test_the_command_tells_what_is_wrong_before_it_loads_a_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    assert_not_started(invoke("perplexity", text), "text.txt: No such file")
    text.write_bytes(b"ab\xff")
    assert_not_started(invoke("perplexity", text), "is not UTF-8: invalid start byte at byte 2")
    text.write_text("words")
    both = invoke("perplexity", text, "--against", "a.logits", "--against-dtype", "float32")
    assert_not_started(both, "--against names saved logits")
    assert_not_started(invoke("perplexity", text, "--save-logits", tmp_path / "no" / "f"), "no such folder")


def test_an_error_of_the_measurement_is_one_line(
    engines: dict[str, XlaBatchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_for(options: dict[str, Any]) -> XlaBatchEngine:
        assert options["max_model_len"] == 65, "a window and the sampled token"
        return engines["float32"]

    commands_use(monkeypatch, engine_for)
    text = tmp_path / "text.txt"
    text.write_text("words")
    for more in ((), ("--max-model-len", "64")):
        assert_not_started(
            invoke("perplexity", text, "-c", "64", *more), "the model has no tokenizer; give token ids"
        )
