"""What a text must be, as a grammar and as a mask over token ids.

`grammar_of` turns a `StructuredOutput` into the form that llguidance compiles. A `GrammarConstraint` is one sequence's
place in it, and says which ids may come:

- ids whose bytes can go on in the grammar. No canonical tokenization is forced: an id is allowed exactly if the
  grammar accepts it;
- ids that end the text, exactly where the grammar accepts the text so far and `min_tokens` are there: the model's
  end-of-sequence ids (unless `ignore_eos`), and those of `stop_token_ids` that end the text without being text;
- less those that the sampling parameters forbid.

Where no text can follow, the sequence ends: complete if the grammar accepts, else in error. So `ignore_eos` and
`min_tokens` can't lead beyond the grammar.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.text.grammar_trial import DEAD_END, matcher_error
from jaxoverlap.text.grammar_vocabulary import GrammarVocabulary

MAX_GRAMMAR_CHARS = 1 << 18

MAX_SCHEMA_DEPTH = 120
"""Lists and objects within each other; llguidance's JSON reader ends a little beyond that."""

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between JSON's tokens. Enough for an indented line; without a bound, a model may go on with spaces forever."""

_ANY_OBJECT = {"type": "object"}
_EXACT_MASKS = '\n%llguidance {"no_forcing": true}'


def grammar_of(structure: StructuredOutput) -> tuple[str, str]:
    """The field that says it, and llguidance's grammar.

    Raises:
      InvalidRequestError: a schema that is no JSON or nested too deeply, or anything too long or no valid Unicode.
    """
    try:
        field, inner = _inner(structure)
        grammar = json.dumps({"grammars": [{"name": "start", "lark_grammar": f"start: @text{_EXACT_MASKS}"}, inner]})
    except RecursionError as error:  # of Python's JSON, at a depth that depends on who calls
        raise InvalidRequestError(f"structured_output.{_SCHEMA}", structure.json_schema, _TOO_DEEP) from error
    if len(grammar) > 2 * MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"structured_output.{field}", f"{len(grammar)} characters", _TOO_LONG)
    return field, grammar


_SCHEMA = "json_schema"
_TOO_LONG = f"use one of at most {MAX_GRAMMAR_CHARS} characters"
_TOO_DEEP = f"use one of at most {MAX_SCHEMA_DEPTH} lists and objects within each other"


def _inner(structure: StructuredOutput) -> tuple[str, dict[str, Any]]:
    if structure.regex is not None:
        return "regex", _lark(f"start: /{llguidance.regex_to_lark(_checked('regex', structure.regex))}/")
    if structure.grammar is not None:
        return "grammar", _lark(_checked("grammar", structure.grammar))
    if structure.choices is not None:
        escaped = [_regex_of(text) for text in structure.choices]
        return "choices", _lark(f"start: /{'|'.join(escaped)}/")
    if structure.json_schema is not None:
        return _SCHEMA, _json(_schema(structure.json_schema))
    return "any_json", _json(_ANY_OBJECT)


def _lark(source: str) -> dict[str, Any]:
    return {"name": "text", "lark_grammar": source}


def _json(schema: Any) -> dict[str, Any]:
    """With a bound on white space, unless the schema has options of its own for it (`x-guidance`)."""
    if schema is True:
        schema = {}  # the same
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise InvalidRequestError(f"structured_output.{_SCHEMA}", schema, "x-guidance is an object")
        if not options.get("lenient") and _has_nullable(schema):
            raise InvalidRequestError(f"structured_output.{_SCHEMA}", schema, _NULLABLE)
        if not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
            schema = schema | {"x-guidance": options | {"whitespace_pattern": JSON_WHITESPACE}}
    return {"name": "text", "json_schema": schema}


def _schema(given: str | Mapping[str, Any] | bool) -> Any:
    """As decoded JSON, whatever it was given as."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False, default=dict)
        schema = json.loads(_checked(_SCHEMA, text))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"structured_output.{_SCHEMA}", given, f"use JSON: {error}") from error
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(f"structured_output.{_SCHEMA}", given, _TOO_DEEP)
    return schema


_NULLABLE = 'nullable is OpenAPI\'s and no keyword of JSON Schema: use "type": [..., "null"]'
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas by names of the caller's own."""
_DATA = ("const", "enum", "default", "example", "examples")
"""Keywords whose value is no schema."""


