"""The benchmark's processes: the protocol with fake engines, void rates, and one small run of the real thing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TINY
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.tools.bench import limits, peers, rounds
from xla_engine.tools.bench import measure as bench
from xla_engine.tools.bench.card import card
from xla_engine.tools.bench.models import BenchModel
from xla_engine.tools.bench.peers import PeerFailed, Process, parse_peers

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
FAKE = '''
class Engine:
    """Says that token i of a request is its prompt's first id plus i, one per millisecond."""

    def __init__(self, threads):
        self.runs = 0

    def load(self, wanted=None, model=""):
        print("noise on standard output")
        found = {"versions": "fake", "notes": "", "arrivals": ARRIVALS, "about": "fake", "isa": "mmx"}
        return found | {"weight_bytes": 2_000_000 if FAULT == "wrong" else None}

    def run(self, prompts, max_tokens, arrivals, stop_token_ids=None):
        self.runs += 1
        if FAULT == "dies":
            raise SystemExit("gone")
        if FAULT == "fails" and self.runs == 3:
            raise ValueError("no more")
        counts = [
            max_tokens[i] if not stop_token_ids or not stop_token_ids[i] else stop_token_ids[i][0] - p[0] + 1
            for i, p in enumerate(prompts)
        ]
        streams = [[p[0] + i + (FAULT == "wrong") for i in range(n)] for p, n in zip(prompts, counts)]
        if FAULT == "fickle":
            streams[0][-1] += self.runs
        if FAULT == "dull":
            streams = [[stream[0]] * len(stream) for stream in streams]
        if FAULT == "alike":
            streams = [streams[0][: len(stream)] for stream in streams]
        if FAULT == "short":
            streams[0].pop()
        times = [[a + 0.001 * (i + 1) for i in range(n)] for a, n in zip(arrivals, counts)]
        return {"seconds": max(t[-1] for t in times), "times": times, "streams": streams, "stale_share": 0.0}

    def regrets(self, prompts, streams):
        return {"regrets": [[float(abs(t - p[0] - i)) for i, t in enumerate(s)] for p, s in zip(prompts, streams)]}

    def bare(self, prompts, max_tokens):
        if FAULT == "no bare step":
            raise ValueError("no step decodes every request")
        return {"decode_tok_s": 4000.0, "step_ms": 1.0}

    def verify(self, requests):
        clean = {"requests": requests, "tokens": 9, "differing_tokens": 0, "compiles": 0}
        return clean | {"differing_bits": int(FAULT == "bits"), "ok": FAULT != "bits"}

    def limits(self, dtype):
        return {"gflops": 100.0}
