"""Signed receipts: whose key it was, and what a signature covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

from tests.support.fake_engine import FakeEngine
from tests.support.receipts import Job, run, write
from xla_engine.batch.signatures import Signer, read_public_key
from xla_engine.errors import ReceiptError
from xla_engine.receipts.files import check_files

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    lines = [{"custom_id": f"c{number}", "prompt": f"p{number}"} for number in range(3)]
    return run(FakeEngine(), lines, tmp_path, signer=Signer(_KEY))  # type: ignore[arg-type]


def test_the_signature_is_that_of_the_key(job: Job) -> None:
    files = check_files(job.results, job.receipts, _PUBLIC)
    assert files.rejected == [] and files.signed_by == _PUBLIC
    other = check_files(job.results, job.receipts, "0" * 64)
    assert "signed by" in other.rejected[0].why and other.signed_by is None


def test_receipts_that_were_changed_or_are_not_signed_are_rejected(job: Job) -> None:
    footer = job.read()[1][-1]
    answers, (header, *receipts, _) = job.read()
    write(job, answers[:2], [header, *receipts[:2]])  # a whole file, with its own root, and unsigned
    assert not check_files(job.results, job.receipts).rejected
    found = check_files(job.results, job.receipts, _PUBLIC)
    assert [each.why for each in found.rejected] == ["the receipts are not signed"]
    whole = job.receipts.read_text().splitlines(keepends=True)
    signature = f', "public_key": "{footer["public_key"]}", "signature": "{footer["signature"]}"}}\n'
    job.receipts.write_text("".join(whole[:-1]) + whole[-1].replace("}\n", signature))
    found = check_files(job.results, job.receipts)
    assert [each.why for each in found.rejected] == ["the signature is not that of the root"]


def test_keys_are_read_from_their_usual_files(tmp_path: Path) -> None:
    raw = serialization.NoEncryption()
    private, public = tmp_path / "key", tmp_path / "key.pub"
    for form, encoding, public_form in (
        (serialization.PrivateFormat.PKCS8, "PEM", (serialization.Encoding.PEM, "SubjectPublicKeyInfo")),
        (serialization.PrivateFormat.OpenSSH, "PEM", (serialization.Encoding.OpenSSH, "OpenSSH")),
    ):
        private.write_bytes(_KEY.private_bytes(getattr(serialization.Encoding, encoding), form, raw))
        of_public = getattr(serialization.PublicFormat, public_form[1])
        public.write_bytes(_KEY.public_key().public_bytes(public_form[0], of_public))
        assert Signer.read(private).fields("r")["public_key"] == read_public_key(str(public)) == _PUBLIC
    public.write_text(_PUBLIC.upper() + "\n")
    assert read_public_key(str(public)) == read_public_key(_PUBLIC) == _PUBLIC
    other = x25519.X25519PrivateKey.generate()
    private.write_bytes(
        other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, raw)
    )
    with pytest.raises(ReceiptError, match="another kind"):
        Signer.read(private)
    private.write_text("no key")
    with pytest.raises(ReceiptError, match="no private key"):
        Signer.read(private)
    with pytest.raises(ReceiptError, match="no public key"):
        read_public_key(str(private))
