"""Tokenizers: trained, loaded from Hugging Face's and sentencepiece's files, refused, compared with a base's."""

import gzip
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from mindlora.core.errors import DataError, TokenizerError
from mindlora.data import tokenizers
from mindlora.data.alpaca import convert_alpaca
from mindlora.data.conversion import IGNORE_TOKEN_ID
from mindlora.data.text import convert_text
from mindlora.data.tokenizers import SPECIAL_TOKENS, Vocabulary
from tests.support.instruction_rows import BOS, CHINESE, ENGLISH, EOS, PAD, UNK, as_json, learned, names, read_back
from tests.support.llama_checkpoints import HIDDEN, llama, save_base

ONLY_FROM_SCRATCH = "a new tokenizer fits only a base that was trained from scratch with it"


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


@pytest.mark.parametrize("beside", [{}, {"additional_special_tokens": ["<unk>"]}])
def test_the_extra_special_tokens_of_transformers_5_are_a_list(tmp_path, tokenizer_path, beside):
    """transformers 4 has a mapping there; it is what MindFormers needs."""
    shutil.copytree(tokenizer_path, tmp_path / "t")
    config = tmp_path / "t" / "tokenizer_config.json"
    content = json.loads(config.read_text())
    token = {"__type": "AddedToken", "content": "</s>", "special": True}
    extra = {"extra_special_tokens": ["<pad>", token], "tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}
    config.write_text(json.dumps({**content, **extra, **beside}))
    loaded = tokenizers.load_tokenizer(str(tmp_path / "t"))
    before = tokenizers.load_tokenizer(tokenizer_path)
    assert loaded.additional_special_tokens == [*beside.get("additional_special_tokens", []), "<pad>", "</s>"]
    assert loaded("a<pad>b</s>")["input_ids"] == before("a<pad>b</s>")["input_ids"]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (BOS, EOS, PAD)


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


# Against the vocabulary of a base


def vocabulary_notes(tokenizer, **settings):
    return Vocabulary(tokenizer, **settings).load(["the cat sat on the mat"] * 3)[1]


def base_of(folder, rows, tokenizer=None):
    """Writes a base whose embedding has ``rows`` rows, with a tokenizer beside it or without."""
    save_base(folder, {**llama(), "model.embed_tokens.weight": np.zeros((rows, HIDDEN), np.float32)})
    for name in os.listdir(tokenizer) if tokenizer else ():
        shutil.copy(os.path.join(tokenizer, name), folder)
    return str(folder)


def test_it_learns_from_the_rows_and_from_every_text(tmp_path):
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt.gz")]
    (tmp_path / "a.txt").write_text("zyzzyva quokka " * 4)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("温太医".encode() * 4))
    source = as_json(tmp_path / "in.json", [ENGLISH] * 4)
    learned = {}
    for name, files in (("alone", []), ("with texts", texts)):
        folder, output = str(tmp_path / name), str(tmp_path / f"{name}.mindrecord")
        report = convert_alpaca(source, output, folder, 150, train_vocab_size=600, train_texts=files)
        learned[name] = tokenizers.load_tokenizer(folder)
        assert f"tokens, trained on {', '.join(['this data', *files])}" in report.notes[0]
    for word in (" quokka", "温太医"):
        alone, more = (len(tokenizers.encode(found, word)) for found in learned.values())
        assert more < alone
    assert len(tokenizers.encode(learned["with texts"], "numbers")) <= len("numbers") // 2


def test_text_trains_one_too(tmp_path):
    (tmp_path / "in.txt").write_text("the cat sat. " * 9)
    output, folder = str(tmp_path / "x.mindrecord"), str(tmp_path / "t")
    report = convert_text(str(tmp_path / "in.txt"), output, folder, 5, train_vocab_size=300)
    assert report.vocab_size == len(tokenizers.load_tokenizer(folder)) <= 300
    assert any(ONLY_FROM_SCRATCH in note for note in report.notes)
    with pytest.raises(DataError, match="x.mindrecord exists already"):
        convert_text(str(tmp_path / "in.txt"), output, folder, 5, train_vocab_size=300)


def test_a_tokenizer_is_held_against_the_one_beside_the_base(tmp_path, tokenizer_path):
    base = base_of(tmp_path / "base", 300, tokenizer_path)
    # The special tokens and the bytes have the same ids in both.
    own, new = (tokenizers.load_tokenizer(tokenizer_path), tokenizers.fit_tokenizer(["the cat sat. "] * 3, 270))
    shared = {token for token, number in new.get_vocab().items() if own.get_vocab().get(token) == number}
    assert 260 <= len(shared) < len(new)
    given = {"train_size": 270, "base": base}
    (warning,) = [note for note in vocabulary_notes("new", **given) if "WARNING" in note]
    assert warning.startswith(f"WARNING: {base} was trained with another vocabulary: ")
    assert " of 270 tokens have another id, or none, in the tokenizer beside it. Its embeddings would mean " in warning
    assert warning.endswith(f"Use {base}/tokenizer.json, or train a base from scratch with this one")
    found = Vocabulary(new, base=base).load([])[1]
    assert f"another vocabulary: {len(new) - len(shared)} of {len(new)} tokens" in found[0]
    # For a file in the folder, too; and its own tokenizer is not a reason to warn.
    assert Vocabulary(new, base=f"{base}/model-0.safetensors").load([])[1][0].startswith("WARNING")
    assert vocabulary_notes(tokenizer_path, base=base) == [] == vocabulary_notes(tokenizer_path)


@pytest.mark.parametrize("rows, trained, loaded", [(270, False, False), (269, True, True), (271, True, False)])
def test_without_one_the_rows_of_the_embedding_tell(rows, trained, loaded, tmp_path):
    """An embedding of more rows than the tokenizer has ids is usual; one of a new tokenizer's base has as many."""
    base = base_of(tmp_path / "base", rows)
    notes = vocabulary_notes("new", train_size=270, base=base)
    assert (f"its embedding has {rows} rows, and the tokenizer 270 ids. " in notes[1]) == trained
    assert trained or notes[1] == f"no tokenizer is beside {base}, so only sizes were compared. {ONLY_FROM_SCRATCH}"
    of_270 = tokenizers.fit_tokenizer(["the cat sat on the mat"] * 3, 270)
    assert [note.startswith("WARNING") for note in vocabulary_notes(of_270, base=base)] == [True] * loaded


def test_without_a_base_a_new_tokenizer_comes_with_a_caution():
    assert vocabulary_notes("new", train_size=270)[1].startswith(ONLY_FROM_SCRATCH)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"base": "nowhere"}, "base: nowhere does not exist"),
        ({"train_texts": ["a.txt"]}, "train_texts names texts for a new tokenizer, but its size is missing"),
        ({"train_size": 300, "train_texts": ["a.txt"]}, "train_texts: there is no file a.txt"),
        ({"train_size": 300, "train_texts": ["a.jsonl.gz"]}, "train_texts: a.jsonl.gz holds rows"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_read(settings, message):
    with pytest.raises(DataError, match=message):
        Vocabulary("new", **settings).check(overwrite=False)
