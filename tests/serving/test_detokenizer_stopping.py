"""Where an answer ends, and which of its text is sent before that is known."""

import logging

import numpy as np
import pytest
from tokenizers import AddedToken

from mindlora.core.errors import RequestError
from mindlora.data import tokenizers
from mindlora.serving.detokenizer import Detokenizer, StopMatcher, Stopping, TextDecoder, end_tokens
from mindlora.serving.request import Sampling
from tests.support.chat_templates import chat_tokenizer


@pytest.fixture(scope="module")
def byte_level():
    return tokenizers.fit_tokenizer(["the cat, the dog 😀"] * 3, 280)


def answer(tokenizer, tokens, ends=(2,), room=1000, **settings):
    """Returns the pieces, the reason, and how many tokens were taken."""
    sampling = Sampling(**{"max_tokens": 1000, **settings})
    stopping = Stopping(sampling, Detokenizer(TextDecoder(tokenizer), [5]), frozenset(ends), room)
    pieces = []
    for count, token in enumerate(tokens, 1):
        text, reason = stopping.add(token)
        pieces.append(text)
        if reason:
            return pieces, reason, count
    return pieces, None, len(tokens)


def encode(tokenizer, text):
    return tokenizers.encode(tokenizer, text)


def test_an_end_token_ends_the_answer_and_is_not_part_of_it(byte_level):
    tokens = encode(byte_level, "the cat")
    word = encode(byte_level, "dog")
    assert answer(byte_level, [*tokens, 2, *word])[1:] == ("stop", len(tokens) + 1)
    pieces, reason, count = answer(byte_level, [*tokens, word[0]], ends=(2, word[0]))
    assert ("".join(pieces), reason, count) == ("the cat", "stop", len(tokens) + 1)
    pieces, reason, _ = answer(byte_level, [*tokens, 2, *word, 3], ends=(2, 3), ignore_eos=True)
    assert ("".join(pieces), reason) == ("the catdog", None)
    # The request's own end it whatever ignore_eos says.
    pieces, reason, _ = answer(byte_level, [*tokens, 2, *word], ignore_eos=True, stop_tokens=(word[0], 4))
    assert ("".join(pieces), reason) == ("the cat", "stop")


@pytest.mark.parametrize("room, most, count", [(1000, 3, 3), (2, 1000, 2), (3, 3, 3), (1, 1, 1)])
def test_max_tokens_and_the_window_end_it_by_length(byte_level, room, most, count):
    tokens = encode(byte_level, "a b c d e f")
    pieces, reason, taken = answer(byte_level, tokens, room=room, max_tokens=most)
    assert (reason, taken) == ("length", count)
    assert "".join(pieces) == byte_level.decode(tokens[:count])
    # An end token in the last place is an end all the same.
    assert answer(byte_level, [*tokens[: count - 1], 2], room=room, max_tokens=most)[1:] == ("stop", count)
    # With ignore_eos, it counts as a token and has no text.
    assert answer(byte_level, [2] * 5, room=room, max_tokens=most, ignore_eos=True) == ([""] * count, "length", count)


def test_half_a_character_at_the_end_is_shown_as_such(byte_level):
    smile = encode(byte_level, "😈")
    assert len(smile) > 1
    for ending in ([2], []):
        pieces, _, _ = answer(byte_level, smile[:1] + ending, max_tokens=2 if ending else 1)
        assert "".join(pieces) == "\ufffd"


@pytest.mark.parametrize(
    "text, stops, sent",
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four", "o t", "three"], "one tw"),
        ("one\n\n### next", ["\n\n###"], "one"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("aaaaaaab", ["aaab"], "aaaa"),
        ("😀😁😂", ["😁"], "😀"),
        # The one that is complete first, and of those the longest.
        ("abcd", ["bcd", "c"], "ab"),
        ("abcd", ["c", "abc", "bc"], ""),
        ("one two", ["xyz", "o o"], None),
        ("no end of it: en", ["end", "en of"], "no "),
    ],
)
def test_a_stop_string_ends_it_however_the_text_is_cut(text, stops, sent):
    for seed in range(30):
        matcher, given, rest = StopMatcher(stops), "", text
        random, stopped = np.random.default_rng(seed), False
        while rest and not stopped:
            size = 1 if seed == 0 else int(random.integers(0, 4))
            piece, stopped = matcher.add(rest[:size])
            given, rest = given + piece, rest[size:]
            if sent is not None:
                assert sent.startswith(given)
        assert stopped == (sent is not None)
        assert given + ("" if stopped else matcher.finish()) == (text if sent is None else sent)


