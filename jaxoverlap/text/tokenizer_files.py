"""A tokenizer from the files of a Hugging Face folder.

tokenizer.json is what transformers' fast tokenizers run on; it is read directly because importing
transformers takes seconds. tokenizer_config.json adds names (bos, eos) and the chat template. Whether a
BOS is added is tokenizer.json's to say: `add_bos_token` is not read, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxoverlap.errors import ModelError
from jaxoverlap.model.checkpoint import read_json
from jaxoverlap.text.tokenizer import Tokenizer, named_template, unreadable

_ADDED_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(folder: Path) -> Tokenizer:
    """See `Tokenizer.from_folder`."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # the older form, where this file has the last word
        config |= _read_json(folder / "special_tokens_map.json")
    names = _named_tokens(config)
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise unreadable(str(path), error) from error
        if "added_tokens_decoder" not in config:
            config["added_tokens_decoder"] = _older_added_tokens(folder, config, backend)
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
    for token_id, token in _added_tokens(config):
        is_new = backend.token_to_id(token.content) is None
        backend.add_tokens([token])
        if is_new and backend.token_to_id(token.content) != token_id:
            next_id = backend.token_to_id(token.content)
            raise ModelError(
                f"added token {token.content!r} has id {token_id}, and tokenizer.json, which lacks it, has room for "
                f"{next_id}: the tokenizer's files contradict each other"
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for content in names.values():
        if content not in special:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    added = _added_contents(backend)
    for content in _more_special_tokens(config):
        if content not in added:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))


def _added_tokens(config: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise _wrong("added_tokens_decoder", entries, "an object of ids and tokens")
    tokens: list[tuple[int, AddedToken]] = []
    for token_id, entry in entries.items():
        try:
            options = {key: entry[key] for key in _ADDED_OPTIONS if key in entry}
            tokens.append((int(token_id), AddedToken(entry["content"], **options)))
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong(f"added_tokens_decoder[{token_id!r}]", entry, "a token with its content") from error
    return sorted(tokens, key=lambda pair: pair[0])


def _older_added_tokens(folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """What added_tokens.json has beyond tokenizer.json, as the field that took its place."""
    special = {*_named_tokens(config).values(), *_more_special_tokens(config)}
    known = _added_contents(backend)
    return {
        str(token_id): {"content": content, "special": content in special}
        for content, token_id in _read_json(folder / "added_tokens.json").items()
        if content not in known
    }


def _added_contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _more_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Those without a role, in either spelling."""
    found = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(found, list | dict):
        raise _wrong("additional_special_tokens", found, "a list of tokens")
    return [] if isinstance(found, dict) else [_content("additional_special_tokens", token) for token in found]


def _through_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Older forms (vocab and merges, sentencepiece), converted by transformers."""
    try:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return loaded.backend_tokenizer, dict(loaded.special_tokens_map)
    except Exception as error:
        raise ModelError(f"{folder} has no tokenizer.json, and no other tokenizer could be read: {error}") from error


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; the newer files win over tokenizer_config.json."""
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    try:
        templates = {entry["name"]: entry["template"] for entry in found} if isinstance(found, list) else dict(found)
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong("chat_template", found, "a text, or a list of objects with name and template") from error
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths = {"default": folder / "chat_template.jinja", **paths}
    for name, path in paths.items():
        try:
            templates[name] = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: can't be read: {error}") from error
    return templates


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role, from either spelling: plain text, or an object with its content. Templates see all of them.

    As in transformers the roles of a model's own are the other fields that end in `_token`, and those of an object of
    extra tokens.
    """
    places = {name: name for name in config if name in _NAMES or name.endswith("_token")}
    found = {name: config[name] for name in places if name in _NAMES or isinstance(config[name], str | dict)}
    for field in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
        if isinstance(extra := config.get(field), dict):
            own = {name: token for name, token in extra.items() if name not in _NAMES}
            found |= own
            places |= {name: f"{field}.{name}" for name in own}
    return {name: _content(places[name], token) for name, token in found.items() if token}


def _content(name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise _wrong(name, token, "a text, or an object with its content")
    return content


def _wrong(field: str, value: Any, allowed: str) -> ModelError:
    return ModelError(f"tokenizer_config.json: {field} is {value!r}; it must be {allowed}")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
