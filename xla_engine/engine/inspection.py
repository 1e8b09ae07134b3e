"""`xla-engine inspect`: describes a model and the memory it needs on this machine, without loading its weights."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from xla_engine.config import AUTO, IMAGE_CACHE_BYTES, KEPT, SMALLEST_BATCH, EngineConfig
from xla_engine.engine.form_estimates import form_estimates
from xla_engine.errors import ConfigError, XlaEngineError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.images.tower import slices_of, why_no_pictures
from xla_engine.model_loader.checkpoint import load_weights
from xla_engine.model_loader.config_json import overridden, read_model, read_special_tokens
from xla_engine.model_loader.config_only import ConfigOnly, open_named
from xla_engine.model_loader.describe import ModelDescription, describe_decoder
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.model_loader.pooling import choose_runner, decoder_fields, encoder_options
from xla_engine.model_loader.quantised.methods import without_method
from xla_engine.model_loader.tensor_files import TensorFiles, TensorInfo
from xla_engine.model_loader.vision import load_vision
from xla_engine.model_loader.weights import StoredWeights, stored_kinds
from xla_engine.runner import memory
from xla_engine.runner.backends import library_of, serving_device
from xla_engine.runner.features import place_bytes, places_within
from xla_engine.runner.memory import size
from xla_engine.runner.sizing import resolve_length, resolve_sizes
from xla_engine.runner.weight_form import resolve_form
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.tables import aligned

_LENGTHS = tuple(1 << power for power in range(9, 21, 2))
_SLOTS = (8, 16, 32, 64, 128, 256)


@dataclass(slots=True, kw_only=True)
class Inspection:
    """A report about a model. Fields that could not be determined are None, and `problems` says why.

    path: the directory or file.
    architecture: the name in its configuration.
    stored: tensors, parameters and bytes in the files, by dtype.
    quantised: how many weights of a safetensors checkpoint have each quantised form.
    unpacked: if weights stay packed, how many quantised ones of each form do not, and become bfloat16.
    parameters: how many parameters the model has; tied ones count once.
    shape: the fields of `ModelConfig`.
    layers: the number of layers of each type.
    eos_token_ids: the ids that end a text.
    tokenizer: its highest token id plus one.
    chat_template: whether there is one.
    dtype: the engine's.
    backends: the backends that the engine would use.
    vision: of a model with a vision tower, the bytes of its weights and of the room for features, and how many
        tokens of pictures that is, and how many slices pictures of up to that size have; or why the engine
        would read no pictures.
    forms: what each form of the weights needs, as `FormEstimate`; the one that would run first.
    memory: the memory plan for the given configuration, in bytes, including bytes per token and per slot.
    fits: for each max_model_len, the bytes that each max_num_seqs needs, and the most slots that fit.
    problems: why the model cannot run, or why a part of the report is missing.
    """

    path: str
    architecture: str | None = None
    stored: dict[str, dict[str, int]] = field(default_factory=dict)
    quantised: dict[str, int] = field(default_factory=dict)
    unpacked: dict[str, int] = field(default_factory=dict)
    parameters: int | None = None
    shape: dict[str, Any] | None = None
    layers: dict[str, int] | None = None
    eos_token_ids: tuple[int, ...] | None = None
    tokenizer: int | None = None
    chat_template: bool | None = None
    dtype: str | None = None
    backends: dict[str, str] | None = None
    vision: dict[str, Any] | None = None
    forms: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    fits: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def inspect_model(model: ModelFiles | Path | str, config: EngineConfig) -> Inspection:
    """Inspect a model without reading its weights; a config.json is enough, and `stored` is empty then.

    Raises CheckpointError if there is no model.
    """
    files = open_named(model) if isinstance(model, Path | str) else model
    has_weights = not isinstance(files, ConfigOnly)
    report = Inspection(path=str(files.path))
    read: ModelConfig | None = None
    stored: StoredKinds = {}
    with _problems(report):
        names = files.config_fields().values.get("architectures")
        report.architecture = ", ".join(map(str, names)) if isinstance(names, list) else None
    with _problems(report):
        report.stored = _stored(files.tensors().tensors.values()) if has_weights else {}
    with _problems(report):
        fields = overridden(files.config_fields(), config.hf_overrides or {})
        config = without_method(fields, choose_runner(files, fields, config))
        read, _ = read_model(files, decoder_fields(files, fields, config))
        report.shape = asdict(read)
        report.layers = dict(Counter(read.layer_type(index) for index in range(read.num_hidden_layers)))
        report.parameters = sum(map(prod, parameter_shapes(read).values()))
        report.dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        report.eos_token_ids = read_special_tokens(files, read).eos_token_ids
    with _problems(report):
        described = describe_decoder(files, config)
        stored = _read_headers(report, described) if has_weights else stored
    with _problems(report):
        tokenizer = Tokenizer.of_model(files)
        report.tokenizer = None if tokenizer is None else tokenizer.vocab_size
    with _problems(report):
        report.chat_template = files.chat_template() is not None
    if read is not None:
        with _problems(report):
            _account(report, read, config, stored)
    return report


def _read_headers(report: Inspection, model: ModelDescription) -> StoredKinds:
    """Check the tensors against the configuration, and fill in what they tell."""
    checkpoint = load_weights(model)
    report.dtype = checkpoint.dtype
    if isinstance(checkpoint.weights, StoredWeights) and model.files.path.is_dir():
        report.quantised = dict(Counter(checkpoint.weights.forms))
    report.vision = _vision(model)
    return stored_kinds(checkpoint.weights)


@contextmanager
def _problems(report: Inspection) -> Iterator[None]:
    """Add an error in the block to the report's problems, without duplicates."""
    try:
        yield
    except XlaEngineError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))


