"""Certificates, read again when their files change: a renewed one serves the next connection."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from jaxoverlap.errors import ConfigError
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.wire.certificates import check_certificates, check_key

logger = logging.getLogger(__name__)


class CertificateFiles:
    """A certificate with its key and, for mutual TLS, the authority that signs callers' certificates.

    Raises:
      ConfigError: they can't be read or do not belong together.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamps = self._look()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._renewed, require_client_authentication=self._client_ca is not None
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, at each new connection; None leaves all as it is."""
        try:
            stamps = self._look()
            if stamps == self._stamps:
                return None
            renewed = self._read()
        except ConfigError as error:  # half written, perhaps
            logger.warning("certificates stay as they were: %s", error)
            return None
        self._stamps = stamps
        logger.info("certificates read again from %s", self._cert)
        return renewed

    def _look(self) -> list[int]:
        try:
            return [Path(path).stat().st_mtime_ns for path in self._paths()]
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_certificates("tls_cert", self._cert)
        check_key("tls_key", self._key, self._cert)
        if self._client_ca is not None:
            check_certificates("tls_client_ca", self._client_ca)
        try:
            authority = None if self._client_ca is None else Path(self._client_ca).read_bytes()
            pair = (Path(self._key).read_bytes(), Path(self._cert).read_bytes())
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def _paths(self) -> list[str]:
        return [path for path in (self._cert, self._key, self._client_ca) if path is not None]


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None is no TLS.

    Raises:
      ConfigError: a file can't be used.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    return CertificateFiles(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()
