"""The identities of a cluster, made from its secret: whoever knows the secret can be either side of a connection, no other can.

Used by the TCP transport where there is a secret. Three Ed25519 keys follow from the secret, one for the side that listens, one for the
side that connects and one for who connects only to read, each with a certificate that it signs itself. Every host makes the same bytes, so
each side pins the certificate of the other. The read-only form of a secret has the key of who reads, the certificate of the side that
listens, and nothing that leads to another key. See docs/adr/0019, 0043 and 0059.

What always holds: TLS 1.3 and nothing older; both sides show a certificate; session tickets are not given, so no connection depends on
an older one; no key is ever in a file that has a name.
"""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from torchquorum.cluster.secret import MAKE_READ_ONLY, READ_ONLY, Secret
from torchquorum.errors import SecretError

# A certificate without expiry is said so (RFC 5280, 4.1.2.5); a host whose clock is wrong must get in too.
SEED_BYTES = 32
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
# The listening side shows its public key to whoever connects, who can then try secrets on it at home: 16 MB and some 40 ms each.
_STRETCH = {"n": 1 << 14, "r": 8, "p": 1}


@dataclass(frozen=True)
class CertifiedKey:
    """A certificate, and its private key, which does not show itself."""

    certificate: bytes
    private_key: bytes

    def __repr__(self) -> str:
        return "CertifiedKey(hidden)"

    @property
    def pinned(self) -> bytes:
        """Returns the certificate as it comes over a connection."""
        return ssl.PEM_cert_to_DER_cert(self.certificate.decode())


@dataclass(frozen=True)
class Side:
    """One side of a connection: how it proves itself, and the only certificate that it takes.

    Attributes:
        context: Its own certificate and key.
        other: The certificate that it takes.
        reader: Another one that it takes, of those who may only read; empty if it takes none.
    """

    context: ssl.SSLContext
    other: bytes
    reader: bytes = b""


@lru_cache(maxsize=8)
def _stretched(secret: Secret) -> bytes:
    return hashlib.scrypt(secret.derive("torchquorum/2/tls"), salt=b"torchquorum", dklen=64, **_STRETCH)


def _seed(secret: Secret, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=_stretched(secret), digest_size=SEED_BYTES).digest()


@lru_cache(maxsize=8)
def identities(secret: Secret) -> tuple[CertifiedKey, CertifiedKey]:
    """Returns the identities of the listening and of the connecting side."""
    return _identity(_seed(secret, "server"), "server"), _identity(_seed(secret, "client"), "client")


@lru_cache(maxsize=8)
def reader_identity(secret: Secret) -> CertifiedKey:
    """Returns the identity of who connects only to read; of a secret, or of its read-only form."""
    seed = secret.read_only_content()[:SEED_BYTES] if secret.is_read_only else _seed(secret, "reader")
    return _identity(seed, "reader")


def read_only_form(secret: Secret) -> str:
    """Returns what may be given to those who only read: it holds their key, and the certificate of the listening side.

    Raises:
        SecretError: It is one already.
    """
    if secret.is_read_only:
        raise SecretError("this secret is read-only already; give the cluster's secret to make another from")
    content = _seed(secret, "reader") + identities(secret)[0].pinned
    return READ_ONLY + base64.urlsafe_b64encode(content).decode()


def _identity(seed: bytes, name: str) -> CertifiedKey:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(seed)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"torchquorum {name}")])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_NEVER)
        .sign(private, None)
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return CertifiedKey(
        made.public_bytes(pem),
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    )


@lru_cache(maxsize=8)
def listening_side(secret: Secret, *, readers: bool = False) -> Side:
    """Returns the side that listens; with `readers` it takes those who may only read, too.

    Raises:
        SecretError: This Python cannot do TLS 1.3, or the secret is for reading only.
    """
    if secret.is_read_only:
        raise SecretError(
            "this secret is read-only, and a task that others connect to needs the cluster's secret: give it that --secret-file"
        )
    server, client = identities(secret)
    others = [client, reader_identity(secret)] if readers else [client]
    context = _context(ssl.PROTOCOL_TLS_SERVER, server, [other.certificate.decode() for other in others])
    context.num_tickets = 0
    return Side(context, client.pinned, others[1].pinned if readers else b"")


@lru_cache(maxsize=8)
def connecting_side(secret: Secret) -> Side:
    """Returns the side that connects; with the read-only form of a secret, one that may only read.

    Raises:
        SecretError: This Python cannot do TLS 1.3, or a read-only secret is damaged.
    """
    if secret.is_read_only:
        pinned = secret.read_only_content()[SEED_BYTES:]
        try:
            return Side(
                _context(ssl.PROTOCOL_TLS_CLIENT, reader_identity(secret), [ssl.DER_cert_to_PEM_cert(pinned)]), pinned
            )
        except (ssl.SSLError, ValueError):
            raise SecretError(f"a read-only secret is damaged; {MAKE_READ_ONLY}") from None
    server, client = identities(secret)
    return Side(_context(ssl.PROTOCOL_TLS_CLIENT, client, [server.certificate.decode()]), server.pinned)


def _context(kind: int, mine: CertifiedKey, others: Sequence[str]) -> ssl.SSLContext:
    if not ssl.HAS_TLSv1_3:  # pragma: no cover (a Python that was built with an old OpenSSL)
        raise SecretError(
            f"a secret was given, and {ssl.OPENSSL_VERSION} of this Python cannot do TLS 1.3, so nothing can be encrypted; "
            "use a Python that was built with OpenSSL 1.1.1 or newer"
        )
    context = ssl.SSLContext(kind)
    context.check_hostname = False  # the certificate itself is what is checked
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    held = os.memfd_create("torchquorum", os.MFD_CLOEXEC)  # `ssl` reads keys from files only
    try:
        os.write(held, mine.certificate + mine.private_key)
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    context.load_verify_locations(cadata="".join(others))
    return context
