"""The identities of a cluster, made from its secret: whoever knows the secret can be either side of a connection, no other can.

Used by the TCP transport where there is a secret. Two Ed25519 keys follow from the secret, one for the side that listens and one for the
side that connects, each with a certificate that it signs itself. Every host makes the same bytes, so each side pins the certificate
of the other. See docs/adr/0019 and 0043.

What always holds: TLS 1.3 and nothing older; both sides show a certificate; session tickets are not given, so no connection depends on
an older one; no key is ever in a file that has a name.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from torchquorum.cluster.secret import Secret
from torchquorum.errors import SecretError

# A certificate without expiry is said so (RFC 5280, 4.1.2.5); a host whose clock is wrong must get in too.
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
    """One side of a connection: how it proves itself, and the only certificate that it takes."""

    context: ssl.SSLContext
    other: bytes


@lru_cache(maxsize=8)
def identities(secret: Secret) -> tuple[CertifiedKey, CertifiedKey]:
    """Returns the identities of the listening and of the connecting side."""
    key = hashlib.scrypt(secret.derive("torchquorum/2/tls"), salt=b"torchquorum", dklen=64, **_STRETCH)
    return _identity(key, "server"), _identity(key, "client")


def _identity(key: bytes, name: str) -> CertifiedKey:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hashlib.blake2b(name.encode(), key=key, digest_size=32).digest()
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
def listening_side(secret: Secret) -> Side:
    """Returns the side that listens.

    Raises:
        SecretError: This Python cannot do TLS 1.3.
    """
    server, client = identities(secret)
    context = _context(ssl.PROTOCOL_TLS_SERVER, server, client)
    context.num_tickets = 0
    return Side(context, client.pinned)


@lru_cache(maxsize=8)
def connecting_side(secret: Secret) -> Side:
    """Returns the side that connects.

    Raises:
        SecretError: This Python cannot do TLS 1.3.
    """
    server, client = identities(secret)
    return Side(_context(ssl.PROTOCOL_TLS_CLIENT, client, server), server.pinned)


def _context(kind: int, mine: CertifiedKey, other: CertifiedKey) -> ssl.SSLContext:
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
    context.load_verify_locations(cadata=other.certificate.decode())
    return context
