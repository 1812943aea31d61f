"""Tokenizers: trained, loaded from Hugging Face's and sentencepiece's files, and refused."""

import os
import pathlib

import pytest

from mindlora.data import tokenizers
from mindlora.data.alpaca import convert_alpaca
from mindlora.data.conversion import IGNORE_TOKEN_ID
from mindlora.data.tokenizers import SPECIAL_TOKENS
from mindlora.errors import TokenizerError
from tests.support.instruction_rows import BOS, CHINESE, ENGLISH, EOS, PAD, UNK, as_json, learned, names, read_back


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text("\n".join([*CHINESE.values(), *ENGLISH.values()] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return str(folder / "tokenizer.model")


def test_a_trained_tokenizer_loads_in_transformers_and_reads_any_text_back(tokenizer_path):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer_path)
    assert tuple(loaded.convert_ids_to_tokens([UNK, BOS, EOS, PAD])) == SPECIAL_TOKENS
    assert (loaded.unk_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (UNK, BOS, EOS, PAD)
    for text in ("  温太医\n\t 𠮷 é {x} 'quoted' ,  end ", "starts with a letter"):
        assert loaded.decode(tokenizers.encode(loaded, text)) == text
        assert loaded(text)["input_ids"] == [BOS] + tokenizers.encode(loaded, text)
    assert len(loaded) <= 300


def test_a_tokenizer_is_not_trained_over_other_things(tmp_path):
    folder = tmp_path / "t"
    tokenizers.train_tokenizer(["ab ab"], 260, str(folder))
    with pytest.raises(TokenizerError, match="exists already"):
        tokenizers.train_tokenizer(["ab ab"], 260, str(folder))
    tokenizers.train_tokenizer(["cd cd"], 261, str(folder), overwrite=True)
    assert len(tokenizers.load_tokenizer(str(folder))) == 261
    (folder / "weights.ckpt").write_text("precious")
    with pytest.raises(TokenizerError, match="holds more than a trained tokenizer: weights.ckpt"):
        tokenizers.train_tokenizer(["ab ab"], 260, str(folder), overwrite=True)
    with pytest.raises(TokenizerError, match="259 is too small.*260"):
        tokenizers.train_tokenizer(["ab ab"], 259, str(tmp_path / "u"))
    with pytest.raises(TokenizerError, match="no text"):
        tokenizers.train_tokenizer(["", ""], 260, str(tmp_path / "u"))
    assert names(tmp_path) == ["t"]


def test_a_sentencepiece_model_goes_through_mindformers(tmp_path, sentencepiece_model):
    output = tmp_path / "x.mindrecord"
    source = as_json(tmp_path / "in.json", [CHINESE, ENGLISH])
    report = convert_alpaca(source, str(output), os.path.dirname(sentencepiece_model), 100, template="plain")
    loaded = tokenizers.load_tokenizer(sentencepiece_model)
    assert type(loaded).__module__.startswith("mindformers.")
    assert (report.rows, report.vocab_size, report.pad_token_id) == (2, 350, 0)
    for row, record in zip(read_back(output), (CHINESE, ENGLISH)):
        assert row["input_ids"][0] == loaded.bos_token_id
        # sentencepiece normalizes by NFKC unless trained otherwise, as Llama's own is.
        assert learned(row, loaded).strip() == record["output"].replace("，", ",") + "</s>"


def test_special_tokens_that_are_missing(tmp_path, tokenizer_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(pathlib.Path(tokenizer_path, "tokenizer.json").read_bytes())
    source = as_json(tmp_path / "in.json", [ENGLISH])
    with pytest.raises(TokenizerError, match='no end-of-sequence token: set "eos_token"'):
        convert_alpaca(source, str(tmp_path / "x.mindrecord"), str(folder), 300)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    report = convert_alpaca(source, str(tmp_path / "x.mindrecord"), str(folder / "tokenizer.json"), 300)
    assert report.pad_token_id == EOS
    assert [note.split(":")[0] for note in report.notes] == [
        "the tokenizer has no begin-of-sequence token",
        "the tokenizer has no pad token",
    ]
    (row,) = read_back(report.output)
    assert row["input_ids"][0] != BOS and row["input_ids"][-1] == EOS and row["labels"][-1] == IGNORE_TOKEN_ID


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing", None, "there is no such file or folder"),
        ("notes.txt", "x", "notes.txt is not a tokenizer"),
        ("folder/readme.md", "x", r"No tokenizer in the folder .*holds readme\.md"),
        ("tokenizer.json", "{", "cannot load"),
        ("tokenizer.model", "junk", "sentencepiece cannot load"),
    ],
)
def test_what_is_not_a_tokenizer(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    path = path.parent if path.parent != tmp_path else path
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizers.load_tokenizer(str(path))
    assert str(path) in str(caught.value)
