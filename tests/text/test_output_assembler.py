"""Text, ids and log-probabilities leave together, and nothing from beyond a stop string leaves at all."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.outputs import TokenScore
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.detokenizer import IncrementalDetokenizer
from jaxoverlap.text.logprobs import prompt_logprobs
from jaxoverlap.text.output_assembler import OutputAssembler, Piece
from jaxoverlap.text.stop_strings import StopStrings
from jaxoverlap.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import HARD_TEXT, llama2_decoder, word_tokenizer
from tests.tiny_models import make_tokenizer


def piece_tokenizer(*pieces: str) -> Tokenizer:
    """Byte-level; each piece is a token of its own, from id 300 on."""
    backend = make_tokenizer()
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return Tokenizer(backend)


BYTE_LEVEL = Tokenizer(make_tokenizer())
METASPACE = word_tokenizer(decoders.Metaspace(), byte_fallback=False)
LLAMA2 = word_tokenizer(llama2_decoder(), byte_fallback=True)
TOKENIZERS = {"byte-level": BYTE_LEVEL, "metaspace": METASPACE, "llama2": LLAMA2}


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(piece) for piece in pieces]
    assert None not in ids
    return ids


def score(token_id: int, place: int) -> TokenScore:
    return TokenScore(token_id, -0.5 - place, place + 1, ((token_id, -0.5), (1, -3.0), (2, -4.0)))


def run(tokenizer, ids, sizes, matched_token_id=None, prompt_ids=(), **params) -> tuple[list[Piece], OutputAssembler]:
    """Feeds ids in deltas; the last of them with `finish`."""
    assembler = OutputAssembler(tokenizer, SamplingParams(**params), prompt_ids)
    scores = [score(token_id, place) for place, token_id in enumerate(ids)] if "logprobs" in params else []
    bounds = [0, *itertools.accumulate(sizes)]
    assert bounds[-1] == len(ids)
    pieces = [
        assembler.add(ids[start:end], scores[start:end]) for start, end in itertools.pairwise(bounds[:-1])
    ]  # fmt: skip
    last = bounds[-2] if len(bounds) > 1 else 0
    return [*pieces, assembler.finish(ids[last:], scores[last:], matched_token_id=matched_token_id)], assembler


def joined(pieces: list[Piece]) -> tuple[str, list[int], list]:
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return "".join(piece.text for piece in pieces), ids, [one for piece in pieces for one in piece.logprobs]


def first_match(text: str, stops, after: int = 0) -> tuple[int, str] | None:
    """By trying every place: where the first match ends, beyond so many characters, and the longest that ends there."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def readable(tokenizer, ids) -> list[str]:
    """For each number of ids the text that may be looked at: what is certain, and whole characters of byte tokens."""
    detokenizer, certain, texts = IncrementalDetokenizer(tokenizer), "", [""]
    shown = [i for i in ids if i not in tokenizer.special_ids]
    for count in range(1, len(ids) + 1):
        certain += detokenizer.add(ids[count - 1 : count])
        seen = [i for i in ids[:count] if i in shown and tokenizer.token_bytes(i) is not None]
        run = list(itertools.takewhile(tokenizer.is_byte_token, reversed(seen)))[::-1]
        whole_run = b"".join(tokenizer.token_bytes(i) for i in run)
        try:
            whole_run.decode()
            texts.append(tokenizer.decode(ids[:count]) if run else certain)
        except UnicodeDecodeError as error:
            is_cut = error.reason == "unexpected end of data"
            texts.append(texts[-1] if is_cut and len(texts[-1]) > len(certain) else certain)
    return texts


def whole(tokenizer, ids, stops, *, min_tokens=0, include=False) -> tuple[str, int, str | None]:
    """What a sequence must come to: its text, how many ids, which stop."""
    texts = readable(tokenizer, ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    certain = "".join(detokenizer.add([i]) for i in ids[:min_tokens])
    before = texts[min(min_tokens, len(ids))]
    texts.append(tokenizer.decode(ids))
    for count, text in enumerate(texts):
        if min(count, len(ids)) <= min_tokens:
            continue
        # Characters that a bad byte has changed are not complete before the end of their run.
        before = before if text.startswith(before) else certain
        match = first_match(text, stops, after=len(before))
        if match is not None:
            end, stop = match
            return text[: end if include else end - len(stop)], min(count, len(ids)), stop
    return texts[-1], len(ids), None


def random_cuts(rng: random.Random, count: int) -> list[int]:
    sizes = []
    while sum(sizes) < count:
        sizes.append(min(rng.choice([0, 1, 1, 2, 3, 8]), count - sum(sizes)))
    return sizes


def check_all(tokenizer, ids, stops, rng, *, min_tokens=0, include=False) -> None:
    text, count, stop = whole(tokenizer, ids, stops, min_tokens=min_tokens, include=include)
    params = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include, "logprobs": 2}
    for sizes in ([1] * len(ids), [len(ids)], random_cuts(rng, len(ids)), random_cuts(rng, len(ids))):
        pieces, assembler = run(tokenizer, ids, sizes, **params)
        shown, released, logprobs = joined(pieces)
        assert (shown, released, assembler.matched_string) == (text, ids[:count], stop)
        assert [one.chosen.token_id for one in logprobs] == released
        assert assembler.cumulative_logprob == pytest.approx(sum(-0.5 - i for i in range(count))) or count == 0


