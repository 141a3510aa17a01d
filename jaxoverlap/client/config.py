"""Where a service is, and how it is spoken to; checked before anything is sent."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import grpc

from jaxoverlap.errors import ConfigError, shortened
from jaxoverlap.wire.certificates import check_certificate_bytes, check_key, check_key_bytes

DEFAULT_TARGET = "127.0.0.1:50051"

_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
"""A server that vanishes without a word (a cable, a kill -9 of its machine) is noticed within 40 s, by any call that is
open then. The service allows a ping every 10 s."""
_FIRST_RECONNECT_MS, _LAST_RECONNECT_MS = 200, 5_000
"""gRPC's own first pause, 1 s, would outlast most of our retries."""

Pem = str | PathLike[str] | bytes
"""A file, or what would be in it."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Settings of `Client` and `AsyncClient`.

    Attributes:
      target: "host:port", "unix:path", or another name that gRPC resolves, such as "dns:///name:port".
      tls: encrypted. Implied by any of the certificates; without root certificates those of the system are trusted.
      root_certificates: whom to trust; a PEM file, or its content as bytes.
      client_certificate, client_key: who we are, for a server that wants to know (mutual TLS); PEM, as above.
      server_name: the name to expect in the server's certificate, where it is not the target's host.
      token: sent with each call as a bearer token; or a function that returns it, asked for each call.
      allow_plaintext_token: send it without TLS to another machine, where something else protects it.
      metadata: further pairs sent with each call, such as ("traceparent", …): keys of lower case letters, digits and
        - _ . with values of printable ASCII, or of bytes if the key ends in -bin.
      model: the served model's name, checked by the service; empty is whatever is served.
      timeout: seconds that a call may take, its retries included; for requests whose options have none of their own,
        and for all other calls. None is no limit.
      max_retries: tries after the first, where trying again is safe: the service was unavailable before anything was
        received, or it was full and said when to come back.
      concurrency: calls at once, of `generate` and `generate_each`.
      max_message_mib: of one message, either way.

    Raises:
      ConfigError: a value of the wrong type or out of range, or settings that do not go together.
    """

    target: str = DEFAULT_TARGET
    tls: bool = False
    root_certificates: Pem | None = None
    client_certificate: Pem | None = None
    client_key: Pem | None = field(default=None, repr=False)
    server_name: str | None = None
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    allow_plaintext_token: bool = False
    metadata: Sequence[tuple[str, str | bytes]] = field(default=(), repr=False)
    model: str = ""
    timeout: float | None = None
    max_retries: int = 4
    concurrency: int = 64
    max_message_mib: float = 64.0

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or not self.target or not self.target.isprintable():
            raise _not_allowed("target", self.target, "'host:port' or 'unix:path'")
        for name in ("tls", "allow_plaintext_token"):
            if not isinstance(getattr(self, name), bool):
                raise _not_allowed(name, getattr(self, name), "True or False")
        for name in ("root_certificates", "client_certificate", "client_key"):
            if not isinstance(getattr(self, name), str | PathLike | bytes | None):
                raise ConfigError(f"{name}: {type(getattr(self, name)).__name__} is not allowed; use a file or bytes")
        if not isinstance(self.model, str):
            raise _not_allowed("model", self.model, "a name, or '' for whatever is served")
        for name, low in (("max_retries", 0), ("concurrency", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise _not_allowed(name, value, f"an integer from {low}")
        if self.timeout is not None and not _is_positive(self.timeout):
            raise _not_allowed("timeout", self.timeout, "seconds above 0, or None")
        if not _is_positive(self.max_message_mib) or self.max_message_mib > 1024:
            raise _not_allowed("max_message_mib", self.max_message_mib, "a number above 0, at most 1024")
        if (self.client_certificate is None) != (self.client_key is None):
            raise ConfigError("client_certificate and client_key go together")
        server = self.server_name
        if server is not None and not (
            isinstance(server, str) and server and server.isascii() and server.isprintable()
        ):
            raise _not_allowed("server_name", server, "the name in the server's certificate, or None")
        if server is not None and not self.has_tls:
            raise ConfigError("server_name: there is no certificate without TLS; set tls as well")
        if self.token is not None and not callable(self.token):
            _check_token(self.token)
        _check_metadata(self.metadata)
        if self.token is not None and not (self.has_tls or self.allow_plaintext_token or _is_local(self.target)):
            raise ConfigError(
                f"token: without TLS everybody on the way to {self.target} can read it; set tls, or "
                "allow_plaintext_token if something else protects it"
            )

    @property
    def has_tls(self) -> bool:
        return self.tls or self.root_certificates is not None or self.client_certificate is not None

    @property
    def max_message_bytes(self) -> int:
        return int(self.max_message_mib * 2**20)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None is plaintext. Raises ConfigError for a file that can't be read, or is not what it should be."""
        if not self.has_tls:
            return None
        names = ("root_certificates", "client_key", "client_certificate")
        roots, key, certificate = (_read(name, getattr(self, name)) for name in names)
        for name, pem in (("root_certificates", roots), ("client_certificate", certificate)):
            if pem is not None:
                check_certificate_bytes(name, _shown(getattr(self, name)), pem)
        if key is not None:
            check_key_bytes("client_key", _shown(self.client_key), key)
            if _is_file(self.client_key) and _is_file(self.client_certificate):
                check_key("client_key", str(self.client_key), str(self.client_certificate))
        return grpc.ssl_channel_credentials(roots, key, certificate)

    def channel_options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),  # else a minute, whatever the line above says
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LAST_RECONNECT_MS),
        ]
        if _is_local(self.target):  # gRPC would ask the proxy of http_proxy even for this machine
            options.append(("grpc.enable_http_proxy", 0))
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return options

    def call_metadata(self) -> list[tuple[str, str | bytes]]:
        """What goes with a call, besides its message. Raises ConfigError for a token that can't be sent."""
        token = self.token
        if callable(token):
            token = token()
            if token is not None:
                _check_token(token)
        return [*self.metadata, *([] if token is None else [("authorization", f"Bearer {token}")])]


