"""What the supervisor and its processes say to each other, over a socket each: msgpack arrays, as `engine.messages`.

    supervisor → front end   stop  seconds, drained end open calls, let answers leave for so long, and exit; if the
                                                    engine has drained, what it has said ends them
    front end → supervisor   ready                  it listens, and the engine is ready
                             failed  text           why it is about to exit
    supervisor → engine      ask  … "drain", "metrics"    see `engine.messages`
    engine → supervisor      ready, status, answer, failed

The end of the socket is a message too: to a child, that its supervisor is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from jaxoverlap.engine import messages

_READ_BYTES = 1 << 16


class Control:
    """One end of such a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Control:
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, *message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(messages.pack(*message))

    async def received(self) -> AsyncIterator[list[Any]]:
        """Messages, until the other side has gone."""
        unpacker = messages.new_unpacker()
        try:
            while data := await self._reader.read(_READ_BYTES):
                unpacker.feed(data)
                for message in unpacker:
                    yield message
        except ConnectionError:
            return

    def close(self) -> None:
        self._writer.close()
