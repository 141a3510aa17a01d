"""The client of a service that `jaxoverlap serve` runs: `Client`, and `AsyncClient` for asyncio. Without jax.

config      where the service is, and how it is spoken to
calls       what a request is made of: its message, its reader, its tries; no I/O
methods     the plain methods: what is sent, what is made of the reply
sync, aio   the two clients, which differ in how they wait
replies     what the admin service says
"""

from jaxoverlap.client.aio import AsyncClient
from jaxoverlap.client.config import DEFAULT_TARGET, ClientConfig
from jaxoverlap.client.replies import AbortedIds, Health, Load, ModelInfo, ServerInfo
from jaxoverlap.client.sync import Client

__all__ = [
    "DEFAULT_TARGET",
    "AbortedIds",
    "AsyncClient",
    "Client",
    "ClientConfig",
    "Health",
    "Load",
    "ModelInfo",
    "ServerInfo",
]
