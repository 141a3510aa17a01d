"""The engine's end of a connection to a front end. It never waits: what can't be sent now is kept, and news that come
meanwhile are joined into one message, so that a front end that is behind catches up in one reading.

A front end that does not read for so long that `MAX_UNSENT` bytes have gathered is given up, like one that has died.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

from jaxoverlap.engine import messages

logger = logging.getLogger(__name__)

MAX_UNSENT = 256 << 20
_READ_BYTES = 1 << 20
_MAX_JOINED = 100_000
"""Tokens after which news are packed though others wait before them, so that `MAX_UNSENT` bounds them too."""


class Link:
    """Messages over a stream socket.

    Attributes:
      index: of the front end, from 0.
      news: what the next `flush` tells.
      is_open: False once the other side has gone.
    """

    def __init__(self, index: int, connection: socket.socket) -> None:
        self.index = index
        self.socket = connection
        self.news = messages.News()
        self.is_open = True
        self._unsent = bytearray()
        self._lock = threading.Lock()
        """Of what is unsent, for `post_from_aside`."""
        self._unpacker = messages.new_unpacker()
        connection.setblocking(False)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self.news)

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived; none does not mean that nobody is there, `is_open` says that."""
        received = []
        while self.is_open:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                with self._lock:
                    self._give_up(error)
                break
            if not data:
                with self._lock:
                    self._give_up(None)
                break
            self._unpacker.feed(data)
            received += self._unpacker
            if len(data) < _READ_BYTES:
                break
        return received

    def post(self, *message: Any) -> None:
        """Sends a message, after the news that are older."""
        with self._lock:
            self._pack_news()
            self._unsent += messages.pack(*message)

    def post_from_aside(self, *message: Any) -> None:
        """Sends a message from another thread than the engine's, which may be stuck; it may overtake news."""
        with self._lock:
            if self.is_open:
                self._unsent += messages.pack(*message)
                self._send_packed()

    def flush(self) -> None:
        """Sends what the socket takes."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self.is_open and self.has_unsent:
            if not self._unsent or len(self.news.keys) > _MAX_JOINED:
                self._pack_news()
            if not self._send_packed():
                return

    def _send_packed(self) -> bool:
        """False if nothing more can be sent now."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT:
                logger.error("front end %d has not read for %d bytes: given up", self.index, len(self._unsent))
                self._give_up(None)
            return False
        except OSError as error:
            self._give_up(error)
            return False
        del self._unsent[:sent]
        return True

    def close(self, timeout: float = 1.0) -> None:
        """Sends what is left, as far as that goes in `timeout` seconds."""
        if self.is_open:
            self.socket.settimeout(timeout)
            self.flush()
        with self._lock:
            self.is_open = False
            self.socket.close()

    def _pack_news(self) -> None:
        if self.news:
            self._unsent += messages.pack("news", self.news.to_wire())
            self.news = messages.News()

    def _give_up(self, error: OSError | None) -> None:
        """With the lock: another thread may be sending what is cleared here."""
        self.is_open = False
        self.news = messages.News()
        self._unsent.clear()
        if error is not None:
            logger.debug("front end %d: %s", self.index, error)