def test_only_what_could_be_a_stop_string_is_held_back():
    matcher = StopMatcher(["\n\nUser:", "END"])
    given = [matcher.add(piece) for piece in ["Hel", "lo E", "N", "ough\n", "\nUse", "ful E", "ND"]]
    texts = ["Hel", "lo ", "", "ENough", "", "\n\nUseful ", ""]
    assert given == list(zip(texts, [False] * 6 + [True]))
    assert StopMatcher([]).add("abc") == ("abc", False)


def test_what_was_held_back_belongs_to_an_answer_that_ends_otherwise(byte_level):
    tokens = encode(byte_level, "the cat EN")
    for last, reason in (([2], "stop"), ([], "length")):
        pieces, found, _ = answer(byte_level, tokens + last, stop=("END",), max_tokens=len(tokens + last))
        assert ("".join(pieces), found) == ("the cat EN", reason)
        assert not any("E" in piece for piece in pieces[:-1])


def test_a_stop_string_across_tokens_stops_and_cuts(byte_level):
    tokens = encode(byte_level, "the dog, the cat, the end")
    pieces, reason, count = answer(byte_level, tokens, stop=("g, th", "xx"))
    assert ("".join(pieces), reason) == ("the do", "stop")
    assert byte_level.decode(tokens[: count - 1]) in "the dog, t"
    # In the last token that is allowed, it is the reason all the same; what follows it in the token is left out.
    assert answer(byte_level, tokens, stop=("g, th",), max_tokens=count)[1] == "stop"
    assert "".join(answer(byte_level, encode(byte_level, "the"), stop=("h",))[0]) == "t"


def test_a_long_stop_string_takes_no_time_to_look_for():
    matcher = StopMatcher(["a" * 20000 + "b", "ab" * 10000 + "c"])
    given = [matcher.add("a" * 10)[0] for _ in range(1000)]
    assert "".join(given) == ""
    assert matcher.add("c")[0] == "a" * 10000 + "c"


@pytest.mark.parametrize("stop", ["", 5, None])
def test_a_stop_string_without_text_is_refused(byte_level, stop):
    with pytest.raises(RequestError, match="stop has an entry"):
        answer(byte_level, [5], stop=("x", stop))


def test_the_end_tokens_are_those_of_tokenizer_and_configuration(byte_level, caplog):
    assert end_tokens(byte_level) == {2}
    assert end_tokens(byte_level, 2) == {2}
    tokenizer = chat_tokenizer(None)
    marker = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_tokens(tokenizer, [marker, 2]) == {2, marker}
    tokenizer.add_tokens([AddedToken("<|reserved|>", special=True)])
    reserved = tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert end_tokens(tokenizer, reserved) == {2, reserved}
    tokenizer.eos_token = None
    assert end_tokens(tokenizer, (marker,)) == {marker}
    assert end_tokens(tokenizer) == frozenset()
    assert not caplog.records


def test_an_end_token_of_the_configuration_that_is_text_is_not_one(caplog):
    tokenizer = tokenizers.fit_tokenizer(["ab"], 260)
    with caplog.at_level(logging.WARNING, "mindlora"):
        assert end_tokens(tokenizer, [70, 2, 10**6]) == {2}
    token = tokenizer.convert_ids_to_tokens(70)
    assert [record.getMessage() for record in caplog.records] == [
        f"eos_token_id 70 of the configuration is the text {token!r} of the tokenizer: answers do not end with it. "
        "Correct eos_token_id."
    ]


def test_a_stop_string_within_min_tokens_is_text(byte_level):
    tokens = encode(byte_level, "a b a b c")
    for least, text in ((0, "a"), (3, "a b a"), (4, "a b a"), (len(tokens) - 1, "a b a b c")):
        pieces, reason, _ = answer(byte_level, [*tokens, 2], min_tokens=least, stop=(" b",))
        assert ("".join(pieces), reason) == (text, "stop")


def test_a_stop_string_that_was_passed_over_does_not_stop_later():
    matcher = StopMatcher(["ab", "abcde"])
    assert matcher.add("xab", may_stop=False) == ("x", False)
    assert matcher.add("cx") == ("abcx", False) and matcher.add("ab") == ("", True)