# ---------------------------------------------------------------- any ids, any stops, any deltas


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(TOKENIZERS)), st.integers(0, 2**32))
def test_any_ids_and_stops_give_the_same_however_they_are_cut(data, name, seed):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    text = tokenizer.decode(ids)
    # Stops out of the text itself match; others seldom do.
    inside = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)).map(lambda at: text[at[0] : sum(at)])
    some = st.lists(st.one_of(inside, st.text(min_size=1, max_size=3)).filter(bool), min_size=1, max_size=5)
    stops = [stop for stop in data.draw(some) if not any(token in stop for token in tokenizer.special_tokens)]
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 3, 30]))
    check_all(tokenizer, ids, stops, random.Random(seed), min_tokens=min_tokens, include=data.draw(st.booleans()))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_few_characters_make_many_partial_matches(name):
    """Texts of a few letters, in which stops begin, break off and begin again all the time."""
    tokenizer = TOKENIZERS[name]
    letters = ["x", ".", ",", "é", "▁x", "▁the", "the", "a", "b", "Ã", "©", "Ġ"]
    some = [i for letter in letters if (i := tokenizer.backend.token_to_id(letter)) is not None]
    rng = random.Random(name)
    matches = 0
    for _ in range(400):
        ids = rng.choices(some, k=rng.randint(1, 20))
        text = tokenizer.decode(ids) or "x"
        stops = []
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            stops.append(text[at : at + rng.randint(1, 5)] + rng.choice(["", "", "x", "."]))
        check_all(tokenizer, ids, stops, rng, include=rng.random() < 0.5)
        matches += whole(tokenizer, ids, stops)[2] is not None
    assert 100 < matches < 400


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=5))
def test_the_automaton_finds_the_first_match_and_holds_the_longest_beginning(text, stops):
    automaton = StopStrings(stops)
    match = first_match(text, stops)
    state, *found = automaton.scan(0, text)
    assert tuple(found) == (match or (len(text), None))
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))} | {""}
    longest = max(len(start) for start in beginnings if text.endswith(start))
    assert automaton.held[automaton.skip(0, text)] == longest
    if match is None:
        assert automaton.held[state] == longest


# ---------------------------------------------------------------- what is held back


def test_text_that_can_not_become_a_stop_is_not_held_back():
    ids = BYTE_LEVEL.encode("no letter of it, at all.")
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams(stop=["ZZZZZZZZ", "Qu"]))
    for token_id in ids:
        piece = assembler.add([token_id])
        assert (piece.text, piece.token_ids) == (BYTE_LEVEL.decode([token_id]), [token_id])


def test_exactly_the_longest_possible_beginning_is_held_back():
    stops = ["own fox", "xyz", "oo"]
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams(stop=stops))
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    seen = shown = ""
    for char in "brown fore, own fo own, xy xylo, o. own fo":
        seen += char
        shown += assembler.add(BYTE_LEVEL.encode(char)).text
        assert seen == shown + max((start for start in beginnings if seen.endswith(start)), key=len)
    assert shown + assembler.finish().text == seen


def test_a_stop_over_two_tokens_shows_nothing_of_itself():
    tokenizer = piece_tokenizer("br", "own", " fo", "x jumps", " then")
    ids = ids_of(tokenizer, "br", "own", " fo", "x jumps", " then")
    pieces, assembler = run(tokenizer, ids, [1] * 5, stop="own fox", logprobs=0)
    assert [piece.text for piece in pieces] == ["br", "", "", "", ""]
    assert [piece.token_ids for piece in pieces] == [ids[:1], [], [], ids[1:4], []]
    assert assembler.matched_string == "own fox"


