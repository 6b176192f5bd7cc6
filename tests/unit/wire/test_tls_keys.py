"""The identities of a cluster: everybody who knows the secret makes the same ones, and nobody else can."""

import hashlib
import ssl

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.unit.wire.streams import SECRET
from torchquorum.cluster.secret import Secret
from torchquorum.errors import SecretError
from torchquorum.wire.tls_keys import connecting_side, identities, listening_side, read_only_form, reader_identity

OTHER = Secret("the-secret-of-another-one-0123456789abcdef")


def test_a_secret_makes_the_same_certificates_on_every_host_with_every_version() -> None:
    """Sides pin the bytes: if these change, tasks of two versions refuse each other as if their secrets differed."""
    found = [hashlib.sha256(identity.pinned).hexdigest()[:16] for identity in identities(SECRET)]
    assert found == ["303690a43fe321b4", "6356ec01a0d662e0"]
    assert identities(Secret("the-secret-of-this-cluster-0123456789abcdef\n")) == identities(SECRET)


def test_sides_and_secrets_have_certificates_and_keys_of_their_own() -> None:
    made = [*identities(SECRET), *identities(OTHER)]
    assert len({identity.pinned for identity in made}) == len({identity.private_key for identity in made}) == 4


def test_certificates_do_not_expire_and_hosts_with_a_wrong_clock_get_in() -> None:
    from cryptography import x509

    for identity in identities(SECRET):
        made = x509.load_pem_x509_certificate(identity.certificate)
        assert made.not_valid_before_utc.year == 1970 and made.not_valid_after_utc.year == 9999


def test_both_sides_demand_tls_1_3_and_the_others_certificate_and_give_no_tickets() -> None:
    server, client = identities(SECRET)
    listening, connecting = listening_side(SECRET), connecting_side(SECRET)
    assert (listening.other, connecting.other) == (client.pinned, server.pinned)
    for side in (listening, connecting):
        assert side.context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert side.context.verify_mode == ssl.CERT_REQUIRED
        assert side.context.cert_store_stats()["x509"] == 1
    assert listening.context.num_tickets == 0


def test_a_read_only_form_has_the_key_of_who_reads_and_no_other() -> None:
    text = read_only_form(SECRET)
    form = Secret(text)
    assert form.is_read_only and not SECRET.is_read_only
    assert reader_identity(form) == reader_identity(SECRET)
    server, client = identities(SECRET)
    assert connecting_side(form).other == server.pinned
    assert listening_side(SECRET, readers=True).reader == reader_identity(SECRET).pinned
    assert listening_side(SECRET).reader == b""
    content = form.read_only_content()
    for key in (server.private_key, client.private_key):
        raw = load_pem_private_key(key, None).private_bytes_raw()  # pyright: ignore
        assert raw not in content
    with pytest.raises(SecretError, match="read-only, and a task that others connect to"):
        listening_side(form)
    with pytest.raises(SecretError, match="read-only already"):
        read_only_form(form)
    with pytest.raises(SecretError, match="damaged"):
        connecting_side(Secret(text[:60]))


def test_an_identity_does_not_show_its_key() -> None:
    for identity in identities(SECRET):
        assert "PRIVATE" in identity.private_key.decode() and repr(identity) == str(identity) == "CertifiedKey(hidden)"
