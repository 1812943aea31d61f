"""The text of an answer, token by token: all pieces together are what decoding at once gives."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mindlora.data import tokenizers
from mindlora.serving.detokenizer import Detokenizer, TextDecoder
from tests.support.chat_templates import chat_tokenizer

TEXTS = [
    "Hello there, world!  two  spaces\n\n\ttab and a new line \n",
    "温太医 说：你好，世界。𠮷野家",
    "😀😁 👩‍👩‍👧‍👦 🇨🇳 ❤️ a😀b",
    "e\u0301 a\u0308\u0323 नमस्ते สวัสดี ﷺ \u202eabc",
    " , . ' n't don't  I 'm  ?",
    "\ufffd and \ufffd\ufffd are written so",
    "   ",
]


def pieces(tokenizer, prompt, tokens):
    """Returns the pieces that the tokens give, and what is left at the end."""
    detokenizer = Detokenizer(TextDecoder(tokenizer), prompt)
    return [detokenizer.add(token) for token in tokens], detokenizer.finish()


def at_once(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check(tokenizer, prompt, tokens):
    given, rest = pieces(tokenizer, prompt, tokens)
    before = at_once(tokenizer, prompt)
    assert before + "".join(given) + rest == at_once(tokenizer, [*prompt, *tokens])
    return given


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_the_text(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    tokens = tokenizers.encode(tokenizer, text)
    prompts = [[], [tokenizer.bos_token_id], tokenizers.encode(tokenizer, "Hello there"), tokens]
    for prompt in prompts:
        given = check(tokenizer, prompt, tokens)
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(given)
    # Cut into prompt and answer between any two characters.
    for cut in range(len(tokens)):
        if not at_once(tokenizer, tokens[:cut]).endswith("\ufffd"):
            check(tokenizer, tokens[:cut], tokens[cut:])


def test_a_token_is_given_at_once_unless_it_ends_inside_a_character(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        prompt = tokenizers.encode(tokenizer, "Hello")
        tokens = tokenizers.encode(tokenizer, " cat dog") + [
            *tokenizers.encode(tokenizer, "😈")[-4:],
            *tokenizers.encode(tokenizer, " there"),
        ]
        given = check(tokenizer, prompt, tokens)
        decoded = [at_once(tokenizer, [token]) for token in tokens]
        assert all(piece for piece, text in zip(given, decoded) if "\ufffd" not in text and text)
        assert "😈" in given and given.count("") == len(tokenizers.encode(tokenizer, "😈")[-4:]) - 1


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_of_a_byte_level_tokenizer_make_the_text(byte_level, seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, len(byte_level) + 3, 200).tolist()
    check(byte_level, [*tokens[:20], *tokenizers.encode(byte_level, "a")], tokens[20:])


@pytest.mark.parametrize("seed", range(30))
def test_tokens_that_hold_parts_of_two_characters_make_the_text(byte_level, seed):
    content = json.loads(byte_level.backend_tokenizer.to_str())
    spelled = bytes_to_unicode()
    parts = [b"a\xf0", b"\x9f\x98", b"\x80\xf0\x9f", b"\x98\x80\xe6", b"\xff", b"\xffb\xf0", b"\xb8\xa9", b"\xb8", b"c"]
    size = len(content["model"]["vocab"])
    content["model"]["vocab"].update(
        {"".join(spelled[byte] for byte in part): size + n for n, part in enumerate(parts)}
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    random = np.random.default_rng(seed)
    # Some runs without an end at the end of a character.
    chosen = random.choice(len(parts) - seed % 2, 150)
    expected = b"".join(parts[n] for n in chosen).decode("utf-8", "replace")
    given, rest = pieces(tokenizer, [], [size + int(n) for n in chosen])
    assert "".join(given) + rest == expected
    whole = b"".join(parts[n] for n in chosen[:-20]).decode("utf-8", "ignore")
    assert len("".join(given)) >= len(whole) - 20


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_not_characters_never_lose_a_character(byte_fallback, seed):
    random = np.random.default_rng(seed)
    tokens = []
    for _ in range(60):
        good = random.choice(["温", "😀", " Hello", "a", " ", "é"])
        bad = random.integers(3, 259, random.integers(0, 3)).tolist()
        tokens += [*bad, *tokenizers.encode(byte_fallback, " Hello"), *tokenizers.encode(byte_fallback, good)]
    given, rest = pieces(byte_fallback, tokens[:1], tokens[1:])
    assert ("".join(given) + rest).count("Hello") >= 59


def test_special_and_unknown_tokens_have_no_text(byte_level, sentencepiece):
    tokenizer = chat_tokenizer(None)
    for each in (tokenizer, byte_level, sentencepiece):
        hello = tokenizers.encode(each, " Hello")
        special = [each.eos_token_id, 10**6, each.bos_token_id, -1]
        given, rest = pieces(each, hello, special + hello + special)
        assert "".join(given[:4] + given[-4:]) + rest == "" and "".join(given) == " Hello"
    split = tokenizers.encode(byte_level, "𠮷")
    given, rest = pieces(byte_level, [5], [split[0], byte_level.eos_token_id, *split[1:]])
    assert "".join(given) == "𠮷" and rest == ""
    tokenizer.add_tokens([AddedToken("<|reserved|>", special=True), AddedToken("<tool>", special=False)])
    reserved, tool = tokenizer.convert_tokens_to_ids(["<|reserved|>", "<tool>"])
    assert reserved not in tokenizer.all_special_ids
    assert "".join(pieces(tokenizer, [5], [reserved, tool, reserved])[0]) == "<tool>"


def test_spaces_before_punctuation_stay():
    tokenizer = tokenizers.fit_tokenizer(["a , b . don 't , c ."] * 5, 300)
    tokenizer.clean_up_tokenization_spaces = True
    tokens = tokenizers.encode(tokenizer, "a , b . don 't")
    # transformers 4 would take the space away, 5 does not.
    assert tokenizer.convert_tokens_to_ids("Ġ,") in tokens
    given, rest = pieces(tokenizer, [tokenizer.bos_token_id], tokens)
    assert "".join(given) + rest == "a , b . don 't"


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, tokens, **settings):
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens, **settings)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentencepiece"])
@pytest.mark.parametrize("what", [" Hello there", "\n", " ", "\xff", "😀"])
def test_the_work_for_a_token_does_not_grow(kind, what, request):
    tokenizer = Counting(request.getfixturevalue(kind))
    tokens = tokenizers.encode(tokenizer, what)
    if what == "\xff":  # a byte that never is a part of a character
        tokens = [tokenizer.convert_tokens_to_ids("ÿ" if kind == "byte_level" else "<0xFF>")]
    if not tokens:
        pytest.skip("this tokenizer leaves out such spaces")
    tokens = (tokens * 1000)[:1000]
    detokenizer = Detokenizer(TextDecoder(tokenizer), [tokenizer.bos_token_id])
    text = "".join(map(detokenizer.add, tokens))
    assert tokenizer.decoded < 40 * len(tokens)
    assert len(text + detokenizer.finish()) >= (len(tokens) // 4 if kind != "sentencepiece" or what != " " else 0)
