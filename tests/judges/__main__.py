"""Run other projects' tests of such servers against `xla-engine serve`, and print a table of what passed.

    python -m tests.judges --sources DIR [NAME ...]

DIR holds the sources of each project. Missing ones are fetched: the source archives of vLLM and llama-cpp-python
(which contains llama.cpp) by pip, the others by git. Without names all judges run; `openai` and `schemas` need no
sources. Needs `pip install -e '.[test,judges]'`, and for openresponses node and npm.

The server has the embedded model under the names that the tests ask for. Tests that ask for more than that, or for
what this server does not offer, are listed in `skips.py` with the reason; all others must pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import httpx

from tests.judges.schemas import write_schemas
from tests.judges.skips import SKIPS
from tests.support.source_archives import unpack_archive

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = (
    *("embedded", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2-1.5B-Instruct"),
    *("HuggingFaceH4/zephyr-7b-beta", "HuggingFaceTB/SmolLM2-135M-Instruct", "gpt-3.5-turbo-instruct"),
    *("gpt-3.5-turbo", "openai-community/gpt2", "zephyr-lora", "tinyllama-2", "davinci-002", "gpt-4.1"),
)


@dataclass
class Verdict:
    """What one judge found.

    skipped: how many tests for each reason. failed: name and message of each. note: why it could not run, or how much
    it tried.
    """

    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Context:
    """Where a judge finds its tests, the server, and a folder of its own."""

    source: Path
    url: str
    work: Path

    def pytest(
        self, judge: str, arguments: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None
    ) -> Verdict:
        """Run tests in their own folder with the plugin beside this file."""
        report = self.work / f"{judge}.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "judged",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=line",
        ]
        command += ["--timeout", "60", f"--junitxml={report}", "-o", "asyncio_mode=auto", *arguments]
        settings = {"JUDGED_URL": self.url, "JUDGED_SKIPS": json.dumps(SKIPS.get(judge, []))}
        environment = {**os.environ, "PYTHONPATH": str(HERE), **settings, **(env or {})}
        with open(self.work / f"{judge}.log", "w") as log:
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest did not run: {(self.work / f'{judge}.log').read_text()[-2000:]}")
        return read_junit(report)


def read_junit(report: Path) -> Verdict:
    verdict = Verdict()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}"
        bad = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
        if bad is not None:
            verdict.failed.append((name, bad.get("message", "")))
        elif (skip := case.find("skipped")) is not None:
            verdict.skipped[skip.get("message") or "skipped by its authors"] += 1
        else:
            verdict.passed += 1
    return verdict


def judge_openai(context: Context) -> Verdict:
    """Our own tests, which read every answer with the openai client. They start a server of their own."""
    tests = [f"tests/server/test_{name}.py" for name in ("generation", "tools", "responses", "batches")]
    report = context.work / "openai.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return read_junit(report)


def judge_ogx(context: Context) -> Verdict:
    return context.pytest("ogx", ["tests/integration/batches"], folder=context.source)


def judge_vllm(context: Context) -> Verdict:
    openai = [
        *("completion/test_completion.py", "completion/test_token_in_token_out.py"),
        *("completion/test_prompt_validation.py", "chat_completion/test_chat.py"),
        *("chat_completion/test_chat_completion.py", "chat_completion/test_chat_echo.py"),
        *("chat_completion/test_chat_logit_bias_validation.py", "test_return_token_ids.py"),
        *("chat_completion/test_completion_with_function_calling.py", "test_chunked_prompt.py"),
        *("chat_completion/test_enable_force_include_usage.py", "test_return_tokens_as_ids.py"),
        "models/test_models.py",
    ]
    tests = [f"tests/entrypoints/openai/{name}" for name in openai]
    tests += ["tests/entrypoints/serve/tokenize/test_tokenization.py"]
    tests += ["tests/entrypoints/serve/instrumentator/test_basic.py", "--confcutdir=tests/entrypoints"]
    return context.pytest("vllm", tests, folder=context.source)


def judge_llama_cpp(context: Context) -> Verdict:
    names = ("basic", "chat_completion", "completion", "tokenize", "compat_oai_responses", "metrics")
    return _llama_cpp(context, "llama.cpp", names)


def judge_llama_cpp_keys(context: Context) -> Verdict:
    return _llama_cpp(context, "llama.cpp-keys", ("security",))


def _llama_cpp(context: Context, judge: str, names: Sequence[str]) -> Verdict:
    port = context.url.rpartition(":")[2]
    return context.pytest(
        judge,
        [f"unit/test_{name}.py" for name in names],
        folder=context.source / "tools" / "server" / "tests",
        env={"DEBUG_EXTERNAL": "1", "PORT": port},
    )


def judge_openresponses(context: Context) -> Verdict:
    """Their command line, by node where there is no bun."""
    modules = context.source / "node_modules"
    if not (modules / ".bin" / "tsx").exists():
        packages = ["tsx", "zod@3.25.76"]
        subprocess.run(["npm", "install", "--no-save", "--silent", *packages], cwd=context.work, check=True)
        modules.symlink_to(context.work / "node_modules")
    command = [str(modules / ".bin" / "tsx"), "bin/compliance-test.ts", "--json", "--api-key", "none"]
    command += ["--base-url", f"{context.url}/v1", "--model", "embedded"]
    run = subprocess.run(command, cwd=context.source, capture_output=True, text=True, check=False)
    verdict = Verdict()
    for result in json.loads(run.stdout)["results"]:
        skips = SKIPS["openresponses"]
        reason = next((reason for pattern, reason in skips if fnmatch(result["id"], pattern)), None)
        if result["status"] == "passed":
            verdict.passed += 1
        elif reason is not None:
            verdict.skipped[reason] += 1
        else:
            verdict.failed.append((result["id"], "; ".join(result.get("errors") or [])))
    return verdict


def judge_openapi(context: Context) -> Verdict:
    """Schemathesis over OpenAI's specification, the paths that this server has."""
    return _schemathesis(context, context.source / "openapi.yaml", "openapi")


