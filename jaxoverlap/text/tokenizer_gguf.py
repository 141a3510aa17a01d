"""A tokenizer rebuilt from GGUF metadata, with the tokenizers library alone.

GGUF names the pre-tokenizer instead of describing it, so only the ones known exactly are accepted:
a wrong split of digits shows as slightly worse answers, never as an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxoverlap.errors import ModelError
from jaxoverlap.text.tokenizer import Tokenizer, named_template, unreadable

_CONTROL, _USER_DEFINED = 3, 4
_TEMPLATE_KEY = "tokenizer.chat_template"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """See `Tokenizer.from_gguf`."""

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    if (model := get("model")) != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {model!r}: not supported in this build; allowed: gpt2 (BPE)")
    tokens, types, merges = get("tokens"), get("token_type"), get("merges")
    lists = all(isinstance(given, list) for given in (tokens, types, merges))
    if not (lists and tokens and len(tokens) == len(types) and all(isinstance(token, str) for token in tokens)):
        raise ModelError("tokenizer.ggml: tokens (texts), token_type (one per token) and merges are needed")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: a token appears twice")
    pre = get("pre")
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=[_pair(merge) for merge in merges], ignore_merges=pre == "llama-bpe")
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise unreadable("tokenizer.ggml", error) from error
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    # Both kinds are matched in the text before it is split; only control tokens are hidden when decoding.
    backend.add_special_tokens(_added(tokens, types, _CONTROL))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED))

    ids = {name: get(f"{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    for name, token_id in ids.items():
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise ModelError(f"tokenizer.ggml: {name} has id {token_id!r}, outside the {len(tokens)} tokens")
    special_tokens = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    bos = special_tokens.get("bos_token") if get("add_bos_token", pre == "llama-bpe") else None
    eos = special_tokens.get("eos_token") if get("add_eos_token", False) else None
    backend.post_processor = _bos_eos_processor(backend, bos, eos)
    return Tokenizer(
        backend,
        bos_token_id=ids["bos_token"],
        eos_token_ids=[] if ids["eos_token"] is None else [ids["eos_token"]],
        chat_template=named_template(_templates(metadata), special_tokens),
    )


def _bos_eos_processor(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.PostProcessor:
    """Puts BOS and EOS, where given, around every encoded text."""
    around = [token for token in (bos, eos) if token]
    single = " ".join([f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos))
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in around],
    )


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _pre_tokenizer(pre: str | None) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not isinstance(pre, str | None):
        raise ModelError(f"tokenizer.ggml.pre is {pre!r}; it must be a name")
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(pre or "")
    if split is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {pre!r}: not supported in this build; allowed: gpt-2, llama-bpe, qwen2, smollm"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=wanted == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _pair(merge: str) -> tuple[str, str]:
    # From the second character on: the first part is never empty, but may itself be a space.
    left_end = merge.find(" ", 1)
    return merge[:left_end], merge[left_end + 1 :]


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata[_TEMPLATE_KEY]} if _TEMPLATE_KEY in metadata else {}
    prefix = f"{_TEMPLATE_KEY}."
    templates |= {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ModelError(f"{_TEMPLATE_KEY}: the template {name!r} is {template!r}; it must be a text")
    return templates
