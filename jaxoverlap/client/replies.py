"""What a service says of itself, as the admin service's messages have it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from jaxoverlap.sampling_params import SamplingParams


class _Reply:
    @classmethod
    def of(cls, message: Any) -> Self:
        """From the message with the same fields: repeated ones become tuples, maps dicts, and optional ones that
        are not set None."""
        values = {}
        for field in fields(cls):  # type: ignore[arg-type]
            descriptor, value = message.DESCRIPTOR.fields_by_name[field.name], getattr(message, field.name)
            if descriptor.has_presence and not message.HasField(field.name):
                value = None
            if descriptor.is_repeated:
                is_map = descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry
                value = dict(value) if is_map else tuple(value)
            values[field.name] = value
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ModelInfo(_Reply):
    """The model that is served.

    Attributes:
      served_name: what requests may call it.
      max_model_len: prompt and outputs together, in tokens.
      capabilities: what requests may ask for in this build, as fields of `SamplingParams`.
      sampling_defaults: what they get if they leave it out, where the model's generation_config.json says something:
        fields of `SamplingParams`.
    """

    served_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool
    dtype: str
    capabilities: tuple[str, ...]
    sampling_defaults: dict[str, float]

    @classmethod
    def of(cls, message: Any) -> Self:
        info = super().of(message)
        # A message has one type of number for all of them.
        whole = {field.name for field in fields(SamplingParams) if type(field.default) is int}
        told = info.sampling_defaults
        return replace(info, sampling_defaults={name: int(n) if name in whole else n for name, n in told.items()})


@dataclass(frozen=True, kw_only=True)
class ServerInfo(_Reply):
    """The server.

    Attributes:
      instance_id: new at each start.
      page_size: tokens in a KV page, of which there are num_pages.
      kv_cache_dtype: of KV pages: float32, bfloat16, float16, fp8 or int8.
      max_running, max_queued: requests that decode together and that may wait, at most.
    """

    version: str
    api_version: str
    instance_id: str
    uptime_seconds: float
    page_size: int
    num_pages: int
    max_running: int
    max_queued: int
    devices: tuple[str, ...]
    schedule: str
    kv_cache_dtype: str


@dataclass(frozen=True, kw_only=True)
class Load(_Reply):
    """What the server is doing now.

    Attributes:
      running, queued: requests.
      kv_used_fraction: pages of running requests over all pages.
      tokens_per_second: outputs of all requests together.
      draining: it takes no new requests.
    """

    running: int
    queued: int
    kv_used_fraction: float
    tokens_per_second: float
    draining: bool


@dataclass(frozen=True, kw_only=True)
class AbortedIds(_Reply):
    """Requests that were aborted, and ids that no running request has."""

    aborted_ids: tuple[str, ...]
    unknown_ids: tuple[str, ...]


@dataclass(frozen=True)
class Health:
    """Whether the server lives, and whether it takes requests: not while it warms up, drains or makes no progress."""

    live: bool
    ready: bool
