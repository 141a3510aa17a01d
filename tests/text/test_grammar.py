"""Masks allow exactly what a grammar does, whatever the tokenizer; a sequence ends complete, or in an error."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest

from jaxoverlap.constraint import TokenConstraint
from jaxoverlap.text.detokenizer import IncrementalDetokenizer
from tests.grammar_tools import (
    EOS_IDS,
    TABLE_SIZE,
    JsonWriter,
    allowed_ids,
    byte_level_tokenizer,
    constraint,
    make_compiler,
    random_schema,
    sentencepiece_tokenizer,
    walk,
)

TOKENIZERS = {
    "byte-level": byte_level_tokenizer,
    "llama2": lambda: sentencepiece_tokenizer(byte_fallback=True),
    "metaspace": lambda: sentencepiece_tokenizer(byte_fallback=False),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_compiler(request):
    compiler = make_compiler(TOKENIZERS[request.param]())
    compiler.tokenizer = TOKENIZERS[request.param]()
    compiler.joins_bytes = request.param != "metaspace"
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def compiler():
    compiler = make_compiler()
    yield compiler
    compiler.close()


def id_of(text: str) -> int:
    tokenizer = byte_level_tokenizer()
    return next(i for i in range(TABLE_SIZE) if tokenizer.token_bytes(i) == text.encode())


def advance(made, text: str) -> None:
    """A text by its single bytes."""
    for byte in text.encode():
        made.advance(next(i for i in range(5, TABLE_SIZE) if byte_level_tokenizer().token_bytes(i) == bytes([byte])))


# ------------------------------------------------------------------ what a mask allows


def texts_of_regex() -> set[str]:
    bodies, found = {""}, set()
    for _ in range(3):
        bodies = {body + part for body in bodies for part in ("a", "ab", "b ")}
        found |= {body + end for body in bodies for end in ("", "c")}
    return found


CHOICES = ["a", "ab", "abc ab", "é", "日本", " a", '{"a"}']
ITEMS = ["ab", "1", "é"]
COMPACT = {"whitespace_flexible": False}
LANGUAGES = {  # and all their texts
    "choices": ({"choices": CHOICES}, set(CHOICES)),
    "regex": ({"regex": "(a|ab|b ){1,3}c?"}, texts_of_regex()),
    "grammar": (
        {"grammar": 'start: x ("," x)? "."\nx: "ab" | "1" | "é"'},
        {f"{a}." for a in ITEMS} | {f"{a},{b}." for a in ITEMS for b in ITEMS},
    ),
    "json_schema": (
        {"json_schema": {"enum": ["ab", 1, None, {"a": [True]}], "x-guidance": COMPACT}},
        {'"ab"', "1", "null", '{"a":[true]}'},
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_id_is_allowed_exactly_if_a_text_of_the_language_goes_on_with_it(any_compiler, name):
    tokenizer = any_compiler.tokenizer
    structure, texts = LANGUAGES[name]
    rng = np.random.default_rng(0)

    def text_of(ids):
        return tokenizer.decode(ids, skip_special_tokens=False)

    reachable = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids and tokenizer.token_bytes(i)]
    for _ in range(30):
        made, ids = constraint(any_compiler, **structure), []
        while not made.is_complete:

            def goes_on(token_id, ids=ids):
                # In bytes, because a token may hold part of a character; and the text must be these bytes.
                raw = b"".join(tokenizer.token_bytes(i) or b"" for i in [*ids, token_id])
                try:
                    exact = text_of([*ids, token_id]) == raw.decode()
                except UnicodeDecodeError:
                    exact = any_compiler.joins_bytes
                return exact and any(text.encode().startswith(raw) for text in texts)

            expected = [i for i in reachable if goes_on(i)]
            ends = list(EOS_IDS) if text_of(ids) in texts else []
            assert allowed_ids(made) == sorted(ends + expected), (name, text_of(ids))
            ids.append(int(rng.choice(expected)))
            made.advance(ids[-1])
            assert made.error is None
        assert text_of(ids) in texts
        assert allowed_ids(made) == []


def test_special_tokens_and_rows_without_a_token_never_come_as_text(compiler):
    made = constraint(compiler, regex="(?s).*")
    tokenizer = byte_level_tokenizer()
    for _ in range(5):
        allowed = set(allowed_ids(made))
        assert allowed & tokenizer.special_ids == set(EOS_IDS)
        assert max(allowed) < tokenizer.vocab_size < TABLE_SIZE
        assert id_of("<note>") in allowed  # user-defined tokens are text
        made.advance(id_of("a"))


def test_a_grammar_may_name_a_special_token(compiler):
    made = constraint(compiler, grammar='start: "a" <|tool|> "b"')
    made.advance(id_of("a"))
    assert allowed_ids(made) == [4]
    made.advance(4)
    made.advance(id_of("b"))
    assert made.is_complete


def test_a_table_smaller_than_the_tokenizer_allows_only_its_own_ids():
    for size in (255, 256, 257):
        small = make_compiler(table_size=size)
        made = constraint(small, regex="(?s).*")
        assert max(allowed_ids(made, size)) < size
        small.close()


def test_a_space_that_decoding_drops_is_not_counted_on():
    compiler = make_compiler(tokenizer := sentencepiece_tokenizer(byte_fallback=True))
    try:
        first = allowed_ids(constraint(compiler, regex="[ab ]+"))
        assert {tokenizer.backend.id_to_token(i) for i in first} == {"a", "b", "ab", "<0x61>", "<0x62>"}
        made = constraint(compiler, regex="[ab ]+")
        made.advance(tokenizer.backend.token_to_id("a"))
        assert tokenizer.backend.token_to_id("▁b") in allowed_ids(made)
        made = constraint(compiler, regex=" a")  # no text of this tokenizer begins with a space
        assert "dead end" in made.error and allowed_ids(made) == []
    finally:
        compiler.close()


def test_behind_a_prompt_with_text_a_text_may_begin_with_a_space():
    compiler = make_compiler(tokenizer := sentencepiece_tokenizer(byte_fallback=True))
    of = tokenizer.backend.token_to_id
    try:
        rng = np.random.default_rng(2)
        for prompt in ([of("<s>"), of("ab")], [of("▁")], [of("<0x0A>")]):
            first = allowed_ids(constraint(compiler, regex=" [ab]", prompt_ids=prompt))
            assert {tokenizer.backend.id_to_token(i) for i in first} == {"▁", "▁a", "▁b", "<0x20>"}
            for _ in range(10):
                ids = walk(
                    constraint(compiler, regex=" *[ab]+1", prompt_ids=prompt), lambda ids: int(rng.choice(ids)), 99
                )
                detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
                text = detokenizer.add(ids) + detokenizer.finish()
                assert re.fullmatch(" *[ab]+1", text) and text.encode() == b"".join(map(tokenizer.token_bytes, ids))
        assert "dead end" in constraint(compiler, regex=" a", prompt_ids=[of("<s>")]).error
        shown = {"skip_special_tokens": False}
        assert constraint(compiler, shown, regex=" a", prompt_ids=[of("<s>")]).error is None
    finally:
        compiler.close()


def test_random_texts_match_their_regex(any_compiler):
    rng = np.random.default_rng(1)
    for regex in ("[12]{4}", "a+", "(a|b{2,3}é?)+", "[^a]{3}", "[12]{2}:1( a)?", "日*本?a"):
        for _ in range(10):
            made = constraint(any_compiler, regex=regex)
            ids = walk(made, lambda allowed: int(rng.choice(allowed)), 60)
            if made.is_complete:
                text = any_compiler.tokenizer.decode([i for i in ids if i not in EOS_IDS], skip_special_tokens=False)
                assert re.fullmatch(regex, text), (regex, text)


# ------------------------------------------------------------------ JSON


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_schemas_give_valid_json(compiler, start):
    tokenizer = byte_level_tokenizer()
    for seed in range(start, start + 50):
        schema = random_schema(np.random.default_rng(seed))
        made = constraint(compiler, json_schema=schema)
        ids = walk(made, JsonWriter(tokenizer, seed), 600)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert made.is_complete, (seed, schema, text)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_any_json_is_an_object(compiler):
    for seed in range(10):
        made = constraint(compiler, any_json=True)
        ids = walk(made, JsonWriter(byte_level_tokenizer(), seed), 400)
        assert isinstance(json.loads(byte_level_tokenizer().decode(ids)), dict)


@pytest.mark.parametrize(
    ("begin", "structure"),
    [
        ("{", {"any_json": True}),
        ("{", {"json_schema": {}}),
        ("[", {"json_schema": True}),
        ("[", {"json_schema": " true"}),
        ("[", {"json_schema": {"anyOf": [True]}}),
        ("[", {"json_schema": {"x-guidance": {"lenient": True}}}),
    ],
)
def test_white_space_between_json_tokens_is_bounded(compiler, begin, structure):
    made = constraint(compiler, **structure)
    made.advance(id_of(begin))
    spaces = 0
    while id_of(" ") in allowed_ids(made):
        made.advance(id_of(" "))
        spaces += 1
    assert spaces == 32 and made.error is None


def test_a_schema_is_taken_as_text_and_as_values(compiler):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    for given in (schema, json.dumps(schema, indent=1)):
        made = constraint(compiler, json_schema=given)
        advance(made, '{"a": 1}')
        assert made.is_complete


# ------------------------------------------------------------------ ends


def test_ends_are_allowed_exactly_where_the_grammar_accepts(compiler):
    made = constraint(compiler, regex="a+b?")
    assert set(allowed_ids(made)) == {id_of("a"), id_of("ab")}
    made.advance(id_of("a"))
    assert set(allowed_ids(made)) == {id_of("a"), id_of("ab"), id_of("b"), *EOS_IDS}
    made.advance(EOS_IDS[1])  # llguidance knows one end, a model may have several
    assert made.is_complete and made.error is None


def test_a_text_that_nothing_can_follow_is_complete_without_an_end(compiler):
    made = constraint(compiler, regex="[0-9]{4}")
    advance(made, "123")
    assert not made.is_complete
    advance(made, "4")
    assert made.is_complete and made.error is None and allowed_ids(made) == []


def test_ignore_eos_goes_on_while_the_grammar_does_and_then_completes(compiler):
    made = constraint(compiler, {"ignore_eos": True}, regex="a{1,3}")
    for _ in range(3):
        assert not made.is_complete and not set(allowed_ids(made)) & set(EOS_IDS)
        made.advance(id_of("a"))
    assert made.is_complete


def test_min_tokens_keeps_ends_away_but_never_leaves_the_grammar(compiler):
    made = constraint(compiler, {"min_tokens": 3}, regex="a{1,4}")
    for count in range(1, 4):
        made.advance(id_of("a"))
        assert (EOS_IDS[0] in allowed_ids(made)) == (count >= 3)
    short = constraint(compiler, {"min_tokens": 9}, regex="a{1,2}")
    advance(short, "aa")
    assert short.is_complete


def test_min_tokens_keeps_stop_ids_that_are_text_away(compiler):
    made = constraint(compiler, {"min_tokens": 1, "stop_token_ids": [id_of("b")]}, regex="[ab]{3}")
    assert id_of("b") not in allowed_ids(made)
    made.advance(id_of("a"))
    assert id_of("b") in allowed_ids(made)


def test_a_stop_id_without_text_is_an_end(compiler):
    made = constraint(compiler, {"stop_token_ids": [4], "ignore_eos": True}, regex="a+")
    assert 4 not in allowed_ids(made)
    made.advance(id_of("a"))
    assert 4 in allowed_ids(made) and not set(allowed_ids(made)) & set(EOS_IDS)
    made.advance(4)
    assert made.is_complete


def test_a_stop_id_that_is_text_comes_only_where_the_grammar_has_it(compiler):
    made = constraint(compiler, {"stop_token_ids": [id_of("b")]}, regex="aab")
    assert id_of("b") not in allowed_ids(made)
    advance(made, "aa")
    assert allowed_ids(made) == [id_of("b")]


def test_an_end_that_the_parameters_forbid_does_not_come(compiler):
    for sampling in ({"banned_token_ids": [EOS_IDS[0]]}, {"allowed_token_ids": [id_of("a"), EOS_IDS[1]]}):
        made = constraint(compiler, sampling, regex="a+")
        made.advance(id_of("a"))
        assert EOS_IDS[0] not in allowed_ids(made) and EOS_IDS[1] in allowed_ids(made)


# ------------------------------------------------------------------ dead ends and faults


def test_a_dead_end_is_an_error_and_allows_nothing(compiler):
    made = constraint(compiler, {"banned_token_ids": [id_of("b"), id_of("ab")]}, regex="aab")
    advance(made, "aa")
    assert made.error is not None and "dead end" in made.error
    assert not made.is_complete and allowed_ids(made) == []


@pytest.mark.parametrize("wrong", [5, EOS_IDS[0], 4, TABLE_SIZE - 1, TABLE_SIZE + 500, -1])
def test_an_id_that_the_mask_does_not_have_is_an_error(compiler, wrong):
    made = constraint(compiler, regex="ab")
    made.advance(wrong)
    assert made.error is not None and not made.is_complete and allowed_ids(made) == []


def test_a_constraint_is_what_the_engine_asks_for(compiler):
    made: TokenConstraint = constraint(compiler, regex="ab")
    assert made.error is None and not made.is_complete
