# Measured at commit 4654949c; runs at HEAD.
"""What do receipts and an audit cost? Processor seconds of generating answers with and without receipts, of auditing
them, and of prefills of as many tokens.

    python -m spikes.112_receipts qwen2.5-coder-0.5b.gguf --answers 32 --prompt 64 --new 64
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from xla_engine import receipts
from xla_engine.batch.lines import Line
from xla_engine.batch.run import BatchRun
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.receipts.recompute import DRAFTS, audit_files
from xla_engine.receipts.writing import header_of
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.json_line import dump_line


def seconds(work: Callable[[], Any]) -> float:
    """Of the processor, of all threads."""
    began = time.process_time()
    work()
    return round(time.process_time() - began, 3)


def plain(engine: XlaBatchEngine, requests: Sequence[dict[str, Any]], path: Path) -> None:
    """Run requests as a file of lines without receipts."""
    lines = [dump_line(each).removesuffix(b"\n") for each in requests]
    with open(path, "wb") as sink:
        numbered = [Line(number, len(raw), raw) for number, raw in enumerate(lines, 1)]
        BatchRun(engine, numbered, sink, header=header_of(engine)).run()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="by default the embedded model")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--form", default="auto", help="quantization, such as gguf-int8")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument(
        "--pairs", type=int, default=1, help="runs with and without receipts, one after the other"
    )
    args = parser.parse_args()
    config = EngineConfig(max_num_seqs=args.slots, max_model_len=512, quantization=args.form)
    draw, folder = random.Random(0), Path(tempfile.mkdtemp())
    results, proof = folder / "out.jsonl", folder / "receipts.jsonl"
    found: dict[str, Any] = vars(args)

    def with_receipts(engine: XlaBatchEngine) -> None:
        results.unlink(missing_ok=True)
        proof.unlink(missing_ok=True)
        receipts.write(engine, requests, results, proof)

    requests: list[dict[str, Any]] = []
    with XlaBatchEngine.from_pretrained(args.model, config) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(files("xla_engine.equivalence").joinpath("prompts.txt").read_text())
        ids = ids * (1 + args.prompt // len(ids))
        for number in range(args.answers):
            at = draw.randrange(len(ids) - args.prompt + 1)
            prompt = ids[at : at + args.prompt]
            common = {
                "temperature": args.temperature,
                "max_tokens": args.new,
                "ignore_eos": True,
                "logprobs": 0,
            }
            requests.append({"custom_id": f"c{number}", "prompt": prompt, **common})
        receipts.write(engine, requests[:2], folder / "warm", folder / "warm.receipts")
        pairs = [
            (
                seconds(lambda: plain(engine, requests, folder / "plain")),
                seconds(lambda: with_receipts(engine)),
            )
            for _ in range(args.pairs)
        ]
        found["generate"], found["generate with receipts"] = (
            round(median(each), 3) for each in zip(*pairs, strict=True)
        )
        found["receipts, share"] = round(median(one / other - 1 for other, one in pairs), 4)
        claims = [json.loads(line) for line in proof.read_text().splitlines()[1:-1]]

        def prefill(texts: list[list[int]], **fields: Any) -> float:
            for number, text in enumerate(texts):
                params = SamplingParams(temperature=0, max_tokens=1, **fields)
                engine.submit(text, params, cache_salt=f"{fields}{number}{len(text)}")
            return seconds(engine.drain)

        texts = [claim["request"]["prompt"] + claim["choices"][0]["token_ids"] for claim in claims]
        found["prefill of prompts"] = prefill([text[: args.prompt] for text in texts])
        found["prefill of prompts and answers"] = prefill(texts)
        found["the same, scored"] = prefill(texts, prompt_logprobs=0)
    with XlaBatchEngine.from_pretrained(args.model, replace(config, speculative_config=DRAFTS)) as engine:

        @contextmanager
        def load(_: dict[str, Any]) -> Iterator[XlaBatchEngine]:
            yield engine

        audit_files(folder / "warm", folder / "warm.receipts", load)
        audits = [seconds(lambda: audit_files(results, proof, load)) for _ in range(args.pairs)]
        found["audit"] = median(audits)
        assert audit_files(results, proof, load).ok
    found["audit / generate"] = round(found["audit"] / found["generate"], 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
