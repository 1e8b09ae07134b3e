"""The benchmark's sums: workloads, figures, verdicts and the card."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gguf_files import Kind, write_gguf
from tests.support.models import TINY
from tests.support.reference import greedy_tokens
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint, random_weights
from xla_engine.tools.bench import limits
from xla_engine.tools.bench.card import card, markdown_table, write
from xla_engine.tools.bench.figures import Spread, complaints, figures, ratios, spread_of
from xla_engine.tools.bench.models import (
    SHAPES,
    BenchModel,
    find_model,
    lively_weights,
    write_checkpoint,
    write_once,
)
from xla_engine.tools.bench.peers import PEERS
from xla_engine.tools.bench.plot import lines_of, plot
from xla_engine.tools.bench.rounds import NEAR_TIE, eight_bit_bounds, near_tie, verdict, void_reason
from xla_engine.tools.bench.workers.xla import judge as make_judge
from xla_engine.tools.bench.workloads import WORKLOADS, Workload, WorkloadSizes, make_workload


@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    batch=st.integers(1, 40),
    seed=st.integers(0, 3),
    rate=st.none() | st.floats(0.1, 100),
)
@settings(max_examples=40, deadline=None)
def test_a_workload_is_a_function_of_its_sizes(name: str, batch: int, seed: int, rate: float | None) -> None:
    sizes = WorkloadSizes(batch=batch, vocab_size=97, seed=seed, rate=rate)
    workload = make_workload(name, sizes)
    assert workload == make_workload(name, sizes)
    assert len(workload.prompts) == len(workload.max_tokens) == len(workload.arrivals)
    assert all(prompt and min(prompt) >= 0 and max(prompt) < 97 for prompt in workload.prompts)
    assert min(workload.max_tokens) >= 1
    assert list(workload.arrivals) == sorted(workload.arrivals) and workload.arrivals[0] == 0
    head = workload.head(2, 5)
    assert len(head.prompts) == min(2, len(workload.prompts)) and max(head.max_tokens) <= 5


def test_ragged_lengths_have_a_heavy_tail() -> None:
    workload = make_workload("ragged", WorkloadSizes(batch=64, vocab_size=97))
    assert len(workload.prompts) == 8 * 64
    for lengths, median, most in (([*map(len, workload.prompts)], 64, 512), (workload.max_tokens, 48, 384)):
        assert 0.8 * median < statistics.median(lengths) < 1.25 * median
        assert statistics.mean(lengths) > 1.25 * statistics.median(lengths)
        assert max(lengths) <= most and max(lengths) > 4 * median
    assert make_workload("ragged", WorkloadSizes(batch=64, vocab_size=97, positions=300)).longest <= 300


def test_prompts_of_a_text_are_pieces_of_it() -> None:
    text = tuple(range(1000, 1600))
    sizes = WorkloadSizes(batch=3, vocab_size=97, prompt=200, text=text)
    prompts = make_workload("uniform", sizes).prompts
    assert all(prompt == tuple(range(prompt[0], prompt[0] + 200)) for prompt in prompts)
    assert len(set(prompts)) == 3 and {1000 <= prompt[0] <= 1400 for prompt in prompts} == {True}
    too_long = make_workload("prefill-heavy", sizes)
    assert max(max(prompt) for prompt in too_long.prompts) < 97


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    workload = make_workload("ragged", WorkloadSizes(batch=64, vocab_size=97, rate=20.0))
    assert 0.85 < len(workload.arrivals) / workload.arrivals[-1] / 20.0 < 1.15


def test_an_unknown_workload_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="uniform"):
        make_workload("unifrom", WorkloadSizes(batch=1, vocab_size=9))


def job(lengths: list[tuple[int, int]], arrivals: tuple[float, ...] | None = None) -> Workload:
    return Workload(
        name="uniform",
        about="",
        prompts=tuple((1,) * prompt for prompt, _ in lengths),
        max_tokens=tuple(new for _, new in lengths),
        arrivals=arrivals or (0.0,) * len(lengths),
    )


def test_decode_rate_counts_only_while_all_decode() -> None:
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    found = figures(job([(8, 4), (8, 4)]), {"seconds": 5.0, "times": times})
    assert found["decode_tok_s"] == pytest.approx(4 / 2.0)  # tokens at 3 and 4 of both, from 2 to 4
    assert found["tok_s"] == pytest.approx(8 / 5)
    assert found["ttft_p50_ms"] == 2000 and found["itl_p99_ms"] == 1000
    assert "prefill_tok_s" not in found


def test_prefill_rate_is_prompt_tokens_until_the_last_first_token() -> None:
    found = figures(job([(30, 1), (50, 1)]), {"seconds": 5.0, "times": [[1.0], [4.0]]})
    assert found["prefill_tok_s"] == pytest.approx(20.0)
    assert "decode_tok_s" not in found and "itl_p50_ms" not in found


def test_latency_counts_from_arrival() -> None:
    found = figures(job([(3, 1), (3, 1)], (0.0, 3.5)), {"seconds": 5.0, "times": [[1.0], [4.0]]})
    assert found["ttft_p99_ms"] == 1000


def test_requests_that_never_decode_together_have_no_decode_rate() -> None:
    found = figures(job([(3, 2), (3, 2)]), {"seconds": 9.0, "times": [[1.0, 2.0], [3.0, 4.0]]})
    assert "decode_tok_s" not in found


def test_missing_tokens_are_complained_about() -> None:
    workload = job([(3, 2), (3, 2)])
    good = {"streams": [[1, 2], [3, 4]], "times": [[1, 2], [1, 2]]}
    assert complaints(workload, good) is None
    assert complaints(workload, good | {"streams": [[1, 2], [3]]}) is not None
    assert complaints(workload, good | {"streams": [[1, 2]]}) is not None
    assert complaints(workload, good | {"times": [[1, 2], [1]]}) is not None


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = Spread((10.0, 30.0, 20.0)), Spread((5.0, 10.0, 20.0))
    assert ratios(ours, theirs).record == [2.0, 1.0, 3.0]
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 3.0}]
    assert spread_of(rounds) == {"a": Spread((1.0, 3.0))}


def test_weights_are_counted_as_in_the_checkpoint() -> None:
    for config in (TINY, *SHAPES.values()):
        matrices = {
            leaf: shape[0] * shape[1] for leaf, shape in parameter_shapes(config).items() if len(shape) == 2
        }
        if not config.tie_word_embeddings:
            del matrices["embed"]  # looked up, not multiplied with
        assert limits.weight_count(config) == sum(matrices.values())


def test_step_bytes_are_weights_once_and_keys_per_row() -> None:
    none = limits.step_bytes(TINY, "bfloat16", 8, 0)
    one = limits.step_bytes(TINY, "bfloat16", 8, 1) - none
    assert none == 2 * limits.weight_count(TINY)
    assert one == 8 * 2 * 2 * TINY.num_hidden_layers * TINY.num_key_value_heads * TINY.head_dim
    assert limits.step_bytes(TINY, "float32", 8, 5) == 2 * limits.step_bytes(TINY, "bfloat16", 8, 5)
    in_eight_bits = limits.step_bytes(TINY, "bfloat16", 8, 1, weight_bytes=limits.weight_count(TINY))
    assert in_eight_bits == limits.weight_count(TINY) + one


def test_streams_within_a_near_tie_count_and_others_are_void() -> None:
    tie = NEAR_TIE["bfloat16"]
    good = verdict([[0.0, tie]], [[1, 2]], [[1, 3]], [tie] * 2)
    assert (good.judged, good.off, good.same) == (2, 0.5, 0.5)
    assert void_reason(good) is None
    bad = verdict([[0.0, 3 * tie]], [[1, 2]], None, [4 * tie, tie])
    assert bad.same is None and bad.beyond == pytest.approx(3)
    assert "wrong streams" in (void_reason(bad) or "")
    assert near_tie("bfloat16", None) == tie > near_tie("float32", None)
    assert near_tie("bfloat16", [[0.0], [3 * tie, tie]]) == 3 * tie  # no worse than the reference's own


@pytest.mark.full
def test_what_eight_bits_excuse_holds_for_an_engine_in_eight_bits_and_for_no_fault(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = replace(
        TINY, vocab_size=499, hidden_size=64, intermediate_size=192, num_hidden_layers=4, **heads
    )
    weights = random_weights(config, dtype="bfloat16", seed=1, scale=0.15)
    write_checkpoint(config, weights, tmp_path)
    judge = make_judge(1)
    judge.load(str(tmp_path))
    checkpoint = load_checkpoint(tmp_path, dtype="bfloat16")
    prompts = np.random.default_rng(0).integers(0, 499, (3, 30)).tolist()

    class LatePositions(ForwardPass):
        """Behind the prompt every token stands one place too late."""

        def __init__(self, checkpoint: Checkpoint) -> None:
            super().__init__(checkpoint, quantized=True)
            forward = self._forward
            place = np.arange(64) + (np.arange(64) >= 30)
            self._forward = lambda weights, rope, tokens: forward(weights, rope[:, place.clip(0, 63)], tokens)

    name = "layers.2.down"
    rolled = replace(
        checkpoint, weights={**checkpoint.weights, name: np.roll(checkpoint.weights[name], 1, 0)}
    )
    engines = {
        "eight bits": ForwardPass(checkpoint, quantized=True),
        "features of one layer off by one": ForwardPass(rolled, quantized=True),
        "positions off by one": LatePositions(checkpoint),
    }
    for what, engine in engines.items():
        streams = [greedy_tokens(engine, prompt, 24) for prompt in prompts]
        errors = judge.eight_bit_errors(prompts, streams, dtype="bfloat16")
        bounds = eight_bit_bounds(errors["errors"], errors["vocabulary"])
        found = verdict(judge.regrets(prompts, streams)["regrets"], streams, None, bounds)
        assert errors["vocabulary"] == 499 and found.judged == 72
        assert (void_reason(found) is None) == (what == "eight bits"), (what, found)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_written_model_loads_again(tmp_path: Path, arch: str) -> None:
    config = ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        rope_scaling=SHAPES["llama-3.2-1b"].rope_scaling,
        tie_word_embeddings=True,
        qk_norm="head" if arch == "qwen3" else None,
        qkv_bias=arch == "qwen2",
    )
    write_once(config, tmp_path / "models" / "small", lambda: lively_weights(config))
    loaded = load_checkpoint(tmp_path / "models" / "small")
    assert loaded.config == config and loaded.dtype == "bfloat16" and not loaded.eos_token_ids
    assert set(np.unique(loaded.weights["final_norm"])) == {-1.0, 1.0}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["small"]
    small = tmp_path / "models" / "small"
    assert find_model(str(small), tmp_path) == BenchModel(directory=small)
    file = write_gguf(small, tmp_path / "small.gguf", kind=Kind.BF16, arch=arch)
    # the same for peers, whatever way the file stores it
    found = find_model(str(file), tmp_path)
    assert found.file == file
    written = load_checkpoint(found.directory)
    assert written.config == config
    for leaf, values in load_checkpoint(small).weights.items():
        assert np.array_equal(values, written.weights[leaf]), leaf


def test_a_file_of_another_family_is_given_as_it_is_to_engines_that_read_it(tmp_path: Path) -> None:
    family = Path(__file__).parents[2] / "golden" / "families" / "gemma2"
    file = write_gguf(family, tmp_path / "gemma.gguf", kind=Kind.BF16, arch="gemma2")
    found = find_model(str(file), tmp_path)
    assert found.directory == found.file == file and found.config == load_checkpoint(file).config
    reading = {name for name, peer in PEERS.items() if peer.reads_files}
    assert {"xla-engine-int8", "xla-engine-gguf-int8", "llama.cpp-file"} <= reading
    assert reading.isdisjoint(("transformers", "vllm", "openvino-int4", "llama.cpp-q8"))


def test_models_that_cannot_run_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        find_model("nothing", tmp_path)


def result(engine: str, **more: Any) -> dict[str, Any]:
    return {
        "batch": 8,
        "workload": "uniform",
        "engine": engine,
        "void": None,
        "figures": {"decode_tok_s": [200.0, 190.0, 210.0], "tok_s": [150.0, 150.0, 150.0]},
        **more,
    }


def a_record(*results: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "dtype": "bfloat16",
        "threads": 2,
        "rounds": 3,
        "machine": "2 cores",
        "judge": "somebody",
        "limits": {"read_gb_s": 26.0, "gflops": {"xla-engine": 1000.0}},
        "engines": {
            "xla-engine": {"about": "this engine", "versions": "1", "notes": "", "peak_mib": {"8": 5}}
        },
        "skipped": {"openvino": "ModuleNotFoundError: No module named 'openvino_genai'"},
        "workloads": {"8": {"uniform": "8 requests"}},
        "verify": [
            {
                "batch": 8,
                "requests": 4,
                "tokens": 99,
                "differing_tokens": 0,
                "differing_bits": 0,
                "compiles": 0,
            }
        ],
        "results": list(results),
    }


def test_the_card_shows_rates_ratios_and_who_is_missing() -> None:
    ratio = {"decode_tok_s": [2.0, 1.9, 2.1]}
    streams = {"judged": 9, "off": 0.01, "worst_regret": 0.03, "same": 0.9}
    text = card(a_record(result("xla-engine", streams=streams), result("transformers", ratio=ratio)))
    assert "200 (190-210)" in text and "2.00 (1.90-2.10)" in text and "1.00%, 0.03" in text
    assert "skipped openvino: ModuleNotFoundError" in text
    assert "99 tokens alone and batched, 0 differing tokens" in text
    json.dumps(a_record(result("xla-engine")))


def test_a_void_rate_is_not_printed() -> None:
    text = card(a_record(result("xla-engine"), result("transformers", void="wrong streams: far off")))
    row = next(line for line in text.splitlines() if line.startswith("| transformers"))
    assert "void" in row and "200" not in row
    assert "transformers: wrong streams: far off" in text


def test_a_card_whose_rates_are_all_void_says_so() -> None:
    text = card(
        a_record(result("xla-engine", void="dull streams", figures={}), result("bare step", figures={}))
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert "void" in next(line for line in lines if line.startswith("| xla-engine"))
    assert len({line.count("|") for line in lines}) == 1 and "xla-engine: dull streams" in text


def test_shares_of_a_limit_that_was_exceeded_are_not_to_be_relied_on() -> None:
    warning = "no share of this run can be relied on"
    for share, told in ((0.95, False), (1.05, True)):
        figures = {"decode_tok_s": [9.0, 9.0, 9.0], "gb_s_share": [share, share, share]}
        assert (warning in card(a_record(result("xla-engine", figures=figures)))) is told


def test_a_recorded_card_is_a_section_of_its_machines_page(tmp_path: Path) -> None:
    record = a_record(result("xla-engine"))
    record["load"] = 0.3
    record["processor"] = {"model": "AMD EPYC (family 25, model 1)", "cores": 2}
    record["engines"]["xla-engine"]["isa"] = "avx2"
    words = [
        "--model",
        "embedded",
        "--peer",
        "vllm=/some/where/python",
        "--record",
        "--output",
        "out.json",
        "--only",
    ]
    path = write(record, words, tmp_path / "new")
    assert path == tmp_path / "new" / "amd_epyc_family_25_model_1_avx2_2_cores.md"
    first = path.read_text()
    assert (
        "## `xla-engine bench --model embedded --peer vllm=PYTHON --only`\n\nMeasured on 2" in first
        and "load before it 0.3." in first
    )
    assert (
        "\n### B = 8, uniform: 8 requests\n\n| engine " in first and "| xla-engine | 200 (190-210)" in first
    )
    assert write(record, ["--model", "other"], path.parent) == path
    both = path.read_text()
    assert both.startswith(first) and both.count("\n## ") == 2
    changed = a_record(result("xla-engine", figures={"decode_tok_s": [7.0, 7.0, 7.0]})) | {
        "load": 0.3,
        "processor": record["processor"],
        "engines": record["engines"],
    }
    write(changed, words, path.parent)
    again = path.read_text()
    assert again.count("\n## ") == 2 and again.index("--model embedded") < again.index("--model other")
    assert again.count("200 (190-210)") == 1 and "7.00" in again


def test_markdown_tables_line_up() -> None:
    lines = markdown_table(["name", "n"], [["a", 1], ["long name", 100]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[2] == "| a         |   1 |"


def test_a_plot_has_every_engine_that_is_not_void(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra: pip install -e '.[plot]'")
    figures = {"decode_tok_s": [200.0, 190.0, 210.0], "floor_tok_s": [900.0, 900.0, 900.0]}
    record = a_record(
        result("xla-engine", figures=figures),
        result("xla-engine", batch=32, figures=figures),
        result("transformers", void="wrong"),
    )
    assert set(lines_of(record, "decode_tok_s")) == {"xla-engine"}
    assert lines_of(record, "floor_tok_s")["xla-engine"].keys() == {8, 32}
    plot(record, tmp_path / "bench.svg")
    assert "bandwidth floor" in (tmp_path / "bench.svg").read_text()
