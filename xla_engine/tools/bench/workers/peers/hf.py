"""transformers: `generate` on static batches, its continuous batching, and the judge of greedy streams."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from judge import Judge  # type: ignore[import-not-found]  # the folder of `worker.py`

Ids = list[list[int]]

PAGE = 256  # positions per page of the paged cache, the default
PROMPT_TOKENS = 512  # prompt tokens of a step besides the decoding rows


class Static:
    """`generate`: a batch padded on the left, run until its longest request is done."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()

    def load(self, wanted: Any) -> dict[str, Any]:
        self._batch = wanted.max_num_seqs
        self._model = load_model(wanted.model, wanted.dtype)
        return {
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "notes": "",
            "arrivals": False,
        }

    def run(self, prompts: Ids, max_tokens: list[int], arrivals: list[float]) -> dict[str, Any]:
        """Batches of `max_num_seqs` in the order given; arrivals are ignored."""
        times: list[list[float]] = []
        streams: Ids = []
        began = time.perf_counter()
        for at in range(0, len(prompts), self._batch):
            clock = TokenClock(began)
            counts = max_tokens[at : at + self._batch]
            ids, mask = left_padded(prompts[at : at + self._batch])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max(counts),
                    min_new_tokens=max(counts),
                    do_sample=False,
                    stopping_criteria=transformers.StoppingCriteriaList([clock]),
                )
            new = out[:, ids.shape[1] :].tolist()
            streams += [row[:count] for row, count in zip(new, counts, strict=True)]
            times += [clock.times[:count] for count in counts]
        return {"seconds": time.perf_counter() - began, "times": times, "streams": streams}

    def limits(self, dtype: str) -> dict[str, Any]:
        """GFLOP/s of a 2048 x 2048 product in `dtype`."""
        size, seconds = 2048, []
        square = torch.ones(size, size, dtype=getattr(torch, dtype))
        for _ in range(7):
            began = time.perf_counter()
            torch.mm(square, square)
            seconds.append(time.perf_counter() - began)
        return {"gflops": 2e-9 * size**3 / min(seconds)}


class Continuous(Static):
    """The machinery of `generate_batch`, kept alive between runs and fed request by request."""

    def load(self, wanted: Any) -> dict[str, Any]:
        loaded = super().load(wanted)
        options = transformers.generation.ContinuousBatchingConfig(
            max_requests_per_batch=wanted.max_num_seqs,
            page_size=PAGE,
            num_blocks=wanted.max_num_seqs * -(-wanted.max_model_len // PAGE),
            max_batch_tokens=wanted.max_num_seqs + PROMPT_TOKENS,
            allow_block_sharing=False,
        )
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=options
        )
        self._manager.warmup()
        self._manager.start()
        return loaded | {"notes": f"pages of {PAGE}, {PROMPT_TOKENS} prompt tokens a step", "arrivals": True}

    def run(self, prompts: Ids, max_tokens: list[int], arrivals: list[float]) -> dict[str, Any]:
        manager = self._manager
        order = sorted(range(len(prompts)), key=lambda index: arrivals[index])
        names: dict[str, int] = {}
        outputs: dict[int, Any] = {}
        began = time.perf_counter()
        while len(outputs) < len(prompts):
            now = time.perf_counter() - began
            while len(names) < len(order) and arrivals[order[len(names)]] <= now:
                index = order[len(names)]
                name = manager.add_request(
                    prompts[index], max_new_tokens=max_tokens[index], record_timestamps=True
                )
                names[name] = index
            due = arrivals[order[len(names)]] - now if len(names) < len(order) else 1.0
            result = manager.get_result(timeout=max(due, 0.001))
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                outputs[names[result.request_id]] = result
            elif not manager.is_running():
                raise RuntimeError("the generation thread ended")
        seconds = time.perf_counter() - began
        finished = [outputs[index] for index in range(len(prompts))]
        return {
            "seconds": seconds,
            "times": [[at - began for at in output.timestamps] for output in finished],
            "streams": [output.generated_tokens for output in finished],
        }

    def close(self) -> None:
        self._manager.stop(block=True)


def judge(threads: int) -> Judge:
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    return Judge(f"transformers {transformers.__version__}, float32", logits_of)


def logits_of(directory: str, dtype: str, in_eight_bits: bool) -> Any:
    """As a `Judge` wants it."""
    model = load_model(directory, dtype)
    if in_eight_bits:
        eight_bits(model)

    def logits(token_ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float().numpy()

    return logits


class TokenClock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Records when each token was known; never stops a text."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter() - self._began)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load_model(directory: str, dtype: str) -> Any:
    """The causal model, with no token that ends a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def eight_bits(model: Any) -> None:
    """Let `model` have its matrices, and the rows they multiply, rounded to 255 steps of each row's largest value."""

    def rounded(rows: Any) -> Any:
        step = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (rows / step).round() * step

    with torch.no_grad():
        for weight in {id(each.weight): each.weight for each in matrices(model)}.values():
            weight.copy_(rounded(weight))
    for each in matrices(model):
        if isinstance(each, torch.nn.Linear):
            each.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))


def matrices(model: Any) -> list[Any]:
    """The modules of a model that have a matrix."""
    return [each for each in model.modules() if isinstance(each, torch.nn.Linear | torch.nn.Embedding)]


def left_padded(prompts: Ids) -> tuple[Any, Any]:
    """Token ids and attention mask, both `[N, longest]`."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)
