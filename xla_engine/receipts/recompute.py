"""Compute answers again, and compare them with what receipts and results say.

The claimed tokens are drafts of the engine's own speculation: a verify step samples every position of an answer as
decode would, from the same seed, masks and penalties, and keeps a draft only if it is what was sampled. So an answer
that holds takes a few wide steps, whatever the request asks for, and the line that comes out must be the line of the
result file. Where this engine cannot speculate, the answers are generated again, which takes longer.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.receipts import Answered, arithmetic_class, receipts_header
from xla_engine.batch.run import BatchRun
from xla_engine.batch.submit import whole_request
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import logprob_bits_sha256
from xla_engine.engine.requests.sequence import sequence_ids
from xla_engine.errors import ConfigError, ReceiptError
from xla_engine.openai.requests import LineRequest, parse_line
from xla_engine.openai.results import ResultHeader
from xla_engine.outputs import RequestOutput
from xla_engine.receipts.claimed import ClaimedAnswers
from xla_engine.receipts.files import CheckedFiles, Claim, check_files
from xla_engine.receipts.report import AuditReport, Objection
from xla_engine.receipts.requests import Asked
from xla_engine.utils.comparison import Difference, first_difference
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.shown import shown

DRAFTS = {"method": "ngram", "num_speculative_tokens": 15}  # the widest; the proposer is replaced
# Options that change answers. An audit takes them from the receipts.
ANSWER_OPTIONS = (
    *(
        "seed",
        "max_model_len",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "bits",
        "logprobs_mode",
        "enable_dry",
    ),
    *("generation_config", "runner", "pooler_config", "hf_overrides", "mm_processor_kwargs", "enable_lora"),
    "max_lora_rank",
)
_GIVE = "give it, with --model on the command line"
FORM = ("dtype", "quantization", "kv_cache_dtype")  # those by which another model may be run
# Errors that depend on more than the request: on time, hosts, files and other lines.
_CHANCE = frozenset(
    [
        *(
            "deadline",
            "queue_timeout",
            "aborted",
            "engine_error",
            "engine_fault",
            "device_gone",
            "engine_closed",
        ),
        *("invalid_image", "image_too_large", "image_not_allowed", "image_unreachable"),
        *("line_too_long", "invalid_row", "duplicate_custom_id"),
    ]
)


def made_with(header: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `EngineConfig` with which an engine gives the answers of these receipts.

    Without the C++ kernels, bits also depend on the sizes of programs, so all fields are those of the receipts.
    """
    config, platform = header["config"], header["arithmetic"]["platform"]
    known = EngineConfig.__dataclass_fields__
    names: Iterable[str] = ANSWER_OPTIONS
    if "arithmetic" not in platform and platform.get("linear") != "native":
        names = known
    found = {name: config[name] for name in names if name in config and name in known}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def chosen(files: CheckedFiles, share: float | None, seed: int) -> list[Claim]:
    """The claims to compute again: all, or a random share of them, at least one."""
    claims = list(files.claims.values())
    if share is None or share >= 1 or not claims:
        return claims
    count = max(-(-len(claims) * share // 1), 1)
    return sorted(random.Random(seed).sample(claims, int(count)), key=lambda each: each.line)


def why_not_here(engine: XlaBatchEngine, header: Mapping[str, Any]) -> str | None:
    """Why this engine cannot give the bits of the engine that wrote the receipts; None if it should."""
    identity = engine.identity()
    theirs, ours = header["arithmetic"], arithmetic_class(identity.platform)
    if theirs.get("class") != ours:
        if "portable" in str(theirs.get("class")) or "portable" in ours:
            remedy = f"add --bits {'portable' if 'portable' in str(theirs.get('class')) else 'machine'}"
        elif "xla/xla" in str(theirs.get("class")):
            remedy = "add --isa none, on a machine of the same kind; or generate with the C++ kernels"
        elif str(theirs.get("class")).endswith("fixed-order"):
            remedy = "add --isa avx512_bf16 or avx2, or audit on a CPU with the C++ kernels"
        else:
            remedy = (
                "audit on a machine of the same kind, or generate with --bits portable, which every CPU with AVX2, "
                "AVX-512 or NEON can audit"
            )
        return f"the answers were made with the arithmetic {theirs.get('class')!r}, and this is {ours!r}: {remedy}"
    named, here = header["config"].get("adapters") or {}, identity.config.get("adapters") or {}
    if named != here:
        names = ", ".join(sorted(named)) or "none"
        return f"the answers were made with the adapters {names}: add --enable-lora --lora-modules NAME=PATH for each"
    return None


def other_model(engine: XlaBatchEngine, header: Mapping[str, Any]) -> str | None:
    """How this engine's model differs from the one that the receipts name; None if it is the same."""
    plain = ResultHeader(created=0, model="")
    claimed, mine = header["model"], receipts_header(engine, plain, {})
    for name in ("weights_sha256", "tokenizer_sha256", "chat_template_sha256"):
        if claimed.get(name) != mine["model"][name]:
            return f"{name} of the model is {mine['model'][name]}, in the receipts {claimed.get(name)}"
    for name in ("quantization", "kv_cache_dtype"):
        if header["config"].get(name) != mine["config"].get(name):
            return f"{name} is {mine['config'].get(name)}, in the receipts {header['config'].get(name)}"
    if header["arithmetic"].get("dtype") != mine["arithmetic"]["dtype"]:
        return f"dtype is {mine['arithmetic']['dtype']}, in the receipts {header['arithmetic'].get('dtype')}"
    return None


def other_versions(engine: XlaBatchEngine, header: Mapping[str, Any]) -> str | None:
    """Versions that differ from those of the receipts, if bits may depend on them; None if there are none."""
    mine, theirs = engine.identity().platform, header["arithmetic"]["platform"]
    names = [name for name in ("jax", "jaxlib", "device") if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {mine.get(name)}, not {theirs.get(name)}" for name in names) or None


Loader = Callable[[dict[str, Any]], AbstractContextManager[XlaBatchEngine]]


def audit_files(
    results: Path | str,
    receipts: Path | str,
    load: Loader,
    *,
    demanded: Collection[str] = (),
    public_key: str | None = None,
    requests: Asked | None = None,
    sample: float | None = None,
    sample_seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditReport:
    """Check two files against each other, and compute the answers, or a sample of them, again.

    load: opens an engine with the given fields of `EngineConfig`, and others of the caller's choice.
    demanded: fields and "model", if the caller chose them: receipts that say otherwise are rejected.
    public_key: who must have signed the receipts, as in `check_files`; None for anybody, or nobody.
    requests: what was to run; None accepts what the receipts say.
    sample: the share of answers to compute again; None for all. sample_seed: of the choice; None for a random one.

    Raises ReceiptError, OSError, and what `load` raises.
    """
    files = check_files(results, receipts, public_key, requests)
    header = files.header
    seed = secrets.randbits(63) if sample_seed is None else sample_seed
    claims = chosen(files, sample, seed)
    report = files.report()
    report.sample_seed = None if sample is None else seed
    report.config = ", ".join(
        f"{name} {header['config'].get(name)}" for name in FORM if header["config"].get(name)
    )
    if not any(map(_can_run, claims)):
        return report
    fields = {name: value for name, value in made_with(header).items() if name not in demanded}
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(_loaded(load, fields))
        except ConfigError as error:
            if not report.rejected and "model" in demanded:
                raise
            note = f"no answer was computed again: {error}"
            if "model" not in demanded:  # the form of one model may be none of another
                note = f"the receipts are of the model {report.model!r}, and this one cannot run as theirs; {_GIVE}"
            if report.rejected:
                report.notes.append(note)
            else:
                report.unchecked.append(Objection(None, note))
            return report
        other, why = other_model(engine, header), why_not_here(engine, header)
        if other is not None and not {"model", *FORM}.isdisjoint(demanded):
            report.rejected += [
                Objection(claim.custom_id, f"made with another model: {other}") for claim in claims
            ]
        elif other is not None:
            report.unchecked.append(
                Objection(None, f"{other}: the receipts call the model {report.model!r}; {_GIVE}")
            )
        elif why is not None:
            report.unchecked.append(Objection(None, why))
        else:
            audit(engine, header, claims, report, progress)
    return report


@contextmanager
def _loaded(load: Loader, fields: dict[str, Any]) -> Iterator[XlaBatchEngine]:
    """An engine that verifies drafts; if that would change bits here, one that generates."""
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(load({**fields, "speculative_config": DRAFTS}))
        except ConfigError:
            engine = stack.enter_context(load({**fields, "speculative_config": None}))
        yield engine


def audit(
    engine: XlaBatchEngine,
    header: Mapping[str, Any],
    claims: Sequence[Claim],
    report: AuditReport,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compute claims again in an engine made with `made_with`, and add the outcome to a report.

    progress: called with the number of answers done.
    """
    drafts = ClaimedAnswers()
    report.method = "regeneration"
    if engine.config.speculation is not None:
        engine.draft_with(drafts)
        report.method = "prefill"
    versions = other_versions(engine, header)
    compared = _Compared(engine, drafts, report, versions, progress)
    run = BatchRun(
        engine,
        compared.lines(filter(_can_run, claims), header["defaults"]),
        _Nowhere(),
        receipts=compared.compare,
        header=ResultHeader(
            created=header["created"],
            model=str(header["model"].get("name")),
            system_fingerprint=header["system_fingerprint"],
            hashes=bool(header.get("hashes")),
            tokenizer=engine.tokenizer,
            labels=engine.validator.labels,
        ),
        defaults=header["defaults"],
        on_turn=compared.stop_different,
    )
    totals = run.run()
    if totals.failure is not None:
        raise ReceiptError(f"the engine stopped: {totals.failure}") from totals.failure
    if totals.interrupted:
        raise KeyboardInterrupt
    order = {claim.custom_id: place for place, claim in enumerate(claims)}
    for found in (report.rejected, report.unchecked):
        found.sort(key=lambda each: order.get(each.custom_id or "", -1))
    report.notes += [f"({versions}: their bits were expected to be the same)"] if versions else []


def _can_run(claim: Claim) -> bool:
    """Whether the answer depends on its request alone, and the receipt has the request."""
    return claim.receipt["request"] is not None and claim.receipt["error"] not in _CHANCE


class _Nowhere:
    """Discards the output lines of a run: an audit compares each answer when its receipt is made."""

    def write(self, data: bytes) -> None:
        pass


class _Compared:
    """Takes answers that are computed again, and compares them with the claims."""

    def __init__(
        self,
        engine: XlaBatchEngine,
        drafts: ClaimedAnswers,
        report: AuditReport,
        versions: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._engine, self._drafts, self._report = engine, drafts, report
        self._versions, self._progress = versions, progress
        self._live: dict[int, tuple[Claim, list[str]]] = {}  # by line, with the names of the sequences
        self._stopped: set[str] = set()

    def lines(self, claims: Iterable[Claim], defaults: Mapping[str, Any]) -> Iterator[Line]:
        """The lines of the claims. Each is drafted from here on."""
        for claim in claims:
            raw = dump_line(claim.receipt["request"]).removesuffix(b"\n")
            names = _sequences(claim.line, raw, defaults)
            for name, choice in zip(names, claim.receipt["choices"], strict=False):
                self._drafts.claim(name, choice["token_ids"])
            self._live[claim.line] = claim, names
            yield Line(claim.line, len(raw), raw)

    def stop_different(self) -> None:
        """Abort the requests that have left their claims: nothing more is to be learned from them."""
        for name in self._drafts.different.keys() - self._stopped:
            self._stopped.add(name)
            self._engine.abort(whole_request(name))

    def compare(self, answered: Answered) -> None:
        """Compare an answer with its claim."""
        report, outputs, error = self._report, answered.outputs, answered.error
        claim, names = self._live.pop(answered.line)
        report.checked += 1
        report.tokens += sum(len(choice["token_ids"]) for choice in claim.receipt["choices"])
        left = next(
            (
                (at, self._drafts.different[name])
                for at, name in enumerate(names)
                if name in self._drafts.different
            ),
            None,
        )
        why = self._why(claim, answered.answer, outputs, error) if left is None else self._token(*left)
        if why is not None:
            unsure = left is None and error in _CHANCE
            if self._versions is not None:
                unsure, why = (
                    True,
                    f"{why} ({self._versions}; answers made with --bits portable can be checked)",
                )
            (report.unchecked if unsure else report.rejected).append(Objection(claim.custom_id, why))
        for name in names:
            self._drafts.forget(name)
            self._stopped.discard(name)
        if self._progress is not None:
            self._progress(report.checked)

    def _why(
        self, claim: Claim, line: bytes, outputs: Sequence[RequestOutput], error: str | None
    ) -> str | None:
        """Why an answer is not that of its request; None if it is. line: that of the request."""
        claimed = claim.receipt
        if error != claimed["error"]:
            if error is None:
                return f"it has the error {claimed['error']}, where the model gives an answer"
            return f"it should be the error {error}: {json.loads(line)['error']['message']}"
        mine = [each for output in outputs for each in output.outputs]
        if len(mine) != len(claimed["choices"]):
            return f"it has {len(claimed['choices'])} choices in its receipt, not {len(mine)}"
        for at, (old, new) in enumerate(zip(claimed["choices"], mine, strict=True)):
            if (found := first_difference(old["token_ids"], new.token_ids)) is not None:
                return self._token(at, found)
            if old["logprob_bits_sha256"] != logprob_bits_sha256(new.logprobs):
                return (
                    self._logprob(claim, line) or f"choice {at}: its tokens have other log-probability bits"
                )
        if claim.answer is None or _is_the_same(claim, line):
            return None
        different = _path(_comparable(claim.answer), _comparable(json.loads(line)))
        return None if different is None else f"the answer differs: {different}"

    @staticmethod
    def _logprob(claim: Claim, line: bytes) -> str | None:
        """Where log-probabilities in the answers differ, if they have them."""
        if claim.answer is None:
            return None
        return _path(_comparable(claim.answer), _comparable(json.loads(line)))

    def _token(self, choice: int, difference: Difference[int]) -> str:
        where = f"choice {choice}, token {difference.position}"
        claimed, sampled = difference.expected, difference.found
        if claimed is None:
            return f"{where}: the answer ends, where the model goes on with {self._named(sampled)}"
        if sampled is None:
            return f"{where}: {self._named(claimed)}, where the answer has ended"
        return f"{where}: {self._named(claimed)}, where the model gives {self._named(sampled)}"

    def _named(self, token: int | None) -> str:
        tokenizer = self._engine.tokenizer
        if tokenizer is None or token is None or token >= self._engine.validator.vocab_size:
            return str(token)
        return f"{token} {tokenizer.token_bytes(token).decode(errors='replace')!r}"


def _sequences(line: int, raw: bytes, defaults: Mapping[str, Any]) -> list[str]:
    """The names of the sequences in which a run generates the answer to a line, by choice."""
    request = parse_line(raw, line, defaults)
    if not isinstance(request, LineRequest) or request.pooling is not None or not request.generates:
        return []
    prompts = (f"batch-{line}" + (f"-{index}" if index else "") for index in range(len(request.prompts)))
    return [name for prompt in prompts for name in sequence_ids(prompt, request.params.n)]


def _is_the_same(claim: Claim, line: bytes) -> bool:
    """Whether an output line has the claimed digest, with the claimed id, which depends on the input line's bytes."""
    assert claim.answer is not None
    known = dump_line({"id": claim.answer.get("id")})[:-2]  # up to the brace
    _, comma, rest = line.partition(b", ")
    return (
        hashlib.sha256(known + comma + rest.removesuffix(b"\n")).hexdigest() == claim.receipt["answer_sha256"]
    )


def _comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """An output line without what does not depend on the request: the hash of the input line's bytes, the time, and
    how many tokens were cached and drafted."""
    found = {name: record.get(name) for name in ("custom_id", "response", "error")}
    response = found["response"]
    body = response.get("body") if isinstance(response, dict) else None
    usage = body.get("usage") if isinstance(body, dict) else None
    if isinstance(response, dict) and isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in ("created", "created_at")}
        if isinstance(usage, dict):
            body["usage"] = {name: value for name, value in usage.items() if not name.endswith("_details")}
        found["response"] = {**response, "body": body}
    return found


def _path(claimed: object, mine: object, place: str = "") -> str | None:
    """The first place where two JSON values differ, with both values; None if they are equal."""
    if isinstance(claimed, dict) and isinstance(mine, dict):
        for name in dict.fromkeys((*mine, *claimed)):
            below = f"{place}.{name}".removeprefix(".")
            if (name in mine) != (name in claimed):
                return f"{below} is {'missing' if name in mine else 'not in the answer of the model'}"
            if (found := _path(claimed[name], mine[name], below)) is not None:
                return found
        return None
    if isinstance(claimed, list) and isinstance(mine, list) and len(claimed) == len(mine):
        pairs = zip(claimed, mine, strict=True)
        paths = (_path(one, other, f"{place}[{at}]") for at, (one, other) in enumerate(pairs))
        return next((each for each in paths if each is not None), None)
    if type(claimed) is type(mine) and claimed == mine:
        return None
    return f"{place} is {shown(claimed)}, where the model gives {shown(mine)}"