def test_a_token_waits_for_the_end_of_its_text_which_does_not_wait_for_it():
    tokenizer = piece_tokenizer("say no", "w.")
    first, second = ids_of(tokenizer, "say no", "w.")
    assembler = OutputAssembler(tokenizer, SamplingParams(stop="nothing", logprobs=0))
    piece = assembler.add([first], [score(first, 0)])
    assert (piece.text, piece.token_ids, piece.logprobs) == ("say ", [], [])
    piece = assembler.add([second], [score(second, 1)])
    assert (piece.text, piece.token_ids, len(piece.logprobs)) == ("now.", [first, second], 2)


def test_a_token_with_part_of_a_character_waits_for_the_rest():
    ids = BYTE_LEVEL.encode("🧠") + BYTE_LEVEL.encode("x")
    assert len(ids) > 2
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams())
    for token_id in ids[:-2]:
        assert assembler.add([token_id]).is_empty
    assert assembler.add(ids[-2:-1]) == Piece("🧠", ids[:-1], [])
    assert assembler.add(ids[-1:]) == Piece("x", ids[-1:], [])


# ---------------------------------------------------------------- what is cut


@pytest.mark.parametrize("stop", ["日", "é", "👍", "本語", "e\u0301", "👩‍👧"])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stops_outside_ascii_cut_between_characters(stop, size):
    text = f"x{stop[0]}日é👍{stop}本語 tail"
    ids = BYTE_LEVEL.encode(text)
    sizes = [min(size, len(ids) - at) for at in range(0, len(ids), size)]
    pieces, assembler = run(BYTE_LEVEL, ids, sizes, stop=stop)
    assert joined(pieces)[0] == text[: text.index(stop)]
    assert assembler.matched_string == stop
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_a_stop_inside_a_token_cuts_its_text_and_keeps_its_id():
    tokenizer = piece_tokenizer("well, no. Never")
    ids = [*ids_of(tokenizer, "well, no. Never"), 7, 8]
    for include, text in ((False, "well, no"), (True, "well, no.")):
        pieces, _ = run(tokenizer, ids, [3], stop=". ", include_stop_str_in_output=include)
        assert joined(pieces)[:2] == (text + (" " if include else ""), ids[:1])


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["ab", "abc"], "xxabc", "xx", "ab"),  # what ends first, though the other goes on
        (["abc", "bc"], "xxabc", "xx", "abc"),  # of those that end together the longest
        (["b", "abcd"], "xxabcd", "xxa", "b"),
        (["abcd", "bce"], "xabce", "xa", "bce"),  # a longer one breaks off, a shorter one within goes on
        (["aab"], "aaab", "a", "aab"),
        (["ab"], "ab", "", "ab"),
        (["abc"], "xxab", "xxab", None),  # what might have become one comes at the end
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_which_match_is_the_first(stops, text, shown, matched, size):
    ids = [i for char in text for i in BYTE_LEVEL.encode(char)]
    sizes = [1] * len(ids) if size == 1 else [len(ids)]
    pieces, assembler = run(BYTE_LEVEL, ids, sizes, stop=stops)
    assert (joined(pieces)[0], assembler.matched_string) == (shown, matched)


def test_nothing_leaves_after_a_stop():
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams(stop="."))
    assert assembler.add(BYTE_LEVEL.encode("a. b")).text == "a"
    assert assembler.add(BYTE_LEVEL.encode("more.")).is_empty
    assert assembler.finish(BYTE_LEVEL.encode("!")).is_empty
    with pytest.raises(ValueError, match="finished"):
        assembler.add([7])


def test_pieces_only_ever_append():
    """A stop that begins in text which has left can't be: what has left stays, and is not sent again."""
    tokenizer = piece_tokenizer("the e", "nd of i", "t")
    ids = ids_of(tokenizer, "the e", "nd of i", "t")
    assembler, shown = OutputAssembler(tokenizer, SamplingParams(stop="end of it")), ""
    for token_id in ids:
        shown += assembler.add([token_id]).text
        assert "the end".startswith(shown)
    assert shown + assembler.finish().text == "the "


# ---------------------------------------------------------------- ids that end a sequence, special tokens, min_tokens


