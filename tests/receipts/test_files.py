"""Files of receipts by themselves: the root, and what `check_files` finds without a model."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.support.fake_engine import FakeEngine
from tests.support.receipts import Job, run, write
from tests.support.tiers import default
from xla_engine.batch.receipts import MerkleTree, canonical
from xla_engine.batch.signatures import Signer
from xla_engine.errors import ReceiptError
from xla_engine.receipts.files import check_files
from xla_engine.receipts.requests import Asked


def _root(lines: Sequence[bytes]) -> bytes:
    """RFC 6962, section 2.1, word by word."""
    if not lines:
        return hashlib.sha256(b"").digest()
    if len(lines) == 1:
        return hashlib.sha256(b"\0" + lines[0]).digest()
    k = 1 << (len(lines) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + _root(lines[:k]) + _root(lines[k:])).digest()


def test_the_root_is_that_of_rfc_6962() -> None:
    tree, lines = MerkleTree(), []
    for number in range(70):
        assert tree.root == _root(lines).hex()
        lines.append(b"%d" % number)
        tree.add(lines[-1])


def test_canonical_json() -> None:
    assert canonical({"b": [1.5, "\u00e9"], "a": None}) == b'{"a":null,"b":[1.5,"\\u00e9"]}'


@pytest.fixture
def job(tmp_path: Path) -> Job:
    lines = [{"custom_id": f"c{number}", "prompt": f"p{number}"} for number in range(3)]
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    return run(FakeEngine(), lines, tmp_path, signer=Signer(key))  # type: ignore[arg-type]


def names(job: Job) -> set[str | None]:
    return {each.custom_id for each in check_files(job.results, job.receipts).rejected}


def test_requests_are_those_of_the_input(job: Job, tmp_path: Path) -> None:
    """In any spelling of the same JSON, packed or not, with blank lines where they were."""
    source = tmp_path / "in.jsonl"
    lines = [f'{{"prompt": "p{number}",  "custom_id": "c{number}"}}' for number in range(3)]

    def found(*changed: str) -> list[tuple[str | None, str]]:
        source.write_text("\n".join(changed))
        with gzip.open(tmp_path / "in.jsonl.gz", "wb") as packed:
            packed.write(source.read_bytes())
        plain, unpacked = (
            [
                (each.custom_id, each.why.replace(str(path), "in"))
                for each in check_files(job.results, job.receipts, None, Asked(path=path)).rejected
            ]
            for path in (source, tmp_path / "in.jsonl.gz")
        )
        assert plain == unpacked
        return plain

    assert found(*lines) == []
    other = lines[1].replace("p1", "p2")
    assert found(lines[0], other, lines[2]) == [("c1", "the request is not that of line 2 of in")]
    assert found(*lines[:2]) == [("c2", "in has no line 3")]
    assert found(*lines, lines[0]) == [(None, "line 4 of in has no receipt")]
    assert found(lines[0], "", *lines[1:]) == [
        ("c2", "the request is not that of line 3 of in"),
        (None, "line 4 of in has no receipt"),
        ("c1", "in has no line 2"),
    ]


def test_an_untouched_job_has_no_fault(job: Job) -> None:
    files = check_files(job.results, job.receipts)
    assert files.rejected == [] and len(files.claims) == 3 and files.root == files.footer["root"]


@pytest.mark.parametrize("which", ["results", "receipts"])
@pytest.mark.parametrize("step", default([37, 2]))
def test_every_flipped_byte_is_found(job: Job, which: str, step: int) -> None:
    """Of every byte one bit, another one at each place; of a letter the case, since hex digits have two."""
    path: Path = getattr(job, which)
    whole, draw = path.read_bytes(), random.Random(0)
    for place in range(0, len(whole), step):
        changed = bytearray(whole)
        changed[place] ^= 32 if chr(whole[place]) in "abcdef" else 1 << draw.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(ReceiptError):  # the header cannot be read
            assert names(job), f"byte {place} of {which}: {whole[max(place - 20, 0) : place + 20]!r}"


def test_every_cut_is_found(job: Job) -> None:
    for path in (job.results, job.receipts):
        whole = path.read_bytes()
        for end in range(0, len(whole), 41):
            path.write_bytes(whole[:end])
            try:
                assert names(job)
            except ReceiptError:
                assert path == job.receipts
        path.write_bytes(whole)
    assert not names(job)


def test_lines_left_out_doubled_and_added_are_named(job: Job) -> None:
    answers, (header, *receipts, _) = job.read()
    write(job, answers[1:], [header, *receipts])
    assert names(job) == {answers[0]["custom_id"]}
    write(job, [*answers, answers[2]], [header, *receipts])
    assert names(job) == {answers[2]["custom_id"]}
    write(job, answers, [header, *receipts[1:]])
    assert names(job) == {receipts[0]["custom_id"]}
    write(job, answers, [header, *receipts, receipts[1]])
    assert names(job) == {receipts[1]["custom_id"]}
    again = {**receipts[1], "line": 9}  # the line was run again as another line, and the better answer kept
    write(job, [*answers, {**answers[1], "id": "batch_req_9_" + "0" * 16}], [header, *receipts, again])
    assert receipts[1]["custom_id"] in names(job)


def test_changed_answers_are_named(job: Job) -> None:
    answers, (header, *receipts, _) = job.read()
    one, other = (answer["response"]["body"]["choices"][0] for answer in answers[:2])
    one["text"], other["text"] = other["text"], one["text"]
    write(job, answers, [header, *receipts])
    assert names(job) == {answers[0]["custom_id"], answers[1]["custom_id"]}


def test_a_trimmed_prompt_in_a_receipt_is_named(job: Job) -> None:
    answers, (header, *receipts, _) = job.read()
    receipts[0]["request"]["prompt"] = "p"
    write(job, answers, [header, *receipts])
    assert names(job) == {receipts[0]["custom_id"]}


def test_another_format_or_version_is_refused(job: Job) -> None:
    answers, (header, *receipts, _) = job.read()
    write(job, answers, [{**header, "version": 2}, *receipts])
    with pytest.raises(ReceiptError, match="version 2"):
        check_files(job.results, job.receipts)
    job.receipts.write_text(json.dumps({"prompt": "x"}) + "\n")
    with pytest.raises(ReceiptError, match="not a file of receipts"):
        check_files(job.results, job.receipts)
