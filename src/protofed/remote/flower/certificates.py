"""Keys and certificates of a federation: its own authority, the server's certificate, a key pair for each client."""

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protofed.errors import UserError

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # what clients commonly accept at most
BACK = datetime.timedelta(days=1)  # a clock that is a little behind is no reason to refuse


class Pair(NamedTuple):
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str) -> Pair:
    """A new authority, which signs nothing but servers of this federation."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority"[:64])])
    builder = (
        _builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pem(builder.sign(key, hashes.SHA384()), key)


def make_server(authority: Pair, hosts: Sequence[str], days: float = SERVER_DAYS, begin: float = 0) -> Pair:
    """A server's certificate for names and addresses, valid from `begin` days hence for `days`."""
    parent = x509.load_pem_x509_certificate(authority.certificate)
    parent_key = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(parent_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    identifier = parent.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(subject, parent.subject, key, days, begin)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
    )  # fmt: skip
    return _pem(builder.sign(parent_key, hashes.SHA384()), key)


def make_inner(folder: Path) -> tuple[Path, Path, Path]:
    """For TLS between processes of this machine: a fresh authority, certificate and key, which nobody else has."""
    authority = make_authority("loopback")
    made = make_server(authority, ["127.0.0.1", "localhost"], AUTHORITY_DAYS - 1)
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "inner-ca.crt", folder / "inner.crt", folder / "inner.key")
    for path, content in zip(paths, (authority.certificate, made.certificate, made.key), strict=True):
        write_private(path, content)
    return paths


def make_client_key() -> Pair:
    """A client's key pair as Flower wants it: EC P-384 in OpenSSH's form (`certificate` is the public key)."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Pair(public + b"\n", private)


def hosts_of(certificate: bytes) -> list[str]:
    """The names and addresses that a server's certificate is for."""
    names = x509.load_pem_x509_certificate(certificate).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def days_left(certificate: bytes) -> float:
    """Until it expires; negative when it has."""
    end: datetime.datetime = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - _now()).total_seconds() / 86400


def check_server(folder: Path) -> float:
    """Days that the certificate in a server's folder is still valid; a UserError where it cannot be used."""
    try:
        left = days_left((folder / "server.crt").read_bytes())
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            folder / "server.crt", folder / "server.key"
        )
    except OSError as error:  # ssl.SSLError is one
        raise UserError(
            f"{folder}/server.crt and server.key cannot be used ({error}). Make new ones with "
            f"'protofed federation renew {folder}'."
        ) from None
    except ValueError as error:
        raise UserError(f"{folder}/server.crt is not a certificate ({error}). Restore it from a back-up.") from None
    if left <= 0:
        raise UserError(
            f"the server's certificate {folder}/server.crt expired {-left:.1f} days ago. Make a new one with "
            f"'protofed federation renew {folder}'."
        )
    return left


def renew(folder: Path, hosts: Sequence[str] | None = None) -> list[str]:
    """A new server certificate from the same authority, for the same names unless told others; clients need nothing."""
    try:
        authority = Pair((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())
        names = list(hosts or hosts_of((folder / "server.crt").read_bytes()))
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}). Name the server's folder; ca.key may have been moved "
            "to a safe place: bring it back for the renewal."
        ) from None
    if days_left(authority.certificate) <= 0:
        raise UserError(
            f"the authority {folder}/ca.crt has expired. Set up the federation again: every client needs the new one."
        )
    made = make_server(authority, names)
    write_private(folder / "server.key", made.key)
    write_private(folder / "server.crt", made.certificate)
    return names


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner may read, whole or not at all."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    scratch.write_bytes(content)
    scratch.replace(path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float, begin: float = 0
) -> x509.CertificateBuilder:
    start = _now() + datetime.timedelta(days=begin) - (BACK if begin == 0 else datetime.timedelta())
    end = _now() + datetime.timedelta(days=begin + days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(start, end - datetime.timedelta(seconds=1)))
        .not_valid_after(end)
    )


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates, key_cert_sign=sign_certificates, crl_sign=sign_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )  # fmt: skip


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