@pytest.mark.parametrize("cut", [[1, 1, 1], [3], [2, 1]])
def test_the_text_of_the_id_that_ended_it_shows_only_if_asked(cut):
    tokenizer = piece_tokenizer("one", " two", "STOP")
    ids = ids_of(tokenizer, "one", " two", "STOP")
    for include, text in ((False, "one two"), (True, "one twoSTOP")):
        params = {"include_stop_str_in_output": include, "stop_token_ids": ids[2:], "logprobs": 1}
        pieces, assembler = run(tokenizer, ids, cut, matched_token_id=ids[2], **params)
        assert joined(pieces)[:2] == (text, ids) and len(joined(pieces)[2]) == 3
        # Not as a stop string either, which the flag would then decide about.
        pieces, assembler = run(tokenizer, ids, cut, matched_token_id=ids[2], stop="STOP", **params)
        assert joined(pieces)[0] == text and assembler.matched_string is None


def test_half_a_character_before_the_end_becomes_a_replacement_character():
    ids = [*BYTE_LEVEL.encode("🧠")[:-1], *ids_of(BYTE_LEVEL, "</s>")]
    pieces, _ = run(BYTE_LEVEL, ids, [1] * len(ids), matched_token_id=ids[-1])
    assert joined(pieces)[:2] == (BYTE_LEVEL.decode(ids), ids)
    assert "\ufffd" in joined(pieces)[0] and not any("\ufffd" in piece.text for piece in pieces[:-1])


def test_a_stop_before_the_end_in_the_same_delta_wins():
    ids = [*BYTE_LEVEL.encode("a.b"), *ids_of(BYTE_LEVEL, "</s>")]
    pieces, assembler = run(BYTE_LEVEL, ids, [len(ids)], matched_token_id=ids[-1], stop=".")
    assert (joined(pieces)[0], assembler.matched_string) == ("a", ".")
    assert joined(pieces)[1] == BYTE_LEVEL.encode("a.")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
def test_a_stop_that_is_a_hidden_special_token_matches(tokenizer):
    word = BYTE_LEVEL.encode("x") if tokenizer is BYTE_LEVEL else ids_of(METASPACE, "▁x")
    ids = [*word, *ids_of(tokenizer, "<s>", "</s>"), *word]
    for include in (False, True):
        pieces, assembler = run(tokenizer, ids, [1] * 4, stop="</s>", include_stop_str_in_output=include)
        assert joined(pieces)[:2] == ("x</s>" if include else "x", ids[:3])
        assert assembler.matched_string == "</s>"
    # Written out of ordinary tokens it is text, and matches as text.
    spelled = [i for char in "x</s>y" for i in BYTE_LEVEL.encode(char)]
    pieces, assembler = run(BYTE_LEVEL, spelled, [1] * len(spelled), stop="</s>")
    assert (joined(pieces)[0], assembler.matched_string) == ("x", "</s>")
    # And if special tokens are shown, it is text in any case.
    pieces, assembler = run(tokenizer, ids, [1] * 4, stop="</s>", skip_special_tokens=False)
    assert joined(pieces)[1] == ids[:3] and assembler.matched_string == "</s>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("cut", [[1, 1], [2]])
def test_a_stop_that_is_the_special_token_which_ended_the_sequence_matches(skip, cut):
    ids = [*BYTE_LEVEL.encode("x"), *ids_of(BYTE_LEVEL, "</s>")]
    params = {"logprobs": 1, "skip_special_tokens": skip}
    for include, text in ((False, "x"), (True, "x</s>")):
        pieces, assembler = run(
            BYTE_LEVEL,
            ids,
            cut,
            matched_token_id=ids[1],
            stop=["x.", "</s>"],
            include_stop_str_in_output=include,
            **params,
        )
        assert joined(pieces)[:2] == (text, ids) and len(joined(pieces)[2]) == 2
        assert assembler.matched_string == "</s>"
    # What comes before it may end the sequence first.
    pieces, assembler = run(BYTE_LEVEL, ids, cut, matched_token_id=ids[1], stop=["x", "</s>"], **params)
    assert (joined(pieces)[:2], assembler.matched_string) == (("", ids[:1]), "x")
    # Another special token that ends it is the model's end, as ever.
    pieces, assembler = run(BYTE_LEVEL, ids, cut, matched_token_id=ids[1], stop="<s>", **params)
    assert (joined(pieces)[:2], assembler.matched_string) == (("x", ids), None)


def test_a_special_token_within_a_stop_that_hides_it_is_refused():
    with pytest.raises(InvalidRequestError, match=r"stop\[1\]: .* skip_special_tokens hides .</s>."):
        OutputAssembler(BYTE_LEVEL, SamplingParams(stop=["x", "a</s>"]))
    OutputAssembler(BYTE_LEVEL, SamplingParams(stop=["x", "a</s>"], skip_special_tokens=False))


