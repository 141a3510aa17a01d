"""Checkpoints on disk, seen alike: a Hugging Face folder or a GGUF file.

Both answer with Hugging Face tensor names and orientation, so that one loader serves both.
Opening reads headers and configuration only; tensors are read one by one when asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxoverlap.errors import ModelError
from jaxoverlap.model.config import ModelConfig, config_from_gguf, config_from_hf
from jaxoverlap.model.fields import unsupported
from jaxoverlap.model.generation_config import sampling_defaults, sampling_defaults_from_gguf
from jaxoverlap.model.gguf_file import GgufFile
from jaxoverlap.model.safetensors_file import SafetensorsFile

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_ROTARY_BUFFERS = tuple(f".rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
_ROWS_COMPARED = 1024

TokenizerSource = Path | Mapping[str, Any]
"""Where a tokenizer comes from: a folder with tokenizer files, or GGUF metadata."""


def is_buffer(name: str) -> bool:
    """Whether a tensor holds what the configuration says already, so that nobody needs it."""
    return name.endswith(_ROTARY_BUFFERS)


class Checkpoint(Protocol):
    """A model's files, opened.

    Attributes:
      config: the model they hold.
      sampling_defaults: fields of `SamplingParams` for requests that leave them out.
      tokenizer_source: for `Tokenizer.from_source`.
      fingerprint: hex digest of configuration, tensor tables and file sizes; not of every weight.
    """

    config: ModelConfig
    sampling_defaults: Mapping[str, Any]
    tokenizer_source: TokenizerSource
    fingerprint: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors and their shapes."""
        ...

    def label(self, name: str) -> str:
        """The tensor as its own file calls it, for error messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype it is stored in (dequantised ones: float32)."""
        ...


