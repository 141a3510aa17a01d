"""How a server is set up, checked as a whole before anything starts. Imports no grpc."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxoverlap.errors import ConfigError
from jaxoverlap.observe.logs import FORMATS, LEVELS
from jaxoverlap.server.address import Address


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the service; those of the engine are `EngineConfig`'s.

    Attributes:
      listen: "host:port" or "unix:path". Port 0 takes a free one.
      admin_listen: where the admin service listens, apart from the rest; None is together with it.
      frontends: processes that share the port.
      in_process: everything in one process, for debugging.
      served_name: what callers may call the model; None is its own name.
      tls_cert, tls_key: PEM files; a renewed certificate is taken up without a restart.
      tls_client_ca: PEM file; callers must then show a certificate signed by it.
      insecure: allow other interfaces than loopback without TLS.
      token_file: bearer tokens, one a line; callers must then send one of them. Read again when it changes.
      admin_token_file: those of the admin service.
      max_streams: calls in a front end at once; max_streams_per_connection: of one connection.
      max_prompt_tokens, max_output_tokens: of one sequence; None leaves both to the model's context.
      max_message_mib: of one message, either way.
      max_backlog_kib: text, ids and log-probabilities that may wait for one stream's reader.
      reader_timeout: seconds that a stream's reader may take for a message.
      stall_timeout: seconds without a step, with work pending, after which health says NOT_SERVING.
      grace: seconds that running calls get when the server is asked to stop.
      profile_dir: where `StartProfile` writes; None refuses it.
      trace: file for a timeline of the last steps, written when the server stops; None records none.
      metrics_port: of Prometheus metrics over HTTP, 0 takes a free one; None serves none.
      metrics_host: where that port is; they have numbers only, and no TLS.
      otlp_traces_endpoint: URL of an OpenTelemetry collector for traces, by OTLP over HTTP; None sends none.
      log_level: "debug", "info", "warning" or "error"; log_format: "text" or "json", an object a line.

    Raises:
      ConfigError: a value out of range, or settings that do not go together.
    """

    listen: str = "127.0.0.1:50051"
    admin_listen: str | None = None
    frontends: int = 1
    in_process: bool = False
    served_name: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    insecure: bool = False
    token_file: str | None = None
    admin_token_file: str | None = None
    max_streams: int = 2048
    max_streams_per_connection: int = 1024
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_message_mib: float = 64.0
    max_backlog_kib: float = 1024.0
    reader_timeout: float = 60.0
    stall_timeout: float = 30.0
    grace: float = 30.0
    profile_dir: str | None = None
    trace: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    otlp_traces_endpoint: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("frontends", 1, 64),
            ("max_streams", 1, 1_000_000),
            ("max_streams_per_connection", 1, 1_000_000),
            ("max_prompt_tokens", 1, 2**24),
            ("max_output_tokens", 1, 2**24),
            ("metrics_port", 0, 65535),
        ):
            _check_int(name, getattr(self, name), low, high)
        for name, most in (
            ("max_message_mib", 1024.0),
            ("max_backlog_kib", 2.0**20),
            ("reader_timeout", math.inf),
            ("stall_timeout", math.inf),
        ):
            _check_real(name, getattr(self, name), most)
        if self.grace != 0:
            _check_real("grace", self.grace, math.inf)
        served = self.served_name
        if served is not None and not (isinstance(served, str) and served and served.isprintable()):
            raise ConfigError(f"served_name: {served!r} is not allowed; use a printable name, or leave it out")
        for name, allowed in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not allowed; use one of {', '.join(allowed)}")
        self._check_files()
        self._check_addresses()
        self._check_metrics()
        self._check_tracing()

    @property
    def address(self) -> Address:
        return Address.parse("listen", self.listen)

    @property
    def admin_address(self) -> Address | None:
        return None if self.admin_listen is None else Address.parse("admin_listen", self.admin_listen)

    @property
    def max_message_bytes(self) -> int:
        return int(self.max_message_mib * 2**20)

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None

    @property
    def has_secrets(self) -> bool:
        """There are files of tokens or certificates."""
        return self.has_tls or self.token_file is not None or self.admin_token_file is not None

    @property
    def admin_is_open(self) -> bool:
        """The admin service needs no token: nobody has any, and only this machine can call it."""
        where = self.admin_address or self.address
        return self.admin_token_file is None and self.token_file is None and where.is_local

    def _check_metrics(self) -> None:
        if self.metrics_port is None and self.metrics_host != type(self).metrics_host:
            raise ConfigError(f"metrics_host: {self.metrics_host!r} is not allowed without metrics_port")

    def _check_files(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")
        for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file", "admin_token_file"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}: there is no file {path!r}")
        if self.profile_dir is not None:
            _check_can_be_folder("profile_dir", Path(self.profile_dir))

    def _check_addresses(self) -> None:
        for name, address in (("listen", self.address), ("admin_listen", self.admin_address)):
            if address is not None and not (_is_local(name, address) or self.has_tls or self.insecure):
                raise ConfigError(
                    f"{name}: other machines can reach {address}, and there is no TLS; give tls_cert and tls_key, or "
                    "say insecure if something else protects it"
                )
        if self.admin_address == self.address and (self.address.path or self.address.port):
            raise ConfigError(f"admin_listen: {self.address} is where the rest listens; use another, or leave it out")
        if self.address.path and self.frontends > 1:
            raise ConfigError("frontends: a unix socket can't be shared; use 1, or a port")
        if self.frontends > 1 and self.in_process:
            raise ConfigError("frontends: there is one when everything is in_process")

    def _check_tracing(self) -> None:
        url = self.otlp_traces_endpoint
        if url is None:
            return
        if not re.match("https?://[^/]", url):
            allowed = "use a URL such as http://127.0.0.1:4318/v1/traces"
            raise ConfigError(f"otlp_traces_endpoint: {url!r} is not allowed; {allowed}")
        try:
            found = find_spec("opentelemetry.sdk.trace") and find_spec("opentelemetry.exporter.otlp.proto.http")
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError("otlp_traces_endpoint: OpenTelemetry is not installed; pip install 'jaxoverlap[otel]'")


def _is_local(name: str, address: Address) -> bool:
    try:
        return address.is_local
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_can_be_folder(name: str, path: Path) -> None:
    if path == Path():
        raise ConfigError(f"{name}: '' is not allowed; use a folder, or leave it out")
    try:
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    except OSError as error:
        raise ConfigError(f"{name}: {str(path)!r} is not allowed; {error.strerror or error}") from error
    if not there.is_dir():
        raise ConfigError(f"{name}: {str(path)!r} is not allowed; {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: {str(path)!r} is not allowed; {there} can't be written to")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
        raise ConfigError(f"{name}: {value!r} is not allowed; use an integer from {low} to {high}")


def _check_real(name: str, value: Any, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise ConfigError(f"{name}: {value!r} is not allowed; use a number above 0, at most {most:g}")