def test_many_long_stops_are_looked_through_once_for_all_samples():
    backend = make_tokenizer()
    backend.add_special_tokens([AddedToken(f"<|{place}|>", special=True) for place in range(1000)])
    tokenizer = Tokenizer(backend)
    sampling = SamplingParams(stop=[str(place) + "<|9" * 300 for place in range(64)])
    begun = time.process_time()
    for _ in range(128):
        OutputAssembler(tokenizer, sampling)
    assert time.process_time() - begun < 3  # each for itself they took 12
    with pytest.raises(InvalidRequestError, match=r"stop\[1\]: .* hides .<\|999\|>."):
        OutputAssembler(tokenizer, SamplingParams(stop=[sampling.stop[0], "<|9" * 300 + "<|999|>"]))


@pytest.mark.parametrize("cut", [[1, 1, 1], [3]])
def test_a_match_counts_if_it_ends_after_min_tokens_wherever_it_begins(cut):
    tokenizer = piece_tokenizer("a.", ".b", "c.d")
    ids = ids_of(tokenizer, "a.", ".b", "c.d")
    for min_tokens, text, count in ((0, "a", 1), (1, "a.", 2), (2, "a..bc", 3), (3, "a..bc.d", 3)):
        pieces, _ = run(tokenizer, ids, cut, stop=".", min_tokens=min_tokens)
        assert joined(pieces)[:2] == (text, ids[:count])
    for min_tokens, text, count in ((1, "a", 2), (2, "a..bc.d", 3)):
        pieces, _ = run(tokenizer, ids, cut, stop="..", min_tokens=min_tokens)
        assert joined(pieces)[:2] == (text, ids[:count])


def test_what_a_stop_begins_with_is_held_back_within_min_tokens_too():
    tokenizer = piece_tokenizer("Hi", "\n", "\nQ:", " more")
    ids = ids_of(tokenizer, "Hi", "\n", "\nQ:", " more")
    for min_tokens in (0, 1, 2):
        pieces, assembler = run(tokenizer, ids, [1] * 4, stop="\n\nQ:", min_tokens=min_tokens)
        assert [piece.text for piece in pieces] == ["Hi", "", "", ""]
        assert (joined(pieces)[1], assembler.matched_string) == (ids[:3], "\n\nQ:")
    pieces, assembler = run(tokenizer, ids, [1] * 4, stop="\n\nQ:", min_tokens=3)
    assert (joined(pieces)[0], assembler.matched_string) == ("Hi\n\nQ: more", None)
    assert pieces[2].text == "\n\nQ:"  # nothing of it can become a stop any more


BYTE_TOKENS = {byte: f"<0x{byte:02X}>" for byte in range(256)}


def byte_ids(content: bytes) -> list[int]:
    return ids_of(LLAMA2, *(BYTE_TOKENS[byte] for byte in content))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_in_a_run_of_byte_tokens_ends_it_with_its_last_byte(size):
    ids = ids_of(LLAMA2, "▁the") + byte_ids("x\n\n\n日".encode())
    sizes = [min(size, len(ids) - at) for at in range(0, len(ids), size)]
    for stop, text, count in (("\n", "thex", 3), ("\n\n", "thex", 4), ("x\n", "the", 3), ("日", "thex\n\n\n", 8)):
        pieces, assembler = run(LLAMA2, ids, sizes, stop=stop)
        assert (joined(pieces)[:2], assembler.matched_string) == ((text, ids[:count]), stop)


def test_a_run_without_a_stop_is_the_text_that_decoding_gives_even_if_a_bad_byte_comes_late():
    for content in (b"x\n\n\xff.", b"\n\xe6\x97\n", "日本".encode() + b"\x80"):
        ids = byte_ids(content) + ids_of(LLAMA2, "▁x")
        pieces, assembler = run(LLAMA2, ids, [1] * len(ids), stop=["\n\n\n", "never"])
        assert (joined(pieces)[0], assembler.matched_string) == (LLAMA2.decode(ids), None)


def test_a_match_in_a_run_counts_by_the_byte_that_ends_it():
    ids = byte_ids(b"\n\n\nx\n")
    for min_tokens, text, count in ((0, "", 1), (1, "\n", 2), (3, "\n\n\nx", 5), (5, "\n\n\nx\n", 5)):
        pieces, _ = run(LLAMA2, ids, [1] * 5, stop="\n", min_tokens=min_tokens)
        assert joined(pieces)[:2] == (text, ids[:count])
    for min_tokens, text in ((2, ""), (3, "\n\n\nx\n")):
        assert joined(run(LLAMA2, ids, [1] * 5, stop="\n\n\n", min_tokens=min_tokens)[0])[0] == text


