"""A batch engine in one file: the scheduler decides, the runner computes, and one loop joins them.

    python examples/engine_in_150_lines.py "def add(a, b):" "class Stack:" --max-tokens 24

prints a JSON list of token ids for each prompt, one line each. They are the tokens of `LLM.generate` with the same
sampling parameters, and their log-probabilities have the same bits. To this loop, `xla_engine/engine/` adds streams,
stop strings, deadlines, constraints, speculation, recovery from failed steps, and other threads.

One turn of the loop:

    plan    the scheduler fills free slots from its queue, cuts prompts into chunks and names the rows that decode
    start   the runner dispatches the programs of the plan and returns at once
    wait    the samples of the *previous* step are fetched, while the device runs this one
    commit  the scheduler credits them to the requests of the plan that asked for them
"""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.environment import embedded_model_directory
from xla_engine.model_loader.checkpoint import load_weights
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import open_model
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.remembered import self_check
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Request, Sample, Scheduler, SchedulerConfig
from xla_engine.text.tokenizer import Tokenizer

LAG = 1  # started steps that may be unread


class Engine:
    """One model in `slots` slots of a KV cache.

    runner: the device side. It has compiled every program, from `xla_engine.graphs`, before the first request.
    scheduler: the host side. It knows token counts and stop tokens, but neither text nor arrays.
    in_flight: started steps that nobody has read, oldest first.
    settings: by request id, what the device needs to know of a row when its prompt is complete.
    samples: by request id, its tokens so far and their log-probabilities.
    """

    def __init__(self, model: Path | str, slots: int = 8) -> None:
        files = open_model(model)
        described = describe(files, EngineConfig(max_num_seqs=slots))
        checkpoint = load_weights(described)
        tokenizer = Tokenizer.of_model(files)
        if tokenizer is None:
            raise SystemExit(f"{model} has no tokenizer; choose a model that has one")
        self.tokenizer, self.stop_ids = tokenizer, checkpoint.eos_token_ids
        self.runner = Runner(checkpoint.config, checkpoint.weights, checkpoint.dtype, described.options)
        self_check(
            self.runner, checkpoint.config.vocab_size, checkpoint.fingerprint
        )  # drops programs of other bits
        config = self.runner.config
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.num_slots,
                chunk_size=config.chunk_size,
                max_num_batched_tokens=config.token_budget,
                max_chunks=config.max_chunks,
            )
        )
        self.in_flight: deque[InFlight] = deque()
        self.settings: dict[str, RowSettings] = {}
        self.samples: dict[str, list[Sample]] = {}

    def submit(self, name: str, prompt: str, params: SamplingParams) -> None:
        """Queue a prompt. Raises ValueError if it does not fit into a slot."""
        ids = tuple(self.tokenizer.encode(prompt))
        if len(ids) + params.token_limit > self.runner.context_length:
            raise ValueError(f"{name}: prompt and max_tokens exceed {self.runner.context_length} tokens")
        self.settings[name] = RowSettings(
            max_tokens=params.token_limit, stop_token_ids=self.stop_ids, params=params, seed=params.seed or 0
        )
        self.samples[name] = []
        self.scheduler.submit(
            Request(
                request_id=name,
                prompt_token_ids=ids,
                max_tokens=params.token_limit,
                stop_token_ids=frozenset(self.stop_ids),
            )
        )

    def turn(self) -> Iterator[str]:
        """Start one step and read an earlier one; yields the requests that have ended."""
        plan = self.scheduler.plan()
        if not plan.is_empty:
            self.in_flight.append(self.runner.start(plan, self.settings))
        if len(self.in_flight) > (0 if plan.is_empty else LAG):
            step = self.in_flight.popleft()
            # A row may have ended, and its slot may belong to another request, since this step was planned: the
            # scheduler credits a token only if slot, epoch and request are still those of the step's plan.
            for event in self.scheduler.commit(step.plan, self.runner.wait(step)):
                self.samples[event.request_id].append(event.sample)
                if event.finish_reason is not None:
                    del self.settings[event.request_id]
                    yield event.request_id

    def run(self) -> Iterator[tuple[str, Sequence[Sample]]]:
        """Run until every request has ended; yields each with its samples as it ends."""
        while self.settings:
            for name in self.turn():
                yield name, self.samples.pop(name)


def generate(engine: Engine, prompts: Iterable[str], params: SamplingParams) -> list[Sequence[Sample]]:
    """The samples of each prompt, in order. There may be more prompts than slots."""
    names = []
    for number, prompt in enumerate(prompts):
        names.append(str(number))
        engine.submit(names[-1], prompt, params)
    found = dict(engine.run())
    return [found[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", default=embedded_model_directory(), help="a directory or a .gguf file")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8, help="how many requests decode together")
    given = parser.parse_args()
    params = SamplingParams(temperature=given.temperature, max_tokens=given.max_tokens, seed=given.seed)
    for samples in generate(Engine(given.model, given.slots), given.prompts, params):
        print(json.dumps([sample.token_id for sample in samples]))


if __name__ == "__main__":
    main()