def _check_token(token: Any) -> None:
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        raise ConfigError("token: it must be printable ASCII, and not empty")


def _check_metadata(metadata: Any) -> None:
    if isinstance(metadata, str) or not isinstance(metadata, Sequence):
        raise ConfigError(f"metadata: {type(metadata).__name__} is not allowed; use a list of pairs")
    for index, pair in enumerate(metadata):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"metadata[{index}]: {type(pair).__name__} is not allowed; use a pair of key and value")
        key, value = pair
        if not isinstance(key, str) or not re.fullmatch("[0-9a-z_.-]+", key) or key.startswith("grpc-"):
            allowed = "use lower case letters, digits and - _ . as key, and nothing that begins with grpc-"
            raise ConfigError(f"metadata[{index}]: {key!r} is not allowed; {allowed}")
        if key.endswith("-bin"):
            is_fine, allowed = isinstance(value, bytes), "bytes"
        else:
            is_fine, allowed = isinstance(value, str) and value.isascii() and value.isprintable(), "printable ASCII"
        if not is_fine:  # it may be secret
            raise ConfigError(f"metadata[{index}]: the value of {key!r} is not allowed; use {allowed}")


def _is_local(target: str) -> bool:
    """Nothing leaves this machine on the way there."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition("/")[2].rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(name: str, pem: Pem | None) -> bytes | None:
    if pem is None or isinstance(pem, bytes):
        return pem
    try:
        return Path(pem).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {pem}: {error.strerror or error}") from error


def _is_file(pem: Pem | None) -> bool:
    """That can be read twice, which what a shell makes of ``<(…)`` can't."""
    return isinstance(pem, str | PathLike) and Path(pem).is_file()


def _shown(pem: Pem | None) -> str:
    return "the bytes" if isinstance(pem, bytes) else str(pem)


def _is_positive(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < float(value) < math.inf
    except OverflowError:  # an integer beyond the largest float
        return False


def _not_allowed(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: {shortened(value)} is not allowed; use {allowed}")
