"""Bearer tokens: who may call what.

method                      without files    --token-file       --admin-token-file
GenerateService             everybody        its tokens         everybody, or --token-file's
reflection                  everybody        either's           either's
AdminService                this machine     nobody             its tokens
health                      everybody, always: it says nothing else, and probes have no tokens
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from jaxoverlap.errors import AccessDeniedError, ConfigError
from jaxoverlap.server.statuses import UnauthenticatedError

logger = logging.getLogger(__name__)

_HEADER, _SCHEME = "authorization", "bearer "
_HEALTH, _ADMIN, _REFLECTION = "/grpc.health.", "/jaxoverlap.v1.AdminService/", "/grpc.reflection."


class TokenFile:
    """The tokens of a file, one a line; empty lines and those that begin with # are none.

    Raises:
      ConfigError: it can't be read, or has no token.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._look()
        self._tokens = self._read()
        if not self._tokens:
            raise ConfigError(f"{path}: there is no token in it")

    def has(self, token: bytes) -> bool:
        """Takes as long for a wrong token as for a right one."""
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0

    def refresh(self) -> None:
        """Reads it again if it has changed. A file that can't be used changes nothing."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            tokens = self._read()
        except ConfigError as error:
            logger.warning("tokens stay as they were: %s", error)
            return
        self._stamp = stamp
        if tokens:
            self._tokens = tokens
            logger.info("%s: %d tokens", self._path, len(tokens))
        else:
            logger.warning("%s: there is no token in it; tokens stay as they were", self._path)

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[bytes]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith(b"#")]


class Gatekeeper:
    """Decides by a call's method and the token it brings. See the table above.

    Args:
      admin_is_open: without any token file, for callers on this machine.
    """

    def __init__(self, tokens: TokenFile | None, admin_tokens: TokenFile | None, *, admin_is_open: bool) -> None:
        self._tokens, self._admin_tokens, self._admin_is_open = tokens, admin_tokens, admin_is_open

    def check(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Raises `UnauthenticatedError` or `AccessDeniedError`."""
        if method.startswith(_HEALTH):
            return
        if method.startswith(_ADMIN):
            self._check_admin(metadata)
        elif method.startswith(_REFLECTION):
            files = [file for file in (self._tokens, self._admin_tokens) if file is not None]
            if files and not any(file.has(_token(metadata)) for file in files):
                raise UnauthenticatedError("a valid bearer token is needed")
        elif self._tokens is not None and not self._tokens.has(_token(metadata)):
            raise UnauthenticatedError("a valid bearer token is needed")

    def refresh(self) -> None:
        for file in (self._tokens, self._admin_tokens):
            if file is not None:
                file.refresh()

    def _check_admin(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        if self._admin_tokens is None:
            if not self._admin_is_open:
                raise AccessDeniedError("this server was started without admin tokens, so nobody may do this")
            return
        token = _token(metadata)
        if self._admin_tokens.has(token):
            return
        if self._tokens is not None and self._tokens.has(token):
            raise AccessDeniedError("this token is not one for the admin service")
        raise UnauthenticatedError("a valid bearer token of the admin service is needed")


def _token(metadata: Sequence[tuple[str, str | bytes]]) -> bytes:
    """Empty, which no file has, where there is none."""
    for name, value in metadata:
        if name == _HEADER:
            text = value if isinstance(value, bytes) else value.encode(errors="replace")
            if text[: len(_SCHEME)].lower() == _SCHEME.encode():
                return text[len(_SCHEME) :].strip()
    return b""
