"""Receipts: one line for each answer of a run, so that somebody else can check the answers later.

A file of receipts is JSON lines: a header, a receipt for each answer, and at the end a footer with the root of a
Merkle tree over all lines before it, as in RFC 6962 (section 2.1), over the bytes of each line without its newline.
Receipts of a table also have the table's digest. `docs/receipts.md` describes every field. A run that has not finished
has no footer; resuming it completes the file.

Canonical JSON here is Python's `json.dumps` with sorted names, without spaces, in ASCII.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from xla_engine.batch.output_file import Mode
from xla_engine.batch.resume import FinishedLines, Sink, is_packed, whole_lines
from xla_engine.batch.signatures import Signer
from xla_engine.engine.identity import EngineIdentity, logprob_bits_sha256, tokens_sha256
from xla_engine.errors import OutputError
from xla_engine.openai.results import ResultHeader
from xla_engine.outputs import RequestOutput
from xla_engine.utils.json_line import dump_line, load_object
from xla_engine.utils.new_file import replacing

FORMAT, VERSION = "xla-engine-receipts", 1
TABLE = "table"  # in the header of receipts whose results are the rows of a table
TABLE_SHA256 = "table_sha256"  # the only field of the line behind their receipts
_FOOTER_BYTES = 1024  # more than a footer has
_ONE_ORDER = ("avx512_bf16", "avx512", "avx2", "neon")  # their kernels sum in the same order


class MerkleTree:
    """The root of a growing list of lines, in memory for the logarithm of their number.

    Leaves are SHA-256 of a zero byte and the line, nodes of a byte one and both children; the left subtree of a node
    is the largest full one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._full: list[bytes] = []  # roots of full subtrees, the largest first, one for each bit of `count`

    def add(self, line: bytes) -> None:
        """Add a line, without its newline."""
        node, rest = hashlib.sha256(b"\0" + line).digest(), self.count
        while rest & 1:
            node, rest = _node(self._full.pop(), node), rest >> 1
        self._full.append(node)
        self.count += 1

    @property
    def root(self) -> str:
        """Hex digits."""
        if not self._full:
            return hashlib.sha256().hexdigest()
        node = self._full[-1]
        for left in reversed(self._full[:-1]):
            node = _node(left, node)
        return node.hex()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def canonical(value: object) -> bytes:
    """A JSON value in its canonical form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_of(value: object) -> str:
    """Of a JSON value's canonical form."""
    return hashlib.sha256(canonical(value)).hexdigest()


def arithmetic_class(platform: Mapping[str, str]) -> str:
    """The name of the arithmetic in which an engine computes; engines of two classes need not have the same bits."""
    if (portable := platform.get("arithmetic")) is not None:
        return portable
    backend, linear, attention = map(str, map(platform.get, ("backend", "linear", "attention")))
    if linear == attention == "native":
        isa = platform.get("isa", "amx")
        return f"{backend} {'fixed-order' if isa in _ONE_ORDER else isa}"
    return f"{backend} {linear}/{attention} {platform.get('device', '')}".rstrip()