'''


def fake_workers(folder: Path, ours: str = "", theirs: str = "", *, arrivals: bool = True) -> Path:
    """The real `worker.py` among fake engines with the faults named."""
    worker = folder / "worker.py"
    shutil.copy(Path(peers.__file__).parent / "workers" / "worker.py", worker)
    for kind, fault in (("xla", ours), ("hf", theirs)):
        (folder / f"{kind}.py").write_text(
            f"FAULT, ARRIVALS = {fault!r}, {arrivals}\n{FAKE}\nOwnEngine = Static = judge = Engine\n"
        )
    return worker


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure with fake engines; the results by (workload, engine), and the record."""
    monkeypatch.setattr(rounds, "_REST", 0.0)
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads: 10.0)

    def measure(
        ours: str = "",
        theirs: str = "",
        *,
        workloads: tuple[str, ...] = ("uniform",),
        name: str = "transformers",
        **more: Any,
    ) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any]]:
        worker = fake_workers(tmp_path, ours, theirs, arrivals=more.pop("arrivals", True))
        monkeypatch.setattr(bench, "Process", partial(Process, worker=worker))
        peer = replace(peers.PEERS["transformers"], about=peers.PEERS[name].about)
        monkeypatch.setattr(bench, "PEERS", {name: peer})
        record = bench.measure(
            bench.Options(
                model="fake",
                files=BenchModel(directory=tmp_path),
                config=TINY,
                dtype="bfloat16",
                batches=(4,),
                workloads=workloads,
                rounds=2,
                threads=1,
                peers=more.pop("peers", {}),
                cache=tmp_path,
                prompt_tokens=8,
                new_tokens=more.pop("new", 12),
                **more,
            )
        )
        json.dumps(record)
        return {(entry["workload"], entry["engine"]): entry for entry in record["results"]}, record

    return measure


def test_good_engines_are_compared_round_by_round(run: Any) -> None:
    found, record = run(workloads=("uniform", "prefill", "ragged", "pair"))
    assert not any(entry["void"] for entry in found.values())
    assert found["uniform", "transformers"]["ratio"]["decode_tok_s"][0] == pytest.approx(1.0)
    assert found["uniform", "bare step"]["ratio"]["decode_tok_s"][0] == pytest.approx(1.0, rel=0.1)
    assert found["prefill", "xla-engine"]["figures"]["gflop_s_share"][0] > 0
    assert found["pair", "xla-engine"]["figures"]["pair_ratio"][0] == pytest.approx(1.0)
    assert found["ragged", "xla-engine, ended by stop ids"]["figures"]["ended_by_stop_id"][0] == 1
    assert found["uniform", "xla-engine"]["streams"]["same"] == 1
    assert record["verify"][0]["ok"]
    # of a bare interpreter, not of its parent
    assert 1 < record["engines"]["transformers"]["peak_mib"]["4"] < 100


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("wrong", "wrong streams"), ("fickle", "from round to round"), ("short", "wrong number of tokens")],
)
def test_our_wrong_streams_are_void(run: Any, fault: str, reason: str) -> None:
    found, _ = run(ours=fault)
    assert reason in found["uniform", "xla-engine"]["void"]
    assert "ratio" not in found["uniform", "transformers"]


@pytest.mark.parametrize(
    ("fault", "word"), [("dull", "1 distinct tokens of 24"), ("alike", "begin in 1 ways")]
)
def test_streams_that_could_hide_a_fault_are_void(run: Any, fault: str, word: str) -> None:
    found, _ = run(ours=fault, theirs=fault, new=24, judge=0)
    for name in ("xla-engine", "transformers"):
        void = found["uniform", name]["void"]
        assert void.startswith("dull streams") and word in void and "use a model with more varied" in void


def test_a_bare_step_that_cannot_be_measured_is_void_and_nothing_else(run: Any) -> None:
    found, record = run(ours="no bare step")
    assert "no step decodes every request" in found["uniform", "bare step"]["void"]
    assert found["uniform", "xla-engine"]["void"] is None and "ratio" in found["uniform", "transformers"]
    assert re.search(r"\| bare step +\| +void \|", card(record))


@pytest.mark.parametrize(
    ("ours", "theirs"), [("dull", ""), ("", "dull"), ("dull", "dull"), ("wrong", "dies")]
)
def test_a_card_is_made_whatever_is_void(run: Any, ours: str, theirs: str) -> None:
    _, record = run(ours=ours, theirs=theirs, new=24, workloads=("uniform", "prefill", "ragged", "pair"))
    text = card(record)
    assert all(f"{entry['engine']}: {entry['void']}" in text for entry in record["results"] if entry["void"])


def test_the_record_names_processor_and_instruction_set(run: Any) -> None:
    _, record = run()
    processor = record["processor"]
    assert processor["model"] and processor["cores"] >= 1
    assert {flag for each in available() for flag in each.needs} <= set(processor["flags"])
    assert record["engines"]["xla-engine"]["isa"] == "mmx"
    text = card(record)
    assert f"{processor['cores']} cores of {processor['model']}" in text and "instruction set mmx" in text


def test_a_peers_wrong_streams_are_void(run: Any) -> None:
    found, _ = run(theirs="wrong")
    assert "wrong streams" in found["uniform", "transformers"]["void"]
    assert found["uniform", "xla-engine"]["void"] is None


def test_streams_of_other_weights_are_not_judged_and_shares_are_of_their_bytes(run: Any) -> None:
    found, _ = run(theirs="wrong", name="llama.cpp-q4_0")
    entry = found["uniform", "llama.cpp-q4_0"]
    assert entry["void"] is None and "streams" not in entry and entry["ratio"]["decode_tok_s"][0] > 0
    keys = 4 * (8 + 6) * 2 * 2 * TINY.num_hidden_layers * TINY.num_key_value_heads * TINY.head_dim
    rate = entry["figures"]["decode_tok_s"][0]
    assert entry["figures"]["gb_s"][0] == pytest.approx(1e-9 * (2_000_000 + keys) * rate / 4, rel=1e-3)


@pytest.mark.parametrize("taken", [0.0, 0.5])
def test_the_card_says_what_others_took_of_the_cores(
    run: Any, monkeypatch: pytest.MonkeyPatch, taken: float
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(rounds, "busy_seconds", lambda: 0.012 * taken * next(clock))
    monkeypatch.setattr(rounds, "cores", lambda: 1)
    monkeypatch.setattr(rounds, "LONG_ENOUGH", 0.01)
    monkeypatch.setattr(Process, "cpu_seconds", 0.0)
    found, record = run()
    assert found["uniform", "xla-engine"]["figures"]["others_share"][2] == pytest.approx(taken)
    told = card(record)
    assert f"others took at most {taken:.1%}" in told and ("quieter machine" in told) is (taken > 0)


def test_a_process_tells_how_long_it_ran(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("while True: pass")
    process = Process(sys.executable, "any", 1, worker=tmp_path / "worker.py")
    before, idle = limits.busy_seconds(), process.cpu_seconds
    with pytest.raises(PeerFailed):
        process.ask("load", limit=0.5)
    if Path("/proc/stat").exists():
        # killed by then, but not waited for: the system still has its count
        assert 0 < process.cpu_seconds - idle <= limits.busy_seconds() - before + 0.1
    process.close()


def test_what_verify_finds_voids_our_rates(run: Any) -> None:
    found, record = run(ours="bits")
    assert record["verify"][0]["differing_bits"] == 1
    assert "verify" in found["uniform", "xla-engine"]["void"]
    assert found["uniform", "transformers"]["void"] is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("dies", "died at run with status 1: noise on standard output gone"), ("fails", "ValueError: no more")],
)
def test_a_peer_that_fails_is_void_and_harms_no_other(run: Any, fault: str, reason: str) -> None:
    found, _ = run(theirs=fault, workloads=("uniform", "prefill"))
    assert reason in found["uniform", "transformers"]["void"]
    assert found["prefill", "xla-engine"]["void"] is None
    assert ("prefill", "transformers") not in found


def test_our_own_failure_ends_the_benchmark(run: Any) -> None:
    with pytest.raises(PeerFailed, match="no more"):
        run(ours="fails")


def test_an_absent_peer_is_skipped_with_a_word(run: Any) -> None:
    found, record = run(peers={"transformers": "/nowhere/python"})
    assert "cannot run /nowhere/python" in record["skipped"]["transformers"]
    assert ("uniform", "transformers") not in found


def test_peers_without_arrivals_sit_out_where_they_matter(run: Any) -> None:
    found, _ = run(workloads=("pair", "uniform"), arrivals=False)
    assert set(found) == {
        ("uniform", "xla-engine"),
        ("uniform", "transformers"),
        ("uniform", "bare step"),
    }


def test_a_workload_longer_than_the_model_is_skipped(run: Any) -> None:
    _, record = run(workloads=("uniform", "prefill-heavy"))
    assert "1016 positions" in record["skipped"]["prefill-heavy"]


def test_a_silent_process_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import time; time.sleep(60)")
    process = Process(sys.executable, "any", 1, worker=tmp_path / "worker.py")
    with pytest.raises(PeerFailed, match=r"within 0.2 s"):
        process.ask("load", limit=0.2)
    process.close()


FED = """
class Engine:
    room = 2

    def __init__(self, threads):
        self.live, self.most = {}, 0

    def start(self, index, prompt, max_tokens):
        self.live[index] = list(range(prompt[0], prompt[0] + max_tokens))
        self.most = max(self.most, len(self.live))

    def step(self):
        for index, left in self.live.items():
            yield index, [left.pop(0)]

    def is_busy(self):
        return bool(self.live)

    def end(self, index):
        del self.live[index]

    def fullest(self):
        return {"most": self.most}
"""


def test_an_engine_is_fed_as_requests_arrive_and_as_it_has_room(tmp_path: Path) -> None:
    worker = fake_workers(tmp_path)
    (tmp_path / "fed.py").write_text(FED)
    process = Process(sys.executable, "fed:Engine", 1, worker=worker)
    arrivals = [0.05, 0.0, 0.0, 0.0]
    found = process.ask("run", prompts=[[10], [20], [30], [40]], max_tokens=[3, 1, 2, 4], arrivals=arrivals)
    assert found["streams"] == [[10, 11, 12], [20], [30, 31], [40, 41, 42, 43]]
    assert [len(times) for times in found["times"]] == [3, 1, 2, 4] and found["times"][0][0] >= 0.05
    assert all(times == sorted(times) for times in found["times"])
    assert process.ask("fullest") == {"most": 2}
    process.close()


def test_a_missing_package_is_the_reason_given() -> None:
    process = Process(sys.executable, "no_such_engine:Engine", 1)
    with pytest.raises(PeerFailed, match="No module named 'no_such_engine'"):
        process.ask("load")
    process.close()


def test_peer_words_are_names_and_paths() -> None:
    assert parse_peers(["transformers=/bin/python"]) == {"transformers": "/bin/python"}
    for wrong in ("transformers", "transformers=", "nobody=/bin/python"):
        with pytest.raises(ValueError, match="NAME=PATH"):
            parse_peers([wrong])


@pytest.mark.release
def test_the_benchmark_runs_and_ends_with_one_json_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xla_engine", "bench", "--model", str(ROOT / "tests/golden/gqa_tied")]
    command += ["--batches", "4", "--workloads", "uniform", "pair", "--rounds", "1", "--threads", "1"]
    command += ["--only", "--prompt-tokens", "8", "--new-tokens", "24", "--verify", "4", "--judge", "2"]
    command += ["--output", str(tmp_path / "out.json"), "--cache", str(tmp_path)]
    command += ["--record", str(tmp_path / "pages")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    record = json.loads(line)
    assert (tmp_path / "out.json").read_text().strip() == line
    found = {(entry["workload"], entry["engine"]): entry for entry in record["results"]}
    assert set(found) == {("uniform", "xla-engine"), ("uniform", "bare step"), ("pair", "xla-engine")}
    assert not any(entry["void"] for entry in found.values()), done.stdout
    assert found["uniform", "xla-engine"]["figures"]["decode_tok_s"][0] > 0
    assert found["uniform", "bare step"]["figures"]["step_ms"][0] > 0
    (page,) = (tmp_path / "pages").iterdir()
    assert "| bare step " in page.read_text() and f"# {record['processor']['model']}" in page.read_text()
    assert record["verify"][0]["ok"] and record["verify"][0]["tokens"] > 0


@pytest.mark.full
def test_a_bare_scientific_stack_is_enough() -> None:
    """Driver, our worker and our judge import without what only the command line and chats need."""
    code = (
        "import sys\n"
        "for name in ('click', 'tqdm', 'jinja2', 'matplotlib', 'torch'): sys.modules[name] = None\n"
        "import xla_engine.tools.bench.__main__\n"
        "import xla_engine.tools.bench.workers.xla, xla_engine.tools.bench.plot"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wheel_says_that_it_has_no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_OTHERS", tmp_path / "peers")
    assert parse_peers(["xla-engine-int8=python"])
    with pytest.raises(
        ValueError, match="transformers: wheels do not contain the workers of peers; run from a checkout"
    ):
        parse_peers(["transformers=python"])