def _has_nullable(schema: Any) -> bool:
    """OpenAPI's keyword promises that null may come; ignored, as unknown keywords are, it would never come."""
    if isinstance(schema, list):
        return any(map(_has_nullable, schema))
    if not isinstance(schema, dict):
        return False
    if schema.get("nullable") is True:
        return True
    named = [inner for name in _NAMED if isinstance(schema.get(name), dict) for inner in schema[name].values()]
    return any(map(_has_nullable, named)) or any(
        _has_nullable(inner)
        for name, inner in schema.items()
        if name not in (*_NAMED, *_DATA) and not name.startswith("x-")
    )


def _depth(value: Any) -> int:
    """Lists and dicts within each other."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _checked(name: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"structured_output.{name}", f"{len(text)} characters", _TOO_LONG)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"structured_output.{name}", text, f"valid Unicode is needed: {error}") from error
    return text


def _regex_of(text: str) -> str:
    _checked("choices", text)
    return re.sub("[^0-9A-Za-z]", lambda char: f"\\x{{{ord(char[0]):x}}}", text)


class GrammarConstraint:
    """A `TokenConstraint`. Not for two threads at once.

    Args:
      matcher: at the beginning of its text; from now on this constraint's own.
      vocabulary: the model's.
      sampling: the request's.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary, sampling: SamplingParams) -> None:
        self.is_complete = False
        self.error: str | None = None
        self._matcher = matcher
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._end_ids = vocabulary.end_ids(sampling)
        self._texts, self._ends = vocabulary.allowed_words(sampling, self._end_ids)
        self._early_texts = self._texts
        if sampling.min_tokens and sampling.stop_token_ids:  # where the device does not let them come
            self._early_texts = self._texts & ~vocabulary.words_of(sampling.stop_token_ids)
        self._words = np.zeros(vocabulary.num_matcher_words, dtype=np.int32)
        self._pointer = self._words.ctypes.data
        self._mask = np.zeros(vocabulary.num_words, dtype=np.int32)
        self._update()

    def copy(self) -> GrammarConstraint:
        """Another sequence's, at the same place; may be called from several threads while nothing else is."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._mask = self._mask.copy()
        other._words = self._words.copy()
        other._pointer = other._words.ctypes.data
        return other

    def begun_with(self, beginnings: np.ndarray) -> GrammarConstraint:
        """Another one, at its first token, which must be one of these: int32 [num_words]."""
        other = self.copy()
        other._mask &= beginnings
        if not other._mask.any():
            other._fail(DEAD_END)
        return other

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = self._mask

    def advance(self, token_id: int) -> None:
        if not self._allows(token_id):
            self._fail(f"id {token_id} came, which the grammar does not allow here")
        elif token_id in self._end_ids:
            self.is_complete = True
            self._mask[:] = 0
        elif not self._matcher.consume_token(token_id):
            self._fail(matcher_error(self._matcher))
        else:
            self._num_tokens += 1
            self._update()

    def _allows(self, token_id: int) -> bool:
        return 0 <= token_id < 32 * len(self._mask) and bool(self._mask[token_id >> 5] >> (token_id & 31) & 1)

    def _update(self) -> None:
        """Works out what may come next, once per token: whether anything may says if this was the last."""
        self._matcher.unsafe_compute_mask_ptr(self._pointer, self._words.nbytes)
        if self._matcher.is_error():  # the words mean nothing then
            self._fail(matcher_error(self._matcher))
            return
        early = self._num_tokens < self._min_tokens
        np.bitwise_and(self._words[: len(self._mask)], self._early_texts if early else self._texts, out=self._mask)
        accepts = self._matcher.is_accepting()
        if not self._mask.any():
            if accepts:
                self.is_complete = True
            else:
                self._fail(DEAD_END)
        elif accepts and not early:
            self._mask |= self._ends

    def _fail(self, error: str) -> None:
        self.error = error
        self._mask[:] = 0
