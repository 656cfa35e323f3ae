"""The certificates of a site: an authority of its own, and what it signs for brokers and for their users.

Needs the package `cryptography`. Keys are elliptic ones (P-256), each made anew with its certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

#: The authority changes seldom, as every certificate changes with it.
AUTHORITY_DAYS = 3650
#: Clocks of hosts differ, and a certificate of the future is refused.
EARLIER = timedelta(hours=1)

Use = Literal["broker", "party"]


class Signed(Struct, frozen=True):
    """A certificate and its key, each in PEM."""

    certificate: bytes
    key: bytes


def read(pem: bytes) -> x509.Certificate:
    """Return the first certificate of a file; raises ValueError if there is none."""
    return x509.load_pem_x509_certificate(pem)


def make_authority(now: datetime) -> Signed:
    """Return a new authority, which signs for itself."""
    key = generate_private_key(SECP256R1())
    # With the time in it, so that an authority and the next one are told apart.
    name = _name(f"authority of a site, {now:%Y-%m-%d %H:%M:%S}")
    made = (
        _builder(name, name, key, now)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _signed(made, key)


def issue(authority: Signed, name: str, use: Use, addresses: Sequence[str], now: datetime, days: float) -> Signed:
    """Return a new certificate for a broker at `addresses`, or for the user `name` of brokers.

    It ends with the authority at the latest. That of a user has its name as an address, too, as strict readers demand
    one; it is of no use to a server.
    """
    issuer, key = read(authority.certificate), generate_private_key(SECP256R1())
    signer = form.load_pem_private_key(authority.key, None)
    assert isinstance(signer, EllipticCurvePrivateKey), "`make_authority` makes no others"
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if use == "broker" else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(_name(name), issuer.subject, key, now)
        .not_valid_after(min(now + timedelta(days=days), issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([_address(each) for each in addresses]), critical=False)
    )
    return _signed(builder.sign(signer, hashes.SHA256()), key)


def why_not(
    found: Signed, authority: bytes, name: str, addresses: Sequence[str], now: datetime, renew_days: float
) -> str:
    """Return why a certificate is to be made anew; empty: it is good for longer than `renew_days`."""
    try:
        certificate = read(found.certificate)
        key = form.load_pem_private_key(found.key, None)
    except ValueError:
        return "it could not be read"
    if certificate.public_key() != key.public_key():
        return "its key was another's"
    try:
        certificate.verify_directly_issued_by(read(authority))
    except (ValueError, InvalidSignature):
        return "the authority is new"
    if certificate.subject != _name(name):
        return "its name was another"
    if _addresses(certificate) != [_address(each) for each in addresses]:
        return "its address is new"
    return expiry(certificate, now, renew_days)


def expiry(certificate: x509.Certificate, now: datetime, renew_days: float) -> str:
    """Return that a certificate has expired, or will within `renew_days`; empty if not."""
    left = certificate.not_valid_after_utc - now
    if left > timedelta(days=renew_days):
        return ""
    return f"it expires in {left.days} days" if left > timedelta(0) else f"it expired on {certificate_end(certificate)}"


def certificate_end(certificate: x509.Certificate) -> str:
    """Return the day on which a certificate ends."""
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _addresses(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """Return what a key may do: sign certificates, or greet the other side of a connection."""
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> Signed:
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return Signed(certificate.public_bytes(form.Encoding.PEM), private)
