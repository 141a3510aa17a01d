"""From a name to weights: finds a model's files, opens them, and fills every array exactly once.

    load_model(None)                     the embedded default
    load_model("folder")                 Hugging Face folder with safetensors, or with one GGUF file
    load_model("file.gguf")
    load_model("organisation/name")      downloaded from the hub

Nothing here asks for a device: the weights are NumPy arrays, for the caller to put where they belong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxoverlap.errors import ModelError
from jaxoverlap.model import layout
from jaxoverlap.model.checkpoint import (
    HEAD,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    GgufCheckpoint,
    HfCheckpoint,
    TokenizerSource,
    is_buffer,
    no_weights,
)
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.default_model import NAME, default_model_path

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_HUB_COPIES = ["consolidated*.safetensors", "original/*"]
"""The same weights once more, as Mistral and Meta write them."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's files, opened but not loaded: configuration and tokenizer cost no weights.

    Attributes:
      name: what to call the model.
      checkpoint: its tensors.
    """

    name: str
    checkpoint: Checkpoint

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self.checkpoint.sampling_defaults

    @property
    def tokenizer_source(self) -> TokenizerSource:
        return self.checkpoint.tokenizer_source

    @property
    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint


@dataclass(frozen=True)
class LoadedModel:
    """A model in host memory.

    Attributes:
      name: what to call it.
      config: its shape.
      weights: NumPy arrays in the tree that `Decoder.apply` takes.
      dtype: of the weights; norms are float32 always.
      tokenizer_source: for `Tokenizer.from_source`.
      fingerprint: tells two models apart; see `Checkpoint.fingerprint`.
    """

    name: str
    config: ModelConfig
    weights: layout.Weights
    dtype: np.dtype
    tokenizer_source: TokenizerSource
    fingerprint: str


def resolve_dtype(dtype: str | np.dtype, platform: str) -> np.dtype:
    """The dtype that "auto" means on a platform ("cpu", "gpu", …): float32 on CPUs, bfloat16 elsewhere.

    CPUs without native bfloat16 take seconds for a step in it.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    if name not in _DTYPES:
        raise ModelError(f"dtype is {name!r}: not supported in this build; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    source: str | PathLike[str] | None = None,
    dtype: str | np.dtype = "auto",
    *,
    platform: str = "cpu",
) -> LoadedModel:
    """Loads a model.

    Args:
      source: a folder, a GGUF file, a hub id, or None for the embedded default.
      dtype: "auto", "float32" or "bfloat16".
      platform: what "auto" is for.

    Raises:
      ModelError: something about the files can't be used; the message names it.
    """
    return load_weights(open_model(source), resolve_dtype(dtype, platform))


def open_model(source: str | PathLike[str] | None = None) -> ModelFiles:
    """Finds and opens a model's files without loading its weights; arguments as in `load_model`."""
    if source is None:
        return ModelFiles(NAME, GgufCheckpoint(default_model_path()))
    path = Path(source).expanduser()
    name = path.resolve().name
    if not path.exists():
        path, name = _download(str(source)), str(source)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a folder nor a .gguf file")
        return ModelFiles(_as_text(path.stem), GgufCheckpoint(path))
    gguf_files = sorted(path.glob("*.gguf"))
    has_safetensors = (path / SINGLE_NAME).is_file() or (path / INDEX_NAME).is_file()
    if has_safetensors or ((path / "config.json").is_file() and not gguf_files):
        return ModelFiles(_as_text(name), HfCheckpoint(path))
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(f"{path} holds {len(gguf_files)} GGUF files; name one: {names}")
    if not gguf_files:
        raise no_weights(path)
    return ModelFiles(_as_text(gguf_files[0].stem), GgufCheckpoint(gguf_files[0]))


def load_weights(files: ModelFiles, dtype: np.dtype) -> LoadedModel:
    """Copies every tensor into its place, one by one: at most one array and one tensor beyond the result.

    Raises:
      ModelError: a tensor is missing, unknown, or of another shape.
    """
    config, checkpoint = files.config, files.checkpoint
    placements = list(layout.placements(config))
    _check_names_and_shapes(placements, checkpoint)
    arrays = {slot.path: np.empty(slot.shape, np.float32 if slot.is_norm else dtype) for slot in layout.slots(config)}
    for placement in placements:
        placement.write(arrays[placement.path], checkpoint.read(placement.name))
    weights = layout.tree(iter(arrays.items()))
    return LoadedModel(files.name, config, weights, dtype, files.tokenizer_source, files.fingerprint)


def _as_text(name: str) -> str:
    """A file's name, which may have bytes that are no text, as what messages and answers can hold."""
    return os.fsencode(name).decode(errors="replace")


def _check_names_and_shapes(placements: list[layout.Placement], checkpoint: Checkpoint) -> None:
    """Every expected tensor is there with its shape, and nothing else is."""
    found = checkpoint.shapes()
    for placement in placements:
        shape = found.pop(placement.name, None)
        if shape is None:
            hint = "; tie_word_embeddings is false" if placement.name == HEAD else ""
            label = checkpoint.label(placement.name)
            raise ModelError(f"tensor {label} is missing (expected shape {placement.shape}){hint}")
        if shape != placement.shape:
            label = checkpoint.label(placement.name)
            raise ModelError(f"tensor {label} has shape {shape}, expected {placement.shape}")
    for name in found:
        if not is_buffer(name):
            raise ModelError(
                f"tensor {checkpoint.label(name)} of shape {found[name]} has no place in this model (none expected)"
            )


def _download(hub_id: str) -> Path:
    if not _HUB_ID.fullmatch(hub_id) or hub_id.endswith(".gguf"):
        raise ModelError(f"{hub_id}: no such file or folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
    except Exception as error:
        raise ModelError(
            f"{hub_id}: no such file or folder here, and fetching it from the Hugging Face hub failed: {error}"
        ) from error
