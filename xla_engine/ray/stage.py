"""A stage of Ray Data that runs an engine in each actor of a pool, with the columns of `ray.data.llm`."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_engine.batch.datasets.pooled import TASKS
from xla_engine.batch.datasets.rows import without_nulls
from xla_engine.batch.submit import submit_prompt
from xla_engine.config import EngineConfig
from xla_engine.engine.requests.output_collector import OutputCollector, Readable
from xla_engine.errors import ConfigError, EngineClosedError
from xla_engine.open_engine import engine_config
from xla_engine.openai.requests import LineError, LineRequest, explain, line_error, parse_record
from xla_engine.openai.results import output_error
from xla_engine.ray.pooled import POOLING, QUERY, pooled_columns, pooled_error, pooled_of, pooled_record_of
from xla_engine.ray.receipts import RECEIPT, RowReceipts, receipt_column
from xla_engine.ray.results import ERROR, columns_of, error_of, result_of
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.extras import install

PROMPTS = (("messages", "messages"), ("tokenized_prompt", "prompt"), ("prompt", "prompt"))  # column, field
SAMPLING = "sampling_params"


def columns_read(id_column: str | None) -> set[str]:
    """The columns that form a request."""
    return {*(column for column, _ in PROMPTS), SAMPLING, POOLING, QUERY} | (
        {id_column} if id_column is not None else set()
    )


def record_of(
    row: Mapping[str, Any], defaults: Mapping[str, Any], id_column: str | None, seed_of: Callable[[str], int]
) -> dict[str, Any] | None:
    """The request line of a row, with its seed; None if it has no `messages`, `prompt` or `tokenized_prompt`.

    row: may have `sampling_params`.
    id_column: the column of row ids. Without one the request itself is the id, so that equal rows get equal texts.
    seed_of: returns the seed for an id, for rows without a seed.
    """
    given = row.get(SAMPLING)
    record: dict[str, Any] = dict(without_nulls(given)) if isinstance(given, Mapping) else {}
    for column, name in PROMPTS:
        if row.get(column) is not None:
            record[name] = without_nulls(_plain(row[column]))
            break
    else:
        return None
    if record.get("seed", defaults.get("seed")) is None:
        record["seed"] = seed_of(_name(record) if id_column is None else str(row.get(id_column)))
    return record


def request_of(record: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> LineRequest | LineError:
    """The request of a row's line, or its error."""
    if record is None:
        return line_error(1, "invalid_row", "the row has no messages, prompt or tokenized_prompt")
    request = parse_record(record, 1, defaults)
    if isinstance(request, LineRequest) and (len(request.prompts) > 1 or request.params.n > 1):
        return line_error(1, "invalid_row", "a row has one text: n must be 1")
    return request