# ---------------------------------------------------------------- behind a prompt


def test_a_stop_that_begins_with_the_first_word_s_space_is_found():
    prompt, ids = ids_of(LLAMA2, "▁the"), ids_of(LLAMA2, "▁leading", "▁x")
    pieces, assembler = run(LLAMA2, ids, [1, 1], prompt_ids=prompt, stop=" leading")
    assert (joined(pieces)[0], assembler.matched_string) == ("", " leading")


def test_the_bytes_of_the_tokens_are_the_text():
    prompt, ids = ids_of(LLAMA2, "▁the"), ids_of(LLAMA2, "▁leading", "▁x")
    text, _, logprobs = joined(run(LLAMA2, ids, [1, 1], prompt_ids=prompt, logprobs=0)[0])
    assert text == " leading x" and b"".join(one.chosen.token_bytes for one in logprobs).decode() == text
    assert [one.text_offset for one in logprobs] == [0, 8]


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("cut", [[1] * 4, [4]])
def test_offsets_count_the_characters_that_are_shown(cut):
    def offsets(tokenizer, ids, **params) -> list[int]:
        logprobs = joined(run(tokenizer, ids, cut, logprobs=0, **params)[0])[2]
        return [one.text_offset for one in logprobs]

    words = piece_tokenizer("the", " c", "at")
    ids = ids_of(words, "the", "</s>", " c", "at")
    assert offsets(words, ids, ignore_eos=True) == [0, 3, 3, 5]
    assert offsets(words, ids, ignore_eos=True, skip_special_tokens=False) == [0, 3, 7, 9]
    assert offsets(words, ids, stop="cat") == [0, 3, 3, 5]
    assert offsets(words, [*ids[:2], 5000, ids[1]], matched_token_id=ids[1]) == [0, 3, 3, 3]
    assert offsets(LLAMA2, ids_of(LLAMA2, "▁x") + byte_ids(b"\n\n\xe6")) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["byte-level", "llama2"])
def test_each_token_has_its_bytes_and_never_a_replacement_character(name):
    tokenizer = TOKENIZERS[name]
    if name == "byte-level":
        ids = tokenizer.encode(HARD_TEXT)
    else:
        ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in HARD_TEXT.encode()]
    pieces, _ = run(tokenizer, ids, [1] * len(ids), logprobs=2)
    text, _, logprobs = joined(pieces)
    assert text == HARD_TEXT and b"".join(one.chosen.token_bytes for one in logprobs).decode() == text
    assert [(one.chosen.logprob, one.chosen.rank) for one in logprobs] == [(-0.5 - i, i + 1) for i in range(len(ids))]
    for one in logprobs:
        assert [(other.token_id, other.rank) for other in one.top] == [(one.chosen.token_id, 1), (1, 2)]
        assert [other.token_bytes for other in one.top] == [tokenizer.token_bytes(i.token_id) for i in one.top]


def test_without_being_asked_log_probabilities_are_summed_but_not_shown():
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams(stop="."))
    ids = BYTE_LEVEL.encode("a.")
    piece = assembler.add([*ids, 9], [score(i, place) for place, i in enumerate([*ids, 9])])
    assert piece.logprobs == [] and assembler.cumulative_logprob == sum(-0.5 - i for i in range(len(ids)))


def test_ids_and_scores_must_match():
    assembler = OutputAssembler(BYTE_LEVEL, SamplingParams(logprobs=0))
    with pytest.raises(ValueError, match="0 scores for 1 ids"):
        assembler.add([5])
    with pytest.raises(ValueError, match="not the last"):
        assembler.finish([5], [score(5, 0)], matched_token_id=6)


def test_a_prompt_has_no_log_probability_for_its_first_token():
    ids = BYTE_LEVEL.encode("a b")
    first, *rest = prompt_logprobs(BYTE_LEVEL, ids, [score(i, 0) for i in ids[1:]], 1)
    assert (first.chosen.logprob, first.chosen.token_bytes, first.top) == (None, b"a", ())
    assert [one.chosen.token_id for one in rest] == ids[1:] and all(len(one.top) == 1 for one in rest)
    with pytest.raises(ValueError, match="0 scores for a prompt of"):
        prompt_logprobs(BYTE_LEVEL, ids, [], 1)
