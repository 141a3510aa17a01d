"""Where a server listens, and who may reach it there."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxoverlap.errors import ConfigError

_UNIX = "unix:"
_MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_URI_CHARS = "%#?"
"""To gRPC a target is a URI, so that callers would look for another path."""


@dataclass(frozen=True)
class Address:
    """A host and a port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, field: str, text: str) -> Address:
        """From "host:port", "[v6]:port" or "unix:path".

        Raises:
          ConfigError: something else.
        """
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if not path:
                raise ConfigError(f"{field}: {text!r} is not allowed; use unix:PATH")
            path = str(Path(path).absolute())
            if any(char in path for char in _URI_CHARS):
                raise ConfigError(f"{field}: {text!r} is not allowed; use a path without {' '.join(_URI_CHARS)}")
            if not path.isprintable():
                raise ConfigError(f"{field}: {text!r} is not allowed; use a path of printable characters")
            if len(os.fsencode(path)) > _MAX_PATH_BYTES:
                allowed = (
                    f"a unix socket's path has at most {_MAX_PATH_BYTES} bytes, {path} has {len(os.fsencode(path))}"
                )
                raise ConfigError(f"{field}: {text!r} is not allowed; {allowed}")
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not colon or not host or "[" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{field}: {text!r} is not allowed; use HOST:PORT, [IPV6]:PORT or unix:PATH")
        return cls(host, int(port))

    @property
    def is_local(self) -> bool:
        """Only this machine can reach it."""
        return bool(self.path) or all(ipaddress.ip_address(ip).is_loopback for ip in self._ips())

    def targets(self) -> list[str]:
        """For gRPC, one for each IP of the host."""
        if self.path:
            return [_UNIX + self.path]
        return [f"[{ip}]:{self.port}" if ":" in ip else f"{ip}:{self.port}" for ip in self._ips()]

    def __str__(self) -> str:
        if self.path:
            return _UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def _ips(self) -> list[str]:
        """Those of the host that this machine has."""
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"{self.host!r} is no address of this machine: {error.strerror or error}") from error
        ips = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
        usable = [ip for ip in ips if _can_bind(ip)]
        if not usable:
            raise ConfigError(f"{self.host!r} is no address of this machine")
        return usable


def _can_bind(ip: str) -> bool:
    try:
        with socket.socket(_family(ip)) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


@contextmanager
def reserved(address: Address) -> Iterator[Address]:
    """Keeps an address for processes that are about to listen there with SO_REUSEPORT; port 0 becomes a free one.

    gRPC would let two servers share a port without a word, and would take a socket's path away from a living server.

    Raises:
      ConfigError: somebody else has it, or it can't be had.
    """
    if address.path:
        _check_path_is_free(address.path)
        try:
            yield address
        finally:
            with suppress(OSError):
                if _is_left_behind(address.path):  # by a front end that was killed; a successor's is listened at
                    os.unlink(address.path)
        return
    holders: list[socket.socket] = []
    try:
        for ip in address._ips():
            try:
                address = replace(address, port=_bound_alone(ip, address.port))
                holder = socket.socket(_family(ip))
                holders.append(holder)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if holder.family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                holder.bind((ip, address.port))
            except OSError as error:
                raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error
        yield address
    finally:
        for holder in holders:
            holder.close()


def _bound_alone(ip: str, port: int) -> int:
    """Binds without sharing, which fails where somebody listens already."""
    with socket.socket(_family(ip)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((ip, port))
        return probe.getsockname()[1]


def _check_path_is_free(path: str) -> None:
    try:
        if not os.path.exists(path):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
            os.unlink(path)
        elif not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"cannot listen on unix:{path}: what is there is no socket")
        elif not _is_left_behind(path):
            raise ConfigError(f"cannot listen on unix:{path}: address already in use")
    except OSError as error:
        raise ConfigError(f"cannot listen on unix:{path}: {error.strerror or error}") from error


def _is_left_behind(path: str) -> bool:
    """A socket at which nobody listens any more.

    Raises:
      OSError: it can't be seen or tried.
    """
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        return False
