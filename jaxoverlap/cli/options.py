"""Options come in groups that commands share: a class each, here the engine's and in `request_options` those of a
request. A command takes an instance of each, and `expand_groups` shows typer the options inside."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from jaxoverlap.config import EngineConfig

_engine = functools.partial(typer.Option, rich_help_panel="Engine", show_default=False)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Fields of `EngineConfig`; None leaves one at its default."""

    model: Annotated[
        str | None,
        _engine(help="Folder with safetensors, .gguf file or Hugging Face hub id. Default: SmolLM2-135M-Instruct."),
    ] = None
    generation_config: Annotated[
        str | None,
        _engine(
            metavar="auto|off",
            help="Whether what a request leaves out (temperature, top_p, top_k, min_p, repetition_penalty) comes of "
            "the model's generation_config.json. Default: auto, which is yes.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _engine(
            metavar="auto|float32|bfloat16",
            help="Of weights and activations. Default: auto, which is float32 on a CPU, bfloat16 on a GPU.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _engine(
            metavar="auto|float32|bfloat16|float16|fp8|int8",
            help="Of KV pages; fp8 and int8 take half the memory of bfloat16. Default: auto, which is that of --dtype.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        _engine(
            help="Longest prompt and outputs together, in tokens. Default: the model's own; at most what its rope "
            "scaling stretches that to."
        ),
    ] = None
    max_running: Annotated[
        int | None,
        _engine(
            help="Requests that decode together at most. Default: 32 on a CPU, 256 on a GPU; for generate as many as "
            "there are prompts, 32 at most."
        ),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        _engine(
            help="Prompt tokens in one step at most; longer prompts run in chunks. Default: 512 on a CPU, 2048 on a "
            "GPU; for generate less where the prompts are short, which starts sooner."
        ),
    ] = None
    min_prefill_tokens: Annotated[
        int | None,
        _engine(
            help="Prompt tokens of the smallest step compiled for prompts alone; each doubling is a step less to "
            "compile. Default: 16; for chat 64, for generate as many as its prompts have."
        ),
    ] = None
    page_size: Annotated[int | None, _engine(help="Tokens in a KV page. Default: 16.")] = None
    num_pages: Annotated[int | None, _engine(help="KV pages. Default: as many as the memory for them holds.")] = None
    kv_memory_gib: Annotated[
        float | None,
        _engine(
            help="Memory for KV pages in GiB. Default: 2 on a CPU (less where memory is short); on a GPU what "
            "--gpu-memory-fraction leaves beside the weights."
        ),
    ] = None
    gpu_memory_fraction: Annotated[
        float | None, _engine(help="Share of the GPU's memory to take, above 0, at most 1. Default: 0.9.")
    ] = None
    schedule: Annotated[
        str | None,
        _engine(
            metavar="overlap|timeslice|serial",
            help="overlap launches a step before the last is read, with prompts and decoding rows in one; timeslice "
            "alternates prefill and decode; serial runs prompts first. Default: overlap.",
        ),
    ] = None
    lookahead: Annotated[
        int | None,
        _engine(help="Launched steps whose results may stay unread: 0 is serial. Default: the schedule's, 1 or 0."),
    ] = None
    mixed_steps: Annotated[
        bool | None,
        _engine(
            "--mixed-steps/--no-mixed-steps", help="Prompts share steps with decoding rows. Default: the schedule's."
        ),
    ] = None
    max_prefill_streak: Annotated[
        int | None,
        _engine(help="Prefill steps between two decode steps, where they are not mixed. Default: the schedule's."),
    ] = None
    max_mixed_tokens: Annotated[
        int | None,
        _engine(
            help="Where steps are mixed: prompt tokens in one. Default: 64 on a CPU, 512 on a GPU; in a batch all."
        ),
    ] = None
    decode_wait_ms: Annotated[
        float | None,
        _engine(help="Where steps are not mixed: how long decoding rows wait for prefill at most. Default: 300."),
    ] = None
    prompt_wait_ms: Annotated[
        float | None,
        _engine(help="How long a prompt waits before a younger request makes room for it; inf: never. Default: 2000."),
    ] = None
    headroom: Annotated[
        int | None, _engine(help="Tokens that a request gets at least before it may be preempted. Default: 64.")
    ] = None
    prefix_cache: Annotated[
        bool | None,
        _engine(
            "--prefix-cache/--no-prefix-cache",
            help="Keep what was computed for prompts that begin with it. Default: on, unless every layer of the model "
            "has a sliding window.",
        ),
    ] = None
    cache_aware_order: Annotated[
        bool | None,
        _engine("--cache-aware-order", help="Admit the longest cached prefix first, within --prompt-wait-ms."),
    ] = None
    deterministic: Annotated[
        bool | None,
        _engine("--deterministic", help="Bit-equal results whatever else runs, on the same device. Slower."),
    ] = None
    max_queue: Annotated[
        int | None, _engine(help="Requests that may wait in the engine at most. Default: no limit; for serve 1024.")
    ] = None
    attention: Annotated[
        str | None,
        _engine(metavar="auto|xla|triton|mosaic", help="Who computes attention and KV writes. Default: auto."),
    ] = None
    watchdog_seconds: Annotated[
        float | None,
        _engine(
            help="How much longer than expected a step may take before the engine's state is logged and a server is no "
            "longer healthy; inf: never. Default: 5."
        ),
    ] = None
    watchdog_exit_seconds: Annotated[
        float | None,
        _engine(help="How much longer than that before the process ends with exit code 3; inf: never. Default: 30."),
    ] = None
    compile_cache: Annotated[
        str | None,
        _engine(
            metavar="FOLDER|off",
            help="Keeps compiled steps for the next start. Default: jaxoverlap/xla in the user's cache folder.",
        ),
    ] = None

    def settings(self, **defaults: Any) -> dict[str, Any]:
        """Arguments for `LLM`: what was given, else those of `defaults` that have an effect beside it.

        Raises:
          ConfigError: a value out of range; nothing has been loaded yet.
        """
        return beside(defaults, given(self))


def beside(defaults: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an engine: what is stated, and those of `defaults` that have an effect beside it.

    Raises:
      ConfigError: a value out of range.
    """
    idle = EngineConfig(**{**defaults, **stated}).without_effect()
    return {name: value for name, value in defaults.items() if name not in idle} | dict(stated)


def given(options: Any) -> dict[str, Any]:
    """The options of a group that were given."""
    return {name: value for name, value in vars(options).items() if value not in (None, [])}


def expand_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Replaces parameters that are option groups (dataclasses) by the options inside, which is what typer sees."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
        for parameter in own
        if parameter.name not in groups
    ]
    for group in groups.values():
        for name, hint in get_type_hints(group, include_extras=True).items():
            default = getattr(group, name)
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    @functools.wraps(command)
    def run(**values: Any) -> int:
        for name, group in groups.items():
            options = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**options)
        return command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