def judge_schemas(context: Context) -> Verdict:
    """Schemathesis over a specification made of the types of the openai client."""
    path = context.work / "schemas.json"
    write_schemas(path)
    return _schemathesis(context, path, "schemas")


def _schemathesis(context: Context, specification: Path, judge: str) -> Verdict:
    report = context.work / f"{judge}.xml"
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(specification.resolve())]
    command += ["--url", f"{context.url}/v1", "--checks", "not_a_server_error", "--mode", "all"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
    command += ["--include-path-regex", "^/(completions|chat/completions|responses|models|files|batches)"]
    command += ["--report", "junit", "--report-junit-path", str(report.resolve()), "--no-color"]
    with open(context.work / f"{judge}.log", "w") as log:
        subprocess.run(command, cwd=context.work, stdout=log, stderr=log, check=False)
    verdict = read_junit(report)
    found = re.search(r"(\d+) generated", (context.work / f"{judge}.log").read_text())
    verdict.note = f"{found[1]} requests" if found else ""
    return verdict


@dataclass(frozen=True)
class Clone:
    """A repository, and the folders that are needed of it (default: all)."""

    repository: str
    paths: tuple[str, ...] = ()

    def fetch(self, sources: Path) -> Path:
        folder = sources / self.repository.partition("/")[2]
        if not folder.exists():
            git = ["git", "clone", "--quiet", "--depth=1", "--filter=blob:none", "--sparse"]
            address = f"https://github.com/{self.repository}.git"
            subprocess.run([*git, address, str(folder)], check=True, capture_output=True, timeout=1800)
            if self.paths:
                command = ["git", "sparse-checkout", "set", *self.paths]
                subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=1800)
        return folder


@dataclass(frozen=True)
class Archive:
    """A project's source archive, and the folder in it that has the tests."""

    project: str
    inside: str = "."

    def fetch(self, sources: Path) -> Path:
        return unpack_archive(self.project, sources) / self.inside


