"""Bearer tokens: who may call what.

method                      without files    --token-file       --admin-token-file
GenerateService             everybody        its tokens         everybody, or --token-file's
reflection                  everybody        either's           either's
AdminService                this machine     nobody             its tokens
health                      everybody, always: it says nothing else, and probes have no tokens
"""

from __future__ import annotations

import codecs
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from jaxoverlap.errors import AccessDeniedError, ConfigError
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.statuses import UnauthenticatedError

logger = logging.getLogger(__name__)

_HEADER, _SCHEME = "authorization", "bearer "
_HEALTH, _ADMIN, _REFLECTION = "/grpc.health.", "/jaxoverlap.v1.AdminService/", "/grpc.reflection."


class TokenFile:
    """The tokens of a file, one a line; empty lines and those that begin with # are none.

    Args:
      name: of the setting that names the file, for errors.

    Raises:
      ConfigError: it can't be read, has no token, or has one that no call can bring.
    """

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, Path(path)
        self._stamp = self._look()
        self._tokens = self._read()
        self._complaint = ""

    def has(self, token: bytes) -> bool:
        """Takes as long for a wrong token as for a right one."""
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0

    def refresh(self) -> None:
        """Reads it again if it has changed. A file that can't be used changes nothing."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._tokens = self._read()
        except ConfigError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                logger.warning("tokens stay as they were: %s", error)
            return
        self._stamp, self._complaint = stamp, ""
        logger.info("%s: %d tokens", self._path, len(self._tokens))

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._name}: {self._path}: {error.strerror}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[bytes]:
        try:
            lines = self._path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise ConfigError(f"{self._name}: {self._path}: {error.strerror}") from error
        tokens = []
        for number, line in enumerate(map(bytes.strip, lines), start=1):
            if line and not line.startswith(b"#"):
                if not (line.isascii() and line.decode().isprintable()):
                    raise ConfigError(f"{self._name}: {self._path}: line {number} is not printable ASCII")
                tokens.append(line)
        if not tokens:
            raise ConfigError(f"{self._name}: {self._path}: there is no token in it")
        return tokens


class Gatekeeper:
    """Decides by a call's method and the token it brings. See the table above.

    Raises:
      ConfigError: a token file can't be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._tokens, self._admin_tokens = (
            None if path is None else TokenFile(name, path)
            for name, path in (("token_file", config.token_file), ("admin_token_file", config.admin_token_file))
        )
        self._admin_is_open = config.admin_is_open

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
