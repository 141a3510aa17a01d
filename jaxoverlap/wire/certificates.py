"""Certificates and keys in PEM format, checked before gRPC has them: it would only say that a handshake has failed."""

from __future__ import annotations

import ssl

from jaxoverlap.errors import ConfigError


def check_certificates(name: str, path: str) -> None:
    """Raises `ConfigError` for a file without a certificate; `name` is that of the setting."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise _no_certificate(name, path) from error
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error


def check_certificate_bytes(name: str, where: str, pem: bytes) -> None:
    """As `check_certificates`, of what is in a file; `where` stands for the file in the error."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise _no_certificate(name, where) from error


def check_key(name: str, key: str, cert: str) -> None:
    """Raises `ConfigError` for a file that has no key, one with a passphrase, or that of another certificate."""
    is_encrypted = False

    def passphrase() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        return ""

    problem = None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"it is not the key of {cert}"
        elif error.reason is None:
            problem = "there is no private key in PEM format in it"
        else:
            problem = error.reason.lower().replace("_", " ")
    except OSError as error:
        problem = error.strerror
    if is_encrypted:
        problem = "it is encrypted; use a key without a passphrase"
    if problem is not None:
        raise ConfigError(f"{name}: {key}: {problem}")


def check_key_bytes(name: str, where: str, pem: bytes) -> None:
    """Raises `ConfigError` for what is no key, or one with a passphrase; of which certificate it is can't be told."""
    if b"PRIVATE KEY-----" not in pem:
        raise ConfigError(f"{name}: {where}: there is no private key in PEM format in it")
    if b"ENCRYPTED" in pem:
        raise ConfigError(f"{name}: {where}: it is encrypted; use a key without a passphrase")


def _no_certificate(name: str, where: str) -> ConfigError:
    return ConfigError(f"{name}: {where}: there is no certificate in PEM format in it")
