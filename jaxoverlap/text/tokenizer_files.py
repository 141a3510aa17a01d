"""A tokenizer from the files of a Hugging Face folder.

tokenizer.json is what transformers' fast tokenizers run on; it is read directly because importing
transformers takes seconds. tokenizer_config.json adds names (bos, eos) and the chat template. Whether a
BOS is added is tokenizer.json's to say: `add_bos_token` is not read, as in transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxoverlap.errors import ModelError
from jaxoverlap.text.tokenizer import Tokenizer, named_template, unreadable

_ADDED_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(folder: Path) -> Tokenizer:
    """See `Tokenizer.from_folder`."""
    config = _read_json(folder / "tokenizer_config.json")
    names = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise unreadable(str(path), error) from error
        _apply_config(backend, config, names)
    else:
        backend, names = _through_transformers(folder)
    bos, eos = (backend.token_to_id(names[n]) if n in names else None for n in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[] if eos is None else [eos],
        chat_template=named_template(_templates(folder, config), names),
    )


def _apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """What transformers adds to tokenizer.json on the word of tokenizer_config.json."""
    for entry in (config.get("added_tokens_decoder") or {}).values():
        if backend.token_to_id(entry["content"]) is not None:
            options = {key: entry.get(key, False) for key in _ADDED_OPTIONS}
            backend.add_tokens([AddedToken(entry["content"], **options)])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for content in names.values():
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _through_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Older forms (vocab and merges, sentencepiece), converted by transformers."""
    try:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return loaded.backend_tokenizer, _named_tokens(loaded.special_tokens_map)
    except Exception as error:
        raise ModelError(f"{folder} has no tokenizer.json, and no other tokenizer could be read: {error}") from error


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; the newer files win over tokenizer_config.json."""
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    templates = dict(found)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    return templates


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role, from either spelling: plain text, or an object with its content."""
    values = {name: config[name] for name in _NAMES if config.get(name)}
    return {name: value["content"] if isinstance(value, dict) else str(value) for name, value in values.items()}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value
