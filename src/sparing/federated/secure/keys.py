"""Keys between two clients, streams of mask bytes, and sealed shares; the primitives are those of ``cryptography``."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from sparing.errors import UserError

PUBLIC, SEALED, SIGNATURE = 32, 16, 64
"""Bytes of a public key, what sealing adds, and those of a signature."""


def new_private() -> bytes:
    """Return a fresh X25519 private key."""
    private: bytes = _part("primitives.asymmetric.x25519").X25519PrivateKey.generate().private_bytes_raw()
    return private


def public_of(private: bytes) -> bytes:
    """Return the public key that belongs to a private one."""
    key = _part("primitives.asymmetric.x25519").X25519PrivateKey.from_private_bytes(private)
    public: bytes = key.public_key().public_bytes_raw()
    return public


def agree(private: bytes, public: bytes, label: bytes) -> bytes:
    """Return the 32 bytes that two key pairs share, for one purpose: X25519, then HKDF with SHA-256."""
    x25519 = _part("primitives.asymmetric.x25519")
    theirs = x25519.X25519PublicKey.from_public_bytes(public)
    shared = x25519.X25519PrivateKey.from_private_bytes(private).exchange(theirs)
    hashes, hkdf = _part("primitives.hashes"), _part("primitives.kdf.hkdf")
    key: bytes = hkdf.HKDF(hashes.SHA256(), 32, None, b"sparing secure sum, " + label).derive(shared)
    return key


def mask_bytes(key: bytes, count: int) -> bytes:
    """Return the ChaCha20 stream of a key; each key is for one stream, so the nonce is zero."""
    ciphers = _part("primitives.ciphers")
    cipher = ciphers.Cipher(_part("primitives.ciphers.algorithms").ChaCha20(key, bytes(16)), mode=None)
    stream: bytes = cipher.encryptor().update(bytes(count))
    return stream


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate by ChaCha20-Poly1305; each key is for one text, so the nonce is zero."""
    sealed: bytes = _part("primitives.ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), text, about)
    return sealed


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Read what ``seal`` wrote; ``ValueError`` if it is not of this key, text and purpose."""
    try:
        text: bytes = _part("primitives.ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except _part("").exceptions.InvalidTag:
        raise ValueError("a sealed share was changed on its way, or is another client's") from None
    return text


def new_identity() -> bytes:
    """Return a fresh Ed25519 private key."""
    private: bytes = _part("primitives.asymmetric.ed25519").Ed25519PrivateKey.generate().private_bytes_raw()
    return private


def identity_of(private: bytes) -> bytes:
    """Return the public key that belongs to an Ed25519 private one."""
    key = _part("primitives.asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(private)
    public: bytes = key.public_key().public_bytes_raw()
    return public


def sign(private: bytes, text: bytes) -> bytes:
    """Return the Ed25519 signature of a text, the same whenever it is made."""
    signature: bytes = _part("primitives.asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(private).sign(text)
    return signature


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature is of this key and text."""
    try:
        _part("primitives.asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except _part("").exceptions.InvalidSignature:
        return False
    return True


@functools.cache
def _part(name: str) -> Any:
    """Import a module of ``cryptography``, which is an extra."""
    try:
        importlib.import_module("cryptography.exceptions")
        return importlib.import_module(f"cryptography.hazmat.{name}" if name else "cryptography")
    except ImportError as error:
        why = "cryptography is an extra of sparing"
        raise UserError("secure aggregation", got=str(error), why=why, do="pip install 'sparing[secure]'") from error