class Made(Protocol):
    """An engine, as far as receipts describe it."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    def identity(self) -> EngineIdentity: ...


def receipts_header(
    engine: Made, header: ResultHeader, defaults: Mapping[str, Any], *, table: bool = False
) -> dict[str, Any]:
    """The first line of a file, as JSON values.

    defaults: sampling fields for lines that do not set them. table: whether the results are the rows of a table.
    """
    identity, tokenizer, template = engine.identity(), engine.tokenizer, engine.chat_template
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "name": header.model,
            "weights_sha256": identity.model,
            "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
            "chat_template_sha256": None if template is None else sha256_of(dict(template.sources)),
        },
        "arithmetic": {
            "class": arithmetic_class(identity.platform),
            "dtype": identity.dtype,
            "platform": dict(identity.platform),
            "made_on": dict(identity.made_on),
            "xla_engine": version("xla-engine"),
        },
        "config": dict(identity.config),
        "system_fingerprint": header.system_fingerprint,
        "created": header.created,
        "hashes": header.hashes,
        "defaults": dict(defaults),
        **({"results": TABLE} if table else {}),
    }


def whole_line(answer: bytes) -> bytes:
    """What the digest of an answer covers in a file of lines: its output line, without the newline."""
    return answer.removesuffix(b"\n")


@dataclass(frozen=True, slots=True)
class Answered:
    """An input line and its answer.

    raw: the line; None if it was too long. answer: its output line. outputs: one for each prompt; none with an error.
    error: the code of the answer's error.
    """

    raw: bytes | None
    line: int
    custom_id: str
    answer: bytes
    outputs: Sequence[RequestOutput]
    error: str | None = None


def receipt_line(answered: Answered, covered: bytes) -> bytes:
    """The receipt of one input line. covered: what the digest of its answer covers."""
    line, error = answered.line, answered.error
    return receipt_of(answered.raw, line, answered.custom_id, covered, choices_of(answered.outputs), error)


def receipt_of(
    raw: bytes | None,
    line: int,
    custom_id: str,
    answer: bytes,
    choices: Sequence[Mapping[str, Any]],
    error: str | None = None,
) -> bytes:
    """As `receipt_line`, from its parts. answer: what its digest covers. choices: as `choices_of` makes them."""
    request = request_in(raw)
    return dump_line(
        {
            "custom_id": custom_id,
            "line": line,
            "request": request,
            "request_sha256": sha256_of(request),
            "answer_sha256": hashlib.sha256(answer).hexdigest(),
            "error": error,
            "choices": [*choices],
        }
    )


def request_in(raw: bytes | None) -> dict[str, Any] | None:
    """The request of an input line, as receipts have it; None if it is no JSON object, or was too long."""
    try:
        return None if raw is None else load_object(raw, nan_is_null=True)
    except ValueError:  # its answer is an error
        return None


def choices_of(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """The choices of an answer, as receipts have them. outputs: one for each prompt."""
    return [choice_of(each.token_ids, each.logprobs) for output in outputs for each in output.outputs]


def choice_of(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> dict[str, Any]:
    """A choice as receipts have it."""
    return {
        "token_ids": list(token_ids),
        "tokens_sha256": tokens_sha256(token_ids),
        "logprob_bits_sha256": logprob_bits_sha256(logprobs),
    }


@dataclass(frozen=True, slots=True)
class ReceiptLines:
    """Makes the receipts of a run. to: writes a line. covered: what the digest of an answer covers of its line."""

    to: Callable[[bytes], object]
    covered: Callable[[bytes], bytes] = whole_line

    def add(self, answered: Answered) -> None:
        """Write the receipt of an answer."""
        self.to(receipt_line(answered, self.covered(answered.answer)))


@dataclass(slots=True)
class ReceiptFile:
    """The file of receipts of a run: checked before the engine is loaded, continued or begun with the results.

    signer: signs the root; None leaves it unsigned.
    Each receipt is written before its answer, so a killed run has a receipt for every answer. `begin` removes receipts
    whose answer was lost.

    Raises OutputError and OSError.
    """

    path: Path
    mode: Mode
    signer: Signer | None = None
    _file: BinaryIO | None = None
    _sink: Sink | None = None
    _tree: MerkleTree | None = None

    def check(self, others: Sequence[str | None]) -> None:
        """Raise OutputError if the file must not be written. others: the run's other files."""
        if str(self.path) == "-" or is_packed(self.path):
            raise OutputError("receipts are written to a plain file; name one with --receipts FILE.jsonl")
        if any(_same(self.path, other) for other in others):
            raise OutputError(
                f"{self.path} is another file of this run; write the receipts to a file of their own"
            )
        if self.mode is Mode.NEW and self.path.exists() and self.path.stat().st_size:
            raise OutputError(
                f"{self.path} already has receipts; use --resume to continue, or --overwrite to replace them"
            )

    def begin(self, header: Mapping[str, Any], done: FinishedLines) -> ReceiptFile:
        """Write the header, or keep the receipts of the finished lines. Returns this object, to write receipts to."""
        self._tree, kept, old = MerkleTree(), 0, None
        if self.mode in (Mode.RESUME, Mode.RETRY) and self.path.exists():
            old = whole_lines(self.path)
        with replacing(self.path) as file:
            self._sink = Sink(file, packed=False)
            first = next(old, None) if old is not None else None
            if first is not None:
                self._check_header(first, header)
            self._add(dump_line(header) if first is None else first)
            for line in old or ():
                if (number := _number(line)) is not None and done.digest(number) is not None:
                    self._add(line)
                    kept += 1
            if kept != len(done):
                raise OutputError(
                    f"{self.path} has receipts for {kept} of the {len(done)} answers, so they were not all written "
                    "with --receipts; resume without --receipts, or run again with --overwrite"
                )
        self._file = open(self.path, "ab")  # noqa: SIM115, closed by `close`
        self._sink = Sink(self._file, packed=False)
        return self

    def write(self, receipt: bytes) -> None:
        """Write a whole line."""
        self._add(receipt)

    def is_finished(self) -> bool:
        """Whether the file has a root already. Raises OSError."""
        if not self.path.exists():
            return False
        with open(self.path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _FOOTER_BYTES, 0))
            last = file.read().splitlines()[-1:] or [b""]
        return last[0].startswith(b'{"root": ')

    def finish(self, table_sha256: str | None = None) -> None:
        """Write the root. table_sha256: of the bytes of the table that has the results; None for a file of lines."""
        assert self._tree is not None and self._sink is not None
        if table_sha256 is not None:
            self._add(dump_line({TABLE_SHA256: table_sha256}))
        self._sink.write(dump_line(footer_line(self._tree, self.signer)))
        self.close()

    def close(self) -> None:
        """Flush and close the file; idempotent."""
        sink, self._sink = self._sink, None
        file, self._file = self._file, None
        if sink is not None and file is not None:
            sink.close()
            file.close()

    def _add(self, line: bytes) -> None:
        assert self._tree is not None and self._sink is not None
        self._tree.add(line.removesuffix(b"\n"))
        self._sink.write(line)

    def _check_header(self, first: bytes, header: Mapping[str, Any]) -> None:
        try:
            known = json.loads(first)
            same = all(
                known[name] == json.loads(json.dumps(header[name]))
                for name in ("format", "version", "model", "system_fingerprint", "defaults")
            ) and known.get("results") == header.get("results")
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise OutputError(
                f"{self.path} is not the file of receipts of this run: it has another header; name its own file, or "
                "run again with --overwrite"
            )


