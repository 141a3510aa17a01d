"""What a model's authors recommend for sampling: generation_config.json, as transformers writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` for requests that leave them out. As in vLLM `do_sample` says nothing, and other than
    there neither does `max_new_tokens`.

    A value that no request may have is ignored with a warning.
    """
    defaults = {}
    for name in _FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            logger.warning("generation_config.json is not followed: %s", error)
        else:
            defaults[name] = value
    return defaults
