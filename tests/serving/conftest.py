"""Tokenizers of the three kinds that cut characters into bytes, each in its own way."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mindlora.data import tokenizers
from tests.support.chat_templates import word_tokenizer

_LINES = [
    "Hello there, world!  two  spaces\n\n\ttab and a new line \n",
    "温太医 说：你好，世界。𠮷野家",
    "😀😁 👩‍👩‍👧‍👦 🇨🇳 ❤️ a😀b",
    "e\u0301 a\u0308\u0323 नमस्ते สวัสดี ﷺ \u202eabc",
]


@pytest.fixture(scope="session")
def byte_level():
    """A tokenizer of bytes and their pairs, some of which end inside a character or span two."""
    return tokenizers.fit_tokenizer(["温太医你好世界 😀😁😂 the cat, the dog"] * 5, 330)


@pytest.fixture(scope="session")
def byte_fallback():
    """A tokenizer of words, which takes the space from the first and falls back to single bytes."""
    words = word_tokenizer(None, "[INST] How many cats are there? [/INST] There are 2 cats. Hello there 你好")
    # Training lists the bytes as special tokens, which no text would show.
    content = json.loads(words.backend_tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory):
    """MindFormers' tokenizer of a sentencepiece model."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text("\n".join(_LINES * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=345,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return tokenizers.load_tokenizer(str(folder / "tokenizer.model"))
