from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("served_name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "bos_token_id", "has_chat_template", "dtype", "capabilities", "sampling_defaults")
    class SamplingDefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    served_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    has_chat_template: bool
    dtype: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    sampling_defaults: _containers.ScalarMap[str, float]
    def __init__(self, served_name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., dtype: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., sampling_defaults: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "api_version", "instance_id", "uptime_seconds", "page_size", "num_pages", "max_running", "max_queued", "devices", "schedule", "kv_cache_dtype")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    version: str
    api_version: str
    instance_id: str
    uptime_seconds: float
    page_size: int
    num_pages: int
    max_running: int
    max_queued: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    schedule: str
    kv_cache_dtype: str
    def __init__(self, version: _Optional[str] = ..., api_version: _Optional[str] = ..., instance_id: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., schedule: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "queued", "kv_used_fraction", "tokens_per_second", "draining")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    kv_used_fraction: float
    tokens_per_second: float
    draining: bool
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ..., kv_used_fraction: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids", "all")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("aborted_ids", "unknown_ids")
    ABORTED_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_ids: _Optional[_Iterable[str]] = ..., unknown_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_pages",)
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("still_running",)
    STILL_RUNNING_FIELD_NUMBER: _ClassVar[int]
    still_running: int
    def __init__(self, still_running: _Optional[int] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("trace_dir",)
    TRACE_DIR_FIELD_NUMBER: _ClassVar[int]
    trace_dir: str
    def __init__(self, trace_dir: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("trace_dir",)
    TRACE_DIR_FIELD_NUMBER: _ClassVar[int]
    trace_dir: str
    def __init__(self, trace_dir: _Optional[str] = ...) -> None: ...

class GetMemorySnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMemorySnapshotResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class GetStepLogRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class GetStepLogResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class StartTraceRequest(_message.Message):
    __slots__ = ("max_steps",)
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    max_steps: int
    def __init__(self, max_steps: _Optional[int] = ...) -> None: ...

class StartTraceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopTraceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopTraceResponse(_message.Message):
    __slots__ = ("trace",)
    TRACE_FIELD_NUMBER: _ClassVar[int]
    trace: bytes
    def __init__(self, trace: _Optional[bytes] = ...) -> None: ...
