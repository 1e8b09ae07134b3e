"""Ed25519 signatures of receipts (RFC 8032), by the package `cryptography`, which the extra `receipts` installs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.errors import ReceiptError
from xla_engine.utils.extras import install

_DOMAIN = b"xla-engine-receipts 1 "  # so that no signature of something else fits


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key. Create one with `openssl genpkey -algorithm ed25519 -out key.pem`."""

    key: Any

    @classmethod
    def read(cls, path: Path | str) -> Signer:
        """Read a key in PEM or OpenSSH's format, without a password. Raises ReceiptError and OSError."""
        data = Path(path).read_bytes()
        crypto = _crypto()
        load = (
            crypto.load_ssh_private_key
            if data.startswith(b"-----BEGIN OPENSSH")
            else crypto.load_pem_private_key
        )
        try:
            key = load(data, password=None)
        except (ValueError, TypeError, crypto.unsupported) as error:
            raise ReceiptError(f"{path} is no private key that can be read here: {error}") from error
        if not isinstance(key, crypto.private):
            raise ReceiptError(
                f"{path} is a key of another kind; make one with `openssl genpkey -algorithm ed25519 -out {path}`"
            )
        return cls(key)

    def fields(self, root: str) -> dict[str, str]:
        """`public_key` and `signature` of the footer with this root, in hex digits."""
        signature = self.key.sign(_DOMAIN + root.encode())
        return {"public_key": self.key.public_key().public_bytes_raw().hex(), "signature": signature.hex()}


def read_public_key(given: str) -> str:
    """A public key as hex digits. given: 64 hex digits, or a file with them, or in PEM or OpenSSH's format.

    Raises ReceiptError and OSError.
    """
    if _HEX.fullmatch(given):
        return given.lower()
    data = Path(given).read_bytes()
    if _HEX.fullmatch(text := data.decode("ascii", "replace").strip()):
        return text.lower()
    crypto = _crypto()
    load = crypto.load_ssh_public_key if data.startswith(b"ssh-") else crypto.load_pem_public_key
    try:
        key = load(data)
    except (ValueError, crypto.unsupported) as error:
        raise ReceiptError(f"{given} is no public key: {error}; give its file, or 64 hex digits") from error
    if not isinstance(key, crypto.public):
        raise ReceiptError(f"{given} is a key of another kind; receipts are signed with Ed25519")
    return str(key.public_bytes_raw().hex())


def why_not_signed(footer: Mapping[str, Any], root: str, public_key: str | None) -> str | None:
    """Why a footer has no valid signature of a root; None if it has one, or needs none.

    public_key: who must have signed it; None for anybody. Raises ReceiptError without the extra.
    """
    by, signature = footer.get("public_key"), footer.get("signature")
    if by is None and signature is None:
        return None if public_key is None else "the receipts are not signed"
    if public_key is not None and by != public_key:
        return f"the receipts are signed by {by}, not by {public_key}"
    if not _FOOTER.fullmatch(f"{by} {signature}"):
        return "public key and signature are not 64 and 128 hex digits in lower case"
    crypto = _crypto()
    try:
        key = crypto.public.from_public_bytes(bytes.fromhex(str(by)))
        key.verify(bytes.fromhex(str(signature)), _DOMAIN + root.encode())
    except (ValueError, crypto.invalid):
        return "the signature is not that of the root"
    return None


_HEX = re.compile(r"[0-9a-fA-F]{64}")
_FOOTER = re.compile(r"[0-9a-f]{64} [0-9a-f]{128}")  # one spelling only, so that every changed byte is found


@dataclass(frozen=True, slots=True)
class _Crypto:
    """What is used of `cryptography`."""

    load_pem_private_key: Any
    load_ssh_private_key: Any
    load_pem_public_key: Any
    load_ssh_public_key: Any
    private: Any
    public: Any
    invalid: type[Exception]
    unsupported: type[Exception]


def _crypto() -> _Crypto:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ReceiptError(f"signatures need the package cryptography: {install('receipts')}") from error
    return _Crypto(
        serialization.load_pem_private_key,
        serialization.load_ssh_private_key,
        serialization.load_pem_public_key,
        serialization.load_ssh_public_key,
        ed25519.Ed25519PrivateKey,
        ed25519.Ed25519PublicKey,
        InvalidSignature,
        UnsupportedAlgorithm,
    )