def merge_receipts(
    paths: Sequence[Path], output: Path, *, signer: Signer | None = None, overwrite: bool = False
) -> int:
    """Write the receipts of shards to one file, in the order of the input, and return their number.

    Each file must be complete; `xla-engine audit` checks the rest. Signatures of the shards are left out.

    Raises OutputError, ResumeError and OSError.
    """
    if output.exists() and not overwrite:
        raise OutputError(f"{output} already exists; use --overwrite to replace it")
    header: dict[str, Any] | None = None
    lines: list[tuple[int, bytes]] = []
    for path in paths:
        first, *rest = [*whole_lines(path)] or [b""]
        mine = _header_of(first, path)
        if header is not None and (other := other_job(header, mine)) is not None:
            raise OutputError(f"{path} has another {other} than {paths[0]}; merge the shards of one job")
        if mine.get("results") == TABLE:
            raise OutputError(
                f"{path} has the receipts of a table; the tables of shards are not merged, so audit each with its own"
            )
        header = mine if header is None else header
        numbered = [(number, line) for line in rest if (number := _number(line)) is not None]
        if len(numbered) != len(rest) - 1:
            raise OutputError(
                f"{path} has no root at its end: its shard is not finished; run it again with --resume"
            )
        lines += numbered
    if header is None:
        raise OutputError("no shard has a line, so there are no receipts to merge")
    lines.sort()
    tree = MerkleTree()
    with replacing(output) as file:
        for line in (dump_line(header), *(line for _, line in lines)):
            tree.add(line.removesuffix(b"\n"))
            file.write(line)
        file.write(dump_line(footer_line(tree, signer)))
    return len(lines)


# Of the headers of shards. The fingerprint has all on which bits depend: with bits "portable", neither the machine
# nor its number of slots.
_SHARED = ("format", "version", "model", "system_fingerprint", "defaults")


def other_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The fields in which two headers differ, if their receipts cannot be in one file; None if they can."""
    return ", ".join(name for name in _SHARED if one[name] != other[name]) or None


def _header_of(line: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["format"] == FORMAT and all(name in header for name in _SHARED):
            return dict(header)
    except (ValueError, KeyError, TypeError):
        pass
    raise OutputError(f"{path} is not a file of receipts: name what `run --receipts` wrote")


def footer_line(tree: MerkleTree, signer: Signer | None = None) -> dict[str, Any]:
    """The last line. lines: the number of those between the header and it."""
    signature = {} if signer is None else signer.fields(tree.root)
    return {"root": tree.root, "lines": tree.count - 1, **signature}


def _same(path: Path, other: str | None) -> bool:
    return other not in (None, "-") and path.resolve() == Path(str(other)).resolve()


def _number(line: bytes) -> int | None:
    """The number of a receipt's input line; None for the footer."""
    try:
        number = json.loads(line).get("line")
    except (ValueError, AttributeError):
        return None
    return number if isinstance(number, int) else None
