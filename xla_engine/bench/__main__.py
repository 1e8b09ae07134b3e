"""`python -m xla_engine.bench`: measure, print the card, end with one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from xla_engine.bench.card import card
from xla_engine.bench.limits import core_count
from xla_engine.bench.measure import Options, measure
from xla_engine.bench.models import SHAPES, find_model
from xla_engine.bench.peers import PEERS, PeerFailed, parse_peers
from xla_engine.bench.workloads import WORKLOADS
from xla_engine.config import cache_directory
from xla_engine.errors import XlaEngineError
from xla_engine.model_loader.config_json import read_config

NOT_STARTED = 2


def parser() -> argparse.ArgumentParser:
    """The options of `xla-engine bench`."""
    found = argparse.ArgumentParser(
        prog="xla-engine bench",
        description="Measure this engine and its peers on the same weights, prompts and threads, in turns. Every "
        "engine runs in a process of its own; a peer that is not installed is skipped, and named. Greedy streams "
        "are judged in float32, and a rate whose streams are wrong is void. Ends with one JSON line.",
        epilog="Peers: " + "; ".join(f"{name} ({peer.about})" for name, peer in PEERS.items()) + ".",
    )
    found.add_argument(
        "--model",
        default="smollm2-135m",
        metavar="NAME|DIR",
        help=f"embedded, {', '.join(SHAPES)} (random weights), or a model directory.  [default: %(default)s]",
    )
    found.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    found.add_argument(
        "--batches", type=_positive, nargs="+", default=[8, 32], metavar="B", help="[default: 8 32]"
    )
    found.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    found.add_argument("--rounds", type=_positive, default=3, help="measured turns of every engine")
    found.add_argument("--threads", type=_positive, default=core_count(), help="cores for every engine")
    found.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="interpreter that has the peer; this one where none is named",
    )
    found.add_argument("--only", nargs="*", choices=list(PEERS), metavar="NAME", help="peers to run at most")
    found.add_argument("--prompt-tokens", type=_positive, default=128, help="of uniform, prefill and pair")
    found.add_argument("--new-tokens", type=_positive, default=128, help="of uniform and pair")
    found.add_argument(
        "--arrival-rate", type=float, help="Poisson arrivals of ragged, per second; else all at once"
    )
    found.add_argument("--verify", type=int, default=40, help="requests to verify at each B; 0 leaves it out")
    found.add_argument("--judge", type=int, default=8, help="requests judged per workload; 0 leaves it out")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--cache", type=Path, help="for written models  [default: the user's cache directory]")
    found.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON line here")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw decode tok/s against B (extra `plot`)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with command line words (None: the process's own); the exit status."""
    options = parser().parse_args(arguments)
    cache = options.cache or cache_directory() / "bench"
    try:
        directory = find_model(options.model, cache)
        peers = parse_peers(options.peer)
        skipped = set(PEERS) - set(PEERS if options.only is None else options.only)
        record = measure(
            Options(
                model=options.model,
                directory=directory,
                config=read_config(directory),
                dtype=options.dtype,
                batches=options.batches,
                workloads=options.workloads,
                rounds=options.rounds,
                threads=options.threads,
                peers=peers,
                without=frozenset(skipped),
                python=sys.executable,
                cache=cache,
                seed=options.seed,
                prompt=options.prompt_tokens,
                new=options.new_tokens,
                rate=options.arrival_rate,
                verify=options.verify,
                judge=options.judge,
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
        )
    except (XlaEngineError, PeerFailed, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return NOT_STARTED
    line = json.dumps(record)
    print(card(record), end="\n\n")
    print(line)
    if options.output is not None:
        options.output.write_text(line + "\n")
    if options.plot is not None:
        from xla_engine.bench.plot import plot

        plot([record], options.plot)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
