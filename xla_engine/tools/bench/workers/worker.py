"""Every engine's process: `python worker.py FILE:NAME THREADS [ROOT]`, one JSON object per line in and out.

Runs in the interpreter of its engine, so it needs the standard library only. FILE.py is next to this one or
in peers/; ROOT is a folder to import from besides. A question {"do": name, ...} calls that method of NAME(THREADS)
with the other fields. What every engine can be asked:

    load(wanted, and the options of this peer)
        -> {"versions": str, "notes": str, "arrivals": bool, "weight_bytes": of weights that are not in `dtype`}
    run(prompts, max_tokens, arrivals) -> {"seconds": s, "times": [[s, ...], ...], "streams": [[id, ...], ...]}

`wanted` has the attributes model, file, dtype, max_num_seqs, max_model_len and cache.

`run` completes token ids greedily, every request to exactly its `max_tokens`; request i is handed over
`arrivals[i]` seconds after the start, where load said that arrivals are understood. `times` are seconds since the
start at which each token was known. An answer {"error": text} says what went wrong.

An engine that is fed request by request may have these instead of `run`:

    room            requests that it takes at one time
    start(index, prompt, max_tokens)    takes request `index`
    step()          runs one step -> [(index, [id, ...]), ...]
    is_busy()       whether it has requests whose tokens are not complete
    end(index)      forgets a request that has all its tokens
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    kind, threads = sys.argv[1], int(sys.argv[2])
    sys.path += [str(Path(__file__).parent / "peers"), *sys.argv[3:]]
    # the same cores for every engine, whatever it calls its thread options
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output, C++ ones past Python
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if engine is None:
                module, _, name = kind.partition(":")
                engine = getattr(importlib.import_module(module), name)(threads)
            if "wanted" in request:
                request["wanted"] = SimpleNamespace(**request["wanted"])
            if do == "memory":
                answer: dict[str, Any] = {"peak_mib": peak_mib()}
            elif do == "run" and not hasattr(engine, "run"):
                answer = run(engine, **request)
            else:
                answer = getattr(engine, do)(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if hasattr(engine, "close"):
        with contextlib.suppress(Exception):
            engine.close()


def run(
    engine: Any, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
) -> dict[str, Any]:
    """The protocol's `run` for an engine that is fed request by request."""
    order = sorted(range(len(prompts)), key=lambda index: arrivals[index])
    streams: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    started = live = 0
    began = time.perf_counter()
    while started < len(order) or (live and engine.is_busy()):
        now = time.perf_counter() - began
        while started < len(order) and live < engine.room and arrivals[order[started]] <= now:
            index = order[started]
            engine.start(index, prompts[index], max_tokens[index])
            started, live = started + 1, live + 1
        if not live:
            time.sleep(max(arrivals[order[started]] - now, 0.0))
            continue
        found = list(engine.step())
        now = time.perf_counter() - began
        for index, tokens in found:
            streams[index] += tokens
            times[index] += [now] * len(tokens)
            if len(streams[index]) == max_tokens[index]:
                engine.end(index)
                live -= 1
    return {"seconds": time.perf_counter() - began, "times": times, "streams": streams}


def peak_mib() -> float:
    """Peak memory of this process, loading included."""
    with contextlib.suppress(OSError):  # the system's own count of a child starts with its parent's
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main()
