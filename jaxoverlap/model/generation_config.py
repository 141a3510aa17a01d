"""What a model's authors recommend for sampling: generation_config.json, as transformers writes it, or keys of GGUF."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_GGUF_NAME_OF_FIELD = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` for requests that leave them out. As in vLLM `do_sample` says nothing, and other than
    there neither does `max_new_tokens`.

    A value that no request may have is ignored with a warning.
    """
    return _allowed({name: generation_config.get(name) for name in _GGUF_NAME_OF_FIELD}, "generation_config.json")


def sampling_defaults_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the keys `general.sampling.*`, which llama.cpp's converter takes from generation_config.json."""
    values = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_NAME_OF_FIELD.items()}
    # A float32 is meant to be as short as it was written: 0.6, not 0.6000000238.
    short = {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in values.items()}
    return _allowed(short, "general.sampling of the GGUF file")


def _allowed(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    defaults = {}
    for name, value in values.items():
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            logger.warning("%s is not followed: %s", source, error)
        else:
            defaults[name] = value
    return defaults
