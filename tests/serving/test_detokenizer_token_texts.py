"""TokenTexts: the bytes of tokens make the text, and every token has a name of its own among the likeliest."""

import pytest

from mindlora.data import tokenizers
from mindlora.serving.detokenizer import TextDecoder, TokenTexts

TEXTS = ["cats and dogs", " é, 温太医 😈!\n"]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def texts(tokenizer):
    return TokenTexts(TextDecoder(tokenizer), tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_make_the_text(tokenizer, texts, text):
    tokens = [tokenizer.bos_token_id, *tokenizers.encode(tokenizer, text), tokenizer.eos_token_id]
    assert b"".join(map(texts.data, tokens)).decode().strip() == text.strip()


def test_every_byte_has_a_token_of_its_bytes(tokenizer, texts):
    assert {texts.data(token) for token in range(len(tokenizer))} >= {bytes([byte]) for byte in range(256)}


def test_a_part_of_a_character_is_named_by_its_bytes(tokenizer, texts):
    tokens = [token for token in tokenizers.encode(tokenizer, "😈") if texts.data(token) in "😈".encode()]
    assert b"".join(map(texts.data, tokens)) == "😈".encode() and len(tokens) > 1
    for token in tokens:
        assert texts.name(token) == "bytes:" + "".join(f"\\x{byte:02x}" for byte in texts.data(token))
    assert texts.name(tokenizer.eos_token_id) == "</s>" and texts.data(tokenizer.eos_token_id) == b""


def test_alternatives_keep_keys_of_their_own(tokenizer, texts):
    tokens = range(len(tokenizer))
    named = texts.named([(token, float(token)) for token in tokens])
    assert sorted(named.values()) == list(map(float, tokens))


def test_a_name_that_is_taken_is_the_number_of_the_token(byte_fallback):
    texts = TokenTexts(TextDecoder(byte_fallback), byte_fallback)
    a, byte = byte_fallback.convert_tokens_to_ids(["a", "<0x61>"])
    assert texts.named([(a, -1.0), (byte, -2.0), (a, -1.0)]) == {"a": -1.0, f"token_id:{byte}": -2.0}
