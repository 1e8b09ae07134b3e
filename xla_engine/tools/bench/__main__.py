"""`python -m xla_engine.tools.bench`: measure, print the card, end with one JSON line."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_engine.environment import cache_directory
from xla_engine.errors import XlaEngineError
from xla_engine.tools.bench.card import card, write
from xla_engine.tools.bench.measure import Options, measure
from xla_engine.tools.bench.models import SHAPES, find_model
from xla_engine.tools.bench.peers import PEERS, PeerFailed, parse_peers
from xla_engine.tools.bench.workloads import WORKLOADS
from xla_engine.utils.cores import cores

NOT_STARTED = 2


class _Help(argparse.HelpFormatter):
    """Formats help like the other commands."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, str(action.metavar))}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="xla-engine bench",
        usage="xla-engine bench [OPTIONS]",
        description="Measure this engine and its peers on the same weights, prompts and threads, in turns. Each "
        "engine runs in its own process; peers that are not installed are skipped with a message. Greedy streams "
        "are judged in float32; a rate is void if its streams are wrong, or too uniform to show a fault. Ends with "
        "one JSON line.",
        epilog="Peers: " + "; ".join(f"{name} ({peer.about})" for name, peer in PEERS.items()) + ".",
        formatter_class=_Help,
        add_help=False,
    )
    options = found.add_argument_group("Options")

    def option(name: str, about: str, metavar: str = "INTEGER", **how: Any) -> None:
        given = how.get("default")
        if given is not None and given != []:
            given = " ".join(map(str, given)) if isinstance(given, list) else given
            about += f"  [default: {given}]"
        options.add_argument(name, help=about, metavar=metavar, **how)

    shapes, workloads = ", ".join(SHAPES), list(WORKLOADS)
    option(
        "--model",
        f"embedded, {shapes} (random weights), or a directory, .gguf file, hub id or package:NAME.",
        "MODEL",
        default="smollm2-135m",
    )
    option(
        "--dtype",
        "Dtype of weights and activations: bfloat16 or float32.",
        "TYPE",
        choices=["bfloat16", "float32"],
        default="bfloat16",
    )
    option("--batches", "Numbers of slots of every engine.", type=_positive, nargs="+", default=[8, 32])
    option("--workloads", "What is run.", "NAME", nargs="+", choices=workloads, default=workloads)
    option("--rounds", "Measured turns of every engine.", type=_positive, default=3)
    option("--threads", "Cores for every engine.", type=_positive, default=cores())
    option(
        "--peer",
        "Interpreter with the peer, by default this one. Repeatable.",
        "NAME=PYTHON",
        action="append",
        default=[],
    )
    option("--only", "Run only these peers.", "NAME", nargs="*", choices=list(PEERS))
    option("--prompt-tokens", "Prompt length of uniform, prefill and pair.", type=_positive, default=128)
    option("--new-tokens", "New tokens of uniform and pair.", type=_positive, default=128)
    option(
        "--arrival-rate",
        "Arrivals per second (Poisson) of ragged; by default all at once.",
        "NUMBER",
        type=float,
    )
    option("--verify", "Requests to verify at each number of slots; 0 leaves it out.", type=int, default=40)
    option("--judge", "Requests judged per workload; 0 leaves it out.", type=int, default=8)
    option("--seed", "Seed of prompts and arrivals.", type=int, default=0)
    option(
        "--cache",
        "Directory for generated models.  [default: the user's cache directory]",
        "DIRECTORY",
        type=Path,
    )
    option("--output", "Also write the JSON line here.", "FILE", type=Path)
    option("--plot", "Draw decode tokens per second against slots (extra `plot`).", "FILE", type=Path)
    option(
        "--record",
        "Also write the card into this kind of machine's page in DIRECTORY, findings/benchmarks by default.",
        "DIRECTORY",
        type=Path,
        nargs="?",
        const=Path("findings/benchmarks"),
    )
    options.add_argument("-h", "--help", action="help", help="Show this message and exit.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with command-line arguments (None: those of the process); returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(words)
    cache = options.cache or cache_directory() / "bench"
    of_files = ("peer", "only", "cache", "output", "plot", "record")
    given = {name: value for name, value in vars(options).items() if name not in of_files}
    try:
        peers = parse_peers(options.peer)
        files = find_model(options.model, cache)
        skipped = set(PEERS) - set(PEERS if options.only is None else options.only)
        record = measure(
            Options(
                **given,
                cache=cache,
                files=files,
                config=files.config,
                peers=peers,
                without=frozenset(skipped),
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
    if options.record is not None:
        print(f"recorded in {write(record, words, options.record)}", file=sys.stderr)
    if options.plot is not None:
        from xla_engine.tools.bench.plot import plot

        plot(record, options.plot)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