@dataclass(frozen=True)
class Judge:
    """A suite, where its sources come from, and options of its server."""

    run: Callable[[Context], Verdict]
    source: Clone | Archive | None = None
    options: tuple[str, ...] = ()
    key: str = ""


_LLAMA_CPP = Archive("llama-cpp-python", "vendor/llama.cpp")
JUDGES = {
    "openai": Judge(judge_openai),
    "schemas": Judge(judge_schemas, options=("--max-tokens", "4")),
    "openapi": Judge(judge_openapi, Clone("openai/openai-openapi"), options=("--max-tokens", "4")),
    "openresponses": Judge(
        judge_openresponses,
        Clone("openresponses/openresponses", ("bin", "src", "public")),
        options=("--temperature", "0"),
    ),
    "ogx": Judge(judge_ogx, Clone("ogx-ai/ogx", ("tests/integration/batches",))),
    "vllm": Judge(judge_vllm, Archive("vllm")),
    "llama.cpp": Judge(judge_llama_cpp, _LLAMA_CPP),
    "llama.cpp-keys": Judge(judge_llama_cpp_keys, _LLAMA_CPP, key="sk-this-is-the-secret-key"),
}


@contextmanager
def serving(judge: Judge, work: Path) -> Iterator[str]:
    """A server for one judge; its address."""
    command = [sys.executable, "-m", "xla_engine", "serve", "--port", "0", "--no-access-log"]
    command += ["--max-num-seqs", "8", "--max-model-len", "512", "--tool-parser", "hermes", *judge.options]
    command += [part for name in NAMES for part in ("--served-model-name", name)]
    command += ["--batch-dir", str(work / "batches")]
    environment = {**os.environ, "XLA_ENGINE_API_KEY": judge.key}
    with open(work / "server.log", "w+") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield _address(server, work / "server.log")
        finally:
            server.terminate()
            server.wait(600)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, once it is ready."""
    limit = time.monotonic() + 600
    while time.monotonic() < limit and server.poll() is None:
        words = log.read_text().split()
        url = next((word for word in words if word.startswith("http://127.0.0.1:")), None)
        if url is not None and httpx.get(f"{url}/ready").status_code == 200:
            return url
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")


def run(name: str, sources: Path, work: Path) -> Verdict:
    """One judge's verdict. If its sources cannot be fetched, that is its failure."""
    judge = JUDGES[name]
    work.mkdir(parents=True)
    try:
        source = judge.source.fetch(sources) if judge.source else sources
    except (subprocess.SubprocessError, OSError, LookupError) as error:
        return Verdict(failed=[("its sources could not be fetched", str(error))])
    with serving(judge, work) as url:
        return judge.run(Context(source=source, url=url, work=work))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m tests.judges",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(JUDGES))
    parser.add_argument(
        "--sources", type=Path, help="checkouts, by the repositories' names; default: a new folder"
    )
    parser.add_argument("--logs", type=Path, help="keep logs and reports here")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(JUDGES):
        parser.error(f"no judge {', '.join(sorted(unknown))}; there are {', '.join(JUDGES)}")
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch) / "logs"
        sources = arguments.sources or Path(scratch) / "sources"
        sources.mkdir(parents=True, exist_ok=True)
        verdicts = {name: run(name, sources, logs / name) for name in arguments.names or JUDGES}
    print("| judge | passed | skipped | failed | |\n|---|---:|---:|---:|---|")
    for name, verdict in verdicts.items():
        skipped, failed = sum(verdict.skipped.values()), len(verdict.failed)
        print(f"| {name} | {verdict.passed} | {skipped} | {failed} | {verdict.note} |")
    for name, verdict in verdicts.items():
        for reason, count in verdict.skipped.most_common():
            print(f"{name}: {count} skipped: {reason}")
        for test, message in verdict.failed:
            print(f"{name}: FAILED {test}: {' '.join(message.split())[:300]}")
    sys.exit(any(verdict.failed for verdict in verdicts.values()))


if __name__ == "__main__":
    main()