def _name(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


log = logging.getLogger(__name__)

_NO_SEED = SamplingParams()
RowFunction = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStage:
    """A model, and the actors that run it.

    model: as in `LLM`; a path must exist on every node.
    engine: engine options of each actor; a mapping has fields of `EngineConfig`, or vLLM's names of them.
    sampling: sampling fields for rows that do not set them in `sampling_params`.
    batch_size: rows in a batch for an actor.
    concurrency: number of actors; (least, most) scales between the two.
    max_concurrent_batches: concurrent batches of an actor, so that slots do not wait for the slowest row of a batch:
        `batch_size` times this should be at least twice `max_num_seqs`.
    num_cpus, num_gpus: of each actor, for Ray's placement; other stages of a pipeline also need CPUs.
    id_column: the column of row ids, which determine the noise of rows without a seed. Without it, equal requests get
        equal results.
    should_continue_on_error: a failed row has its error in `__inference_error__`; otherwise it ends the job.
    ray_remote_args: further arguments of the actors, such as `runtime_env`.
    receipts: adds a column `receipt`, which `write_receipts` reads. It stays in the rows that `postprocess` makes.
    task_type: of a model that pools, "embed", "classify" or "score"; None is "classify" if the model has a classifier,
        else "embed".
    """

    model: str | Path | None = None
    engine: EngineConfig | Mapping[str, Any] = field(default_factory=EngineConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int = 8
    num_cpus: float = 1
    num_gpus: float = 0
    id_column: str | None = None
    should_continue_on_error: bool = True
    ray_remote_args: Mapping[str, Any] = field(default_factory=dict)
    receipts: bool = False
    task_type: str | None = None

    def __post_init__(self) -> None:
        SamplingParams.from_mapping(self.sampling)
        if self.task_type not in (None, *TASKS):
            raise ConfigError(f"task_type must be one of {', '.join(TASKS)}, not {self.task_type!r}")
        _ = self.config  # raises for an invalid option
        for name in ("batch_size", "max_concurrent_batches"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {getattr(self, name)!r}")
        sizes = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency,)
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        if not whole or len(sizes) > 2 or list(sizes) != sorted(sizes):
            raise ConfigError(
                f"concurrency must be a number of actors or (least, most), not {self.concurrency!r}"
            )

    @property
    def config(self) -> EngineConfig:
        """The options of each actor's engine."""
        return self.engine if isinstance(self.engine, EngineConfig) else engine_config(self.engine)


@dataclass(frozen=True, slots=True)
class Processor:
    """The result of `build_processor`: a function from datasets to lazy datasets."""

    stage: ModelStage
    preprocess: RowFunction | None
    postprocess: RowFunction | None
    preprocess_map_kwargs: Mapping[str, Any]
    postprocess_map_kwargs: Mapping[str, Any]

    def __call__(self, dataset: Any) -> Any:
        """Append the stage to a dataset; nothing runs yet."""
        data = _ray_data()
        stage = self.stage
        if self.preprocess is not None:
            dataset = dataset.map(_added(self.preprocess), **self.preprocess_map_kwargs)
        sizes = stage.concurrency
        pool = {"size": sizes} if isinstance(sizes, int) else {"min_size": sizes[0], "max_size": sizes[1]}
        # As in `ray.data.llm`: since Ray 2.60 the public method warns about actor arguments such as max_concurrency.
        map_batches = getattr(dataset, "map_batches_internal", dataset.map_batches)
        dataset = map_batches(
            EngineActor,
            fn_constructor_kwargs={"stage": stage},
            batch_size=stage.batch_size,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=data.ActorPoolStrategy(
                **pool, max_tasks_in_flight_per_actor=2 * stage.max_concurrent_batches
            ),
            max_concurrency=stage.max_concurrent_batches,
            num_cpus=stage.num_cpus,
            num_gpus=stage.num_gpus or None,
            **stage.ray_remote_args,
        )
        if self.postprocess is not None:
            kept = () if stage.id_column is None else (stage.id_column,)
            dataset = dataset.map(_answered(self.postprocess, kept), **self.postprocess_map_kwargs)
        return dataset


def build_processor(
    stage: ModelStage,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    *,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """The counterpart of `ray.data.llm.build_processor` for this engine.

    preprocess: from a row to columns that are added to it: `messages`, `prompt` or `tokenized_prompt`, and
        `sampling_params`. Without it the rows have them.
    postprocess: from a row with all columns so far and `generated_text`, `generated_tokens`, `num_input_tokens`,
        `num_generated_tokens`, `finish_reason`, `logprobs`, `prompt_logprobs`, `images_sha256` to the row that the
        dataset gets. Of a model that pools, `embeddings`, `probs` or `score`, and `num_input_tokens`. It also makes
        the columns of a row with an error, whose text is "", so that all rows have the same; if it raises, such a row
        has `id_column` and `__inference_error__` only.
    preprocess_map_kwargs, postprocess_map_kwargs: for `Dataset.map`.

    Raises ConfigError where Ray Data is not installed.
    """
    _ray_data()
    return Processor(
        stage, preprocess, postprocess, preprocess_map_kwargs or {}, postprocess_map_kwargs or {}
    )


def _ray_data() -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise ConfigError(f"this needs Ray Data ({error}): {install('ray')}") from error
    return ray.data


def _added(function: RowFunction) -> RowFunction:
    """From a row to the row with the columns that a function computes."""

    def with_columns(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **function(row)}

    return with_columns


def _answered(function: RowFunction, kept: tuple[str, ...] = ()) -> RowFunction:
    """From a row with results to the output row. kept: columns of a failed row if the function raises for it."""

    def output_row(row: dict[str, Any]) -> dict[str, Any]:
        error = row.get(ERROR) or ""
        own = {ERROR: error} | {name: row[name] for name in (RECEIPT,) if name in row}
        try:
            return {**function(row), **own}
        except Exception:
            if not error:
                raise
            return {name: row[name] for name in kept if name in row} | own  # the row has no text

    return output_row


class _Ends(OutputCollector):
    """Collects the results of a batch's requests. tell: called when all have ended."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__(every_token=False)
        self._tell = tell
        self._missing = 0  # unfinished requests; negative until their number is known

    def expect(self, count: int) -> None:
        """Set the number of requests, some of which may have ended already. The engine's lock must be held."""
        self._missing += count
        if not self._missing:
            self._tell()

    def put(self, request: Readable) -> None:
        """Take a request that has ended."""
        super().put(request)
        self._missing -= 1
        if not self._missing:
            self._tell()


class EngineActor:
    """One actor of the pool: an engine and its live batches.

    A thread runs the engine, so that only the ends of requests reach the event loop of the batches.
    """

    def __init__(self, stage: ModelStage) -> None:
        from xla_engine.engine.batch_engine import XlaBatchEngine

        self._stage = stage
        self._engine = XlaBatchEngine.from_pretrained(stage.model, stage.config)
        self._columns = columns_read(stage.id_column)
        self._receipts = RowReceipts(self._engine, stage.sampling) if stage.receipts else None
        self._task = self._pooled_task()
        self._count = 0
        self._has_work = threading.Event()
        threading.Thread(target=self._drive, name="xla-engine", daemon=True).start()

    def _drive(self) -> None:
        while self._has_work.wait():
            self._has_work.clear()
            try:
                while self._engine.has_work:
                    self._engine.advance()
            except EngineClosedError:
                pass  # every request got the error
            except Exception:
                log.exception("the engine's loop failed, and its actor ends")
                os._exit(1)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """The batch with the columns of its results, in its order."""
        read = [name for name in batch.column_names if name in self._columns]
        rows = batch.select(read).to_pylist() if read else [{}] * batch.num_rows
        results = await self._results(rows)
        columns = columns_of(results) if self._task is None else pooled_columns(results, self._task)
        columns |= {} if self._receipts is None else receipt_column(results)
        table = batch.select([name for name in batch.column_names if name not in columns])
        for name, column in columns.items():
            table = table.append_column(name, column)
        yield table

    async def _results(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The columns of each row's result.

        The event loop is notified once, when all requests of the batch have ended, because the engine's
        thread waits whenever the loop runs.
        """
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads
                loop.call_soon_threadsafe(ended.set)

        collector = _Ends(tell)
        results: dict[int, dict[str, Any]] = {}
        running: dict[str, tuple[int, Mapping[str, Any], LineRequest]] = {}
        for place, row in enumerate(rows):
            record: Mapping[str, Any] | None = None
            try:
                record = self._record_of(row)
                request = request_of(record, self._stage.sampling)
                if isinstance(request, LineError):
                    wrong = ValueError(f"{request.code}: {request.message}")
                    results[place] = self._failed(wrong, record, (request.code, request.message))
                    continue
                assert record is not None
                running[self._submit(request, collector)] = place, record, request
            except Exception as error:
                results[place] = self._failed(error, record)
            self._has_work.set()
        with self._engine.lock:
            collector.expect(len(running))
        await ended.wait()
        with self._engine.lock:
            outputs = [ended_request.output() for ended_request in collector.take()]
        for output in outputs:
            place, asked, request = running[output.request_id]
            if (failed := output_error(request, output)) is not None:
                wrong = ValueError(failed.message)
                results[place] = self._failed(wrong, asked, (failed.code, failed.message))
                continue
            results[place] = result_of(output) if self._task is None else pooled_of(output, self._task)
            if self._receipts is not None:
                results[place] |= _receipt(self._receipts.answered, asked, request, output)
        return [results[place] for place in range(len(rows))]

    def _record_of(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The request line of a row; with receipts also its id."""
        if self._task is not None:
            return pooled_record_of(row, self._task)
        name = self._stage.id_column
        record = record_of(row, self._stage.sampling, name, self._seed_of)
        if self._receipts is None or record is None or name is None:
            return record
        return {"custom_id": str(row.get(name)), **record}

    def _submit(self, request: LineRequest, collector: OutputCollector) -> str:
        """Queue the request of a row; returns its id."""
        self._count += 1
        name = f"row-{self._count}"
        submit_prompt(self._engine, request, request.prompts[0], name, collector=collector)
        return name

    def _pooled_task(self) -> str | None:
        """What a model that pools computes of each row; None for a model that generates."""
        form = self._engine.validator.pooler
        if form is None and self._stage.task_type is not None:
            raise ConfigError("task_type is for models that pool; this one generates")
        if form is not None and self._stage.receipts:
            raise ConfigError("a model that pools writes no receipts: leave receipts out")
        default = "embed" if form is None or form.classifier is None else "classify"
        return None if form is None else self._stage.task_type or default

    def _seed_of(self, name: str) -> int:
        return self._engine.seed_of(name, _NO_SEED)

    def _failed(
        self, error: Exception, record: Mapping[str, Any] | None, why: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        """The columns of a failed row, if the job continues on errors; otherwise raises. why: code and message."""
        if self._engine.closed_because is not None or isinstance(error, EngineClosedError):
            # Ray reruns the batch on another actor or on this one restarted. An orderly exit of the actor would
            # end its tasks instead: ray-project/ray#59522.
            log.error("the engine has ended, so its actor ends: %s", self._engine.closed_because)
            os._exit(1)
        if not self._stage.should_continue_on_error:
            raise error
        text = str(error)
        found = error_of(text) if self._task is None else pooled_error(text, self._task)
        if self._receipts is not None:
            found |= _receipt(self._receipts.failed, record or {}, *(why or explain(error)))
        return found


def _receipt(make: Callable[..., str], *of: Any) -> dict[str, str | None]:
    """The column of a receipt; null if the request is no JSON, as with pictures in bytes."""
    try:
        return {RECEIPT: make(*of)}
    except (TypeError, ValueError):
        return {RECEIPT: None}