class HfCheckpoint:
    """A folder with config.json and safetensors. The index, where there is one, says which file holds what:
    other files, and other copies of a tensor, are ignored. An index of files that are all gone is ignored itself,
    beside a whole model in one file: transformers leaves it there when it saves a small model over a large one."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer_source: TokenizerSource = folder
        # What the model is comes first: a folder that says nothing sensible of it is not looked at for weights.
        config = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation_config = read_json(generation_path) if generation_path.is_file() else {}
        self.config = config_from_hf(config, generation_config)
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults(generation_config)
        if (named := config.get("transformers_weights")) not in (None, SINGLE_NAME, INDEX_NAME):
            raise unsupported("transformers_weights", named, [SINGLE_NAME, INDEX_NAME])
        if (folder / ADAPTER_NAME).is_file():
            logger.warning("%s: the adapter is not applied; merge it into the model first", folder / ADAPTER_NAME)
        self._file_of = self._open_files(folder)
        self._stored_as: dict[str, str] = {}
        if self.config.tie_word_embeddings:
            self._settle_head()
        headers = [file.header for _, file in sorted({f.path: f for f in self._file_of.values()}.items())]
        self.fingerprint = _digest(json.dumps(config, sort_keys=True).encode(), *headers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.shape(self._stored_as.get(name, name)) for name, file in self._file_of.items()}

    def label(self, name: str) -> str:
        file = self._file_of.get(name)
        return f"{self._stored_as.get(name, name)!r} ({file.path})" if file else f"{name!r}"

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].read(self._stored_as.get(name, name))

    def _settle_head(self) -> None:
        """The embedding is the head as well, under whichever of the two names it is stored."""
        if HEAD not in self._file_of:
            return
        head = self._file_of.pop(HEAD)
        if EMBEDDING not in self._file_of:
            self._file_of[EMBEDDING], self._stored_as[EMBEDDING] = head, HEAD
        elif not _equal(self._file_of[EMBEDDING].read(EMBEDDING), head.read(HEAD)):
            logger.warning("tie_word_embeddings is true: %s, which differs from %s, is not used", HEAD, EMBEDDING)

    def _open_files(self, folder: Path) -> dict[str, SafetensorsFile]:
        index_path, single_path = folder / INDEX_NAME, folder / SINGLE_NAME
        if not index_path.is_file():
            if not single_path.is_file():
                raise no_weights(folder)
            return self._open_single(single_path)
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index_path} has no weight_map")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str):
                raise ModelError(f"{index_path}: the file of tensor {name!r} is {file_name!r}; it must be a name")
        files: dict[str, SafetensorsFile] = {}
        file_names = sorted(set(weight_map.values()))
        if single_path.is_file() and not any((folder / file_name).is_file() for file_name in file_names):
            logger.warning("%s is ignored: no file that it names is there, and %s is", index_path, SINGLE_NAME)
            return self._open_single(single_path)
        for file_name in file_names:
            if not (folder / file_name).is_file():
                raise ModelError(f"{folder / file_name} is missing; {INDEX_NAME} names it")
            files[file_name] = SafetensorsFile(folder / file_name)
        file_of: dict[str, SafetensorsFile] = {}
        for name, file_name in weight_map.items():
            if name not in files[file_name].names:
                raise ModelError(f"tensor {name!r} is not in {folder / file_name}, where {INDEX_NAME} puts it")
            file_of[name] = files[file_name]
        for file in files.values():
            if unlisted := [name for name in file.names if name not in file_of and not is_buffer(name)]:
                raise ModelError(f"tensor {unlisted[0]!r} in {file.path} is not listed in {INDEX_NAME}")
        return file_of

    @staticmethod
    def _open_single(path: Path) -> dict[str, SafetensorsFile]:
        file = SafetensorsFile(path)
        return dict.fromkeys(file.names, file)


class GgufCheckpoint:
    """One GGUF file of architecture llama (which mistral models use too), qwen2 or qwen3."""

    def __init__(self, path: Path) -> None:
        self._file = file = GgufFile(path)
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults_from_gguf(file.metadata)
        self.tokenizer_source: TokenizerSource = file.metadata
        if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
            raise ModelError(f"{path} is one of {parts} parts: not supported in this build")
        self._gguf_name = {_hf_name(name): name for name in file.names}
        names = set(self._gguf_name)
        if EMBEDDING not in names:
            raise ModelError(f"{path}: tensor 'token_embd.weight' is missing")
        factors: tuple[float, ...] = ()
        if self._gguf_name.pop(_ROPE_FACTORS, None):
            factors = tuple(file.read(_ROPE_FACTORS).reshape(-1).tolist())
        self.config = config_from_gguf(
            file.metadata,
            vocab_size=next(iter(file.shape("token_embd.weight")), 0),
            tied=HEAD not in names,
            biases=[kind for kind, name in _BIAS_PROBES.items() if name in names],
            frequency_factors=factors,
        )
        # Rotation pairs neighbours in GGUF's llama, halves in transformers: rows of q and k are permuted.
        self._permuted_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._permuted_heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        self.fingerprint = _digest(file.header, str(path.stat().st_size).encode())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.shape(gguf_name) for name, gguf_name in self._gguf_name.items()}

    def label(self, name: str) -> str:
        return f"{self._gguf_name.get(name) or _to_gguf_name(name)!r} ({self._file.path})"

    def read(self, name: str) -> np.ndarray:
        tensor = self._file.read(self._gguf_name[name])
        heads = self._permuted_heads.get(name.split(".")[-2], 0)
        if not heads:
            return tensor
        pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)


_ROPE_FACTORS = "rope_freqs.weight"
_HF_OF_GGUF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_OF_HF = {hf: gguf for gguf, hf in _HF_OF_GGUF.items()}
_BIAS_PROBES = {
    "qkv": "model.layers.0.self_attn.q_proj.bias",
    "o": "model.layers.0.self_attn.o_proj.bias",
    "mlp": "model.layers.0.mlp.down_proj.bias",
}


def _hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown ones keep theirs and are refused later."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if not match or match[2] not in _HF_OF_GGUF:
        return gguf_name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_HF_OF_GGUF[match[2]]}.{match[3]}"


def _to_gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if match:
        return f"blk.{match[1]}.{_GGUF_OF_HF.get(match[2], match[2])}.{kind}"
    return f"{_GGUF_OF_HF.get(stem, stem)}.{kind}"


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two matrices hold the same numbers, read a few rows at a time up to the first difference."""
    if first.shape != second.shape:
        return False
    rows = range(0, len(first), _ROWS_COMPARED)
    parts = ((first[row : row + _ROWS_COMPARED], second[row : row + _ROWS_COMPARED]) for row in rows)
    return all(np.array_equal(a.astype(np.float32), b.astype(np.float32)) for a, b in parts)


def no_weights(folder: Path) -> ModelError:
    """The error for a folder without weights that can be read; it says what to do about those that can't."""
    hint = ""
    if (folder / ADAPTER_NAME).is_file():
        hint = f"; {ADAPTER_NAME} is an adapter's: merge it into its base model, and save that"
    elif found := [*sorted(folder.glob("pytorch_model*.bin")), *sorted(folder.glob("*.pth"))]:
        hint = f"; {found[0].name} is in PyTorch's own form: save the model as safetensors"
    return ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME} nor a .gguf file{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelError names the file if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