def _stored(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for info in tensors:
        sums = found.setdefault(info.dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["parameters"] += prod(info.shape)
        sums["bytes"] += info.size
    return found


def _vision(model: ModelDescription) -> dict[str, Any] | None:
    """`Inspection.vision`. Raises CheckpointError for a tower that does not load."""
    if not model.family.vision:
        return None
    if (why := why_no_pictures(model)) is not None:
        return {"refused": why}
    vision = load_vision(model.files, dtype=model.options.dtype)
    places = places_within(vision.config, model.options.image_cache_bytes or IMAGE_CACHE_BYTES)
    return {
        "weights": vision.weights.nbytes,
        "features": places * place_bytes(vision.config),
        "tokens": places * vision.config.place_tokens,
        "slices": slices_of(vision.config, model).by_tokens,
    }


def _account(report: Inspection, model: ModelConfig, config: EngineConfig, stored: StoredKinds) -> None:
    """Fill in backends, memory and `fits`. Raises ConfigError if the configuration does not fit."""
    assert report.dtype is not None
    device = serving_device()
    free = memory.available_to_each(device, config.tensor_parallel_size)
    budget = None if free is None else int(free * config.memory_utilization)
    form = resolve_form(config, model, report.dtype, stored)
    config = form.config
    if model.encoder is not None:
        _account_encoder(report, form.spec_of(model), encoder_options(config, model), budget)
        return

    def spec_of(length: int) -> ModelSpec:
        return form.spec_of(model.within(length))

    vision = report.vision or {}
    extra = memory.ExtraMemory(vision.get("weights", 0) + vision.get("features", 0))
    config = resolve_length(config, model, form.spec_of, device)
    length = config.context_length(model.max_position_embeddings)
    spec = spec_of(length)
    refusal = None
    try:
        config = resolve_sizes(config, spec, length, device, extra)
    except ConfigError as error:
        refusal = error
        if config.max_num_seqs == AUTO:
            config = replace(config, max_num_seqs=SMALLEST_BATCH)
    plan = memory.plan_memory(spec, config, length, budget, extra)
    if config.quantization in KEPT:
        report.unpacked = dict(
            Counter(
                kind
                for leaf, parts in stored.items()
                for kind, _ in parts
                if spec.leaves[leaf].form is None and kind not in TensorFiles.dtypes
            )
        )
    report.forms = [asdict(each) for each in form_estimates(spec, config.quantization, stored)]
    report.backends = _backends(spec)
    report.memory = {
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "kv_bytes_per_token": memory.kv_bytes_per_token(spec_of(model.max_position_embeddings)),
        **asdict(plan),
        "needed": plan.needed,
        "arithmetic": plan.arithmetic(),
    }
    longest = min(model.max_position_embeddings, _LENGTHS[-1])
    for length in (*(length for length in _LENGTHS if length < longest), longest):
        plan = memory.plan_memory(spec_of(length), config, length, budget, extra)
        needed = {slots: replace(plan, slots=slots).needed for slots in _SLOTS}
        report.fits.append({"max_model_len": length, "needed": needed, "most_slots": plan.most_slots})
    if refusal is not None:
        raise refusal


def _account_encoder(report: Inspection, spec: ModelSpec, config: EngineConfig, budget: int | None) -> None:
    """As `_account`, for an encoder, whose texts keep nothing on the device."""
    length = config.context_length(spec.config.max_position_embeddings)
    plan = memory.encoder_plan(spec, length, budget)
    report.backends = _backends(spec)
    report.memory = {"max_model_len": length, **asdict(plan), "needed": plan.needed}
    memory.check_memory(plan)


def _backends(spec: ModelSpec) -> dict[str, str]:
    device = serving_device()
    return {
        "attention": spec.attention.name,
        "linear": "xla" if spec.products is None else spec.products.name,
        "isa": spec.isa or "none",
        "library": library_of(spec) or "none",
        "device": f"{device.platform} ({device.device_kind})",
    }


def report_lines(report: Inspection) -> list[str]:
    lines = [_row("model", report.path), _row("architecture", report.architecture or "unknown")]
    window = None
    if report.shape is not None:
        shape = report.shape
        kinds = ", ".join(f"{count} {kind}" for kind, count in (report.layers or {}).items())
        window = shape["sliding_window"]
        lines += [
            _row("parameters", f"{report.parameters or 0:,}"),
            _row("layers", kinds + (f" (window {window})" if window and "sliding" in kinds else "")),
            _row(
                "shape",
                f"hidden {shape['hidden_size']}, {shape['num_attention_heads']} heads of {shape['head_dim']}, "
                f"{shape['num_key_value_heads']} for keys, MLP {shape['intermediate_size']}, vocabulary "
                f"{shape['vocab_size']}, context {shape['max_position_embeddings']}",
            ),
        ]
    for dtype, sums in sorted(report.stored.items()):
        lines.append(_row(f"stored {dtype}", f"{size(sums['bytes'])} in {sums['tensors']} tensors"))
    for form, count in sorted(report.quantised.items()):
        lines.append(_row("quantised", f"{count} weights as {form}"))
    for form, count in sorted(report.unpacked.items()):
        lines.append(_row("not packed", f"{count} weights as {form} become bfloat16"))
    if (vision := report.vision) is not None:
        words = vision.get("refused") or (
            f"weights {size(vision['weights'])}, features {size(vision['features'])} for {vision['tokens']} tokens; "
            f"both are among the weights below; a picture runs in up to {vision['slices'][-1][1]} slices"
        )
        lines.append(_row("vision tower", words))
    tokenizer = "none: pass token ids" if report.tokenizer is None else f"{report.tokenizer} tokens"
    lines.append(_row("tokenizer", tokenizer + (", chat template" if report.chat_template else "")))
    if report.backends is not None and report.memory is not None:
        found, account = report.backends, report.memory
        isa = "" if found["isa"] == "none" else f" ({found['isa']}; C++ {found['library']})"
        by = f"{found['attention']} attention, {found['linear']} products{isa}, {found['device']}"
        lines += [
            _row("backends", by),
            _row("engine dtype", str(report.dtype)),
        ]
        if "kv_bytes_per_token" not in account:  # an encoder
            needed = f"weights {size(account['weights'])} + workspace {size(account['workspace'])}"
            lines += [
                _row("needed", f"{needed} = {size(account['needed'])}; texts keep nothing in memory"),
                _row("one text", f"up to {account['max_model_len']} tokens"),
            ]
            return lines + [line for problem in report.problems for line in ("", f"cannot run: {problem}")]
        lines += [
            _row("KV per token", size(account["kv_bytes_per_token"]) + (" beyond windows" if window else "")),
            _row("one slot", f"{size(account['slot'])} at max_model_len {account['max_model_len']}"),
            _row("needed", account["arithmetic"]),
            *(_row("weights" if not at else "", _form_words(form)) for at, form in enumerate(report.forms)),
            "",
            *_table(report.fits, account["available"]),
        ]
    return lines + [line for problem in report.problems for line in ("", f"cannot run: {problem}")]


def _form_words(form: dict[str, Any]) -> str:
    rate = form["tokens_per_s"]
    estimate = "" if rate is None else f", about {rate:.0f} tokens/s for one request"
    chosen = "  (these options)" if form["chosen"] else ""
    return f"{size(form['weights'])} with quantization {form['quantization']}{estimate}{chosen}"


def _row(name: str, text: str) -> str:
    return f"{name:<14} {text}"


def _table(fits: list[dict[str, Any]], available: int | None) -> list[str]:
    """The table of bytes needed; values above the available memory are in brackets."""
    rows = [("max_model_len", *(f"{slots} seqs" for slots in _SLOTS), "most")]
    for row in fits:
        cells = (
            size(needed) if available is None or needed <= available else f"({size(needed)})"
            for needed in row["needed"].values()
        )
        rows.append((str(row["max_model_len"]), *cells, "?" if available is None else str(row["most_slots"])))
    return aligned(rows, right=range(len(rows[0])))
