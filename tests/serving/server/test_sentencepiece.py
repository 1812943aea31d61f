"""A server whose tokenizer is a sentencepiece model, MindFormers' LlamaTokenizer: texts, and what it cannot do."""

import pytest

from mindlora.data import tokenizers
from tests.support.scripted_engine import make_engine, started
from tests.support.served_apps import ask, chat, complete, error_of, events, make_app

TEXTS = ["hello cats, how many dogs are there?", "There are 2 cats.", "no dogs"]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text("\n".join(TEXTS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = tokenizers.load_tokenizer(str(folder / "tokenizer.model"))
    with started(make_engine(tokenizer=tokenizer)) as engine:
        yield make_app(engine)


@pytest.mark.parametrize("text", [*TEXTS, "温太医 2 cats"])
def test_completions_are_the_text_streamed_or_not(app, text):
    # The base repeats its prompt, without the bos that begins it.
    whole = complete(app, text, max_tokens=60).json()["choices"][0]
    assert whole["text"].strip() == text and whole["finish_reason"] == "stop"
    pieces = events(complete(app, text, max_tokens=60, stream=True).text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]


def test_tokens_and_back(app):
    tokens = ask(app, "/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    assert ask(app, "/detokenize", {"tokens": tokens}).json()["prompt"].strip() == TEXTS[0]


def test_what_needs_a_tokenizer_json_is_refused_by_name(app):
    assert error_of(chat(app))["code"] == "no_chat_template"
    message = error_of(complete(app, guided_regex="[0-9]"))["message"]
    assert "guided_regex needs a tokenizer with a tokenizer.json" in message
