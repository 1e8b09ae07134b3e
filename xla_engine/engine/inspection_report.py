"""The report of `xla-engine inspect` about a model, and its lines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from xla_engine.errors import XlaEngineError
from xla_engine.utils.sizes import size
from xla_engine.utils.tables import aligned

SLOTS = (8, 16, 32, 64, 128, 256)  # numbers of them in the table


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

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Add an error in the block to `problems`, without duplicates."""
        try:
            yield
        except XlaEngineError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


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
            *(
                _row(f"products, {kind}", found[key])
                for kind, key in (("bf16", "bf16_products"), ("packed", "coded_products"))
                if key in found
            ),
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
    rows = [("max_model_len", *(f"{slots} seqs" for slots in SLOTS), "most")]
    for row in fits:
        cells = (
            size(needed) if available is None or needed <= available else f"({size(needed)})"
            for needed in row["needed"].values()
        )
        rows.append((str(row["max_model_len"]), *cells, "?" if available is None else str(row["most_slots"])))
    return aligned(rows, right=range(len(rows[0])))
