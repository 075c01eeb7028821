"""Certificates of a SuperLink and key pairs of SuperNodes, for a federation of one's own."""

from __future__ import annotations

import datetime
import importlib
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparing.errors import UserError


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files, in PEM, that make a SuperLink's connections private and let others know it."""

    authority: Path  # for the SuperLink, the SuperNodes and ``flwr run``
    certificate: Path  # of the server, signed by the authority
    key: Path  # of the server; readable by its owner only


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Files of a SuperNode's key pair, in OpenSSH's format: an elliptic curve of NIST, P-384."""

    private: Path  # readable by its owner only
    public: Path  # for ``flwr supernode register``


def certificates(folder: Path, hosts: Sequence[str], *, days: int = 365) -> Certificates:
    """Make an authority and a server's certificate signed by it; the authority's key is discarded."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    if made.authority.exists() and made.certificate.exists() and made.key.exists() and _is_valid(made.certificate):
        return made
    authority_key, server_key = _new_key(), _new_key()
    authority = _certificate("sparing authority", authority_key, None, authority_key, hosts, days)
    server = _certificate("sparing superlink", server_key, authority, authority_key, hosts, days)
    serialization = _cryptography("hazmat.primitives.serialization")
    pem = serialization.Encoding.PEM
    made.authority.write_bytes(authority.public_bytes(pem))
    made.certificate.write_bytes(server.public_bytes(pem))
    layout, no_encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write_secret(made.key, server_key.private_bytes(pem, layout, no_encryption))
    return made


def node_key(folder: Path, name: str) -> NodeKey:
    """Make the key pair of a SuperNode, or find the one made before: it identifies a returning node."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = NodeKey(folder / name, folder / f"{name}.pub")
    if pair.private.exists() and pair.public.exists():
        return pair
    serialization, key = _cryptography("hazmat.primitives.serialization"), _new_key()
    layout, no_encryption = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write_secret(pair.private, key.private_bytes(serialization.Encoding.PEM, layout, no_encryption))
    public = serialization.PublicFormat.OpenSSH
    pair.public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, public) + b"\n")
    return pair


def _certificate(name: str, key: Any, issuer: Any, signer: Any, hosts: Sequence[str], days: int) -> Any:
    """Build one certificate; without an issuer it signs itself and may sign others."""
    x509, hashes = _cryptography("x509"), _cryptography("hazmat.primitives.hashes")
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of the federation's machines may differ a little.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True)
        .add_extension(key_id, False)
        .add_extension(signer_id, False)
    )
    if issuer is not None:
        names = x509.SubjectAlternativeName([_general_name(x509, host) for host in hosts])
        builder = builder.add_extension(names, False)
    never = ["content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"]
    uses = {"key_cert_sign": issuer is None, "crl_sign": issuer is None, "digital_signature": issuer is not None}
    usage = x509.KeyUsage(**dict.fromkeys([*never, "key_encipherment"], False), **uses)
    builder = builder.add_extension(usage, True)
    return builder.sign(signer, hashes.SHA256())


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_valid(path: Path) -> bool:
    """Return whether a certificate still holds tomorrow."""
    try:
        end = _cryptography("x509").load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError as error:
        raise UserError(str(path), got=str(error), why="it is no certificate", do="delete it") from error
    return bool(end > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1))


def _new_key() -> Any:
    curves = _cryptography("hazmat.primitives.asymmetric.ec")
    return curves.generate_private_key(curves.SECP384R1())


def _write_secret(path: Path, content: bytes) -> None:
    # Created with its mode, not changed to it afterwards: nobody can open it in between.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _cryptography(name: str) -> Any:
    """Import a part of ``cryptography``, which Flower brings."""
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        do = "pip install 'sparing[flower]'"
        why = "Flower brings it"
        raise UserError("federated certificates", got="no package cryptography", why=why, do=do) from error
