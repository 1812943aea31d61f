"""Labeled texts and words to rows: where a label stands, names and numbers, and what is refused."""

import json

import pytest

from mindlora.core.errors import DataError
from mindlora.training.classifier.conversion import convert_labels
from tests.support.instruction_rows import as_jsonl

TEXTS = [{"text": "the dog runs", "label": "good"}, {"text": "a cat", "label": "bad"}, {"text": "it", "label": "good"}]
WORDS = [{"tokens": ["dog", "and", "cat"], "tags": [2, 0, 1]}, {"tokens": ["it"], "tags": [0]}]
LENGTH = 24


@pytest.fixture
def convert(tokenizer_path, tmp_path):
    """Returns a function that converts records and gives the report, the rows and the names of the labels."""

    def run(records, seq_length=LENGTH, **settings):
        from mindspore.dataset import MindDataset

        source = as_jsonl(tmp_path / "rows.jsonl", records)
        path = str(tmp_path / "rows.mindrecord")
        report = convert_labels(source, path, tokenizer_path, seq_length, overwrite=True, **settings)
        data = MindDataset(path, columns_list=["input_ids", "labels"], shuffle=False)
        rows = list(data.create_tuple_iterator(num_epochs=1, output_numpy=True))
        return report, rows, json.loads((tmp_path / "rows-labels.json").read_text())

    return run


def labeled(row):
    """{place: label} of a row."""
    return {place: int(label) for place, label in enumerate(row[1]) if label != -100}


def test_the_label_of_a_text_stands_behind_its_last_token(convert, tokenizer):
    report, rows, names = convert(TEXTS)
    assert names == ["bad", "good"] and "num_labels: 2 (0 bad, 1 good)" in str(report)
    assert report.trained_tokens == len(TEXTS)
    for record, row in zip(TEXTS, rows):
        tokens = [tokenizer.bos_token_id, *tokenizer.encode(record["text"], add_special_tokens=False)]
        assert row[0][: len(tokens)].tolist() == tokens and set(row[0][len(tokens) :]) <= {tokenizer.pad_token_id}
        assert labeled(row) == {len(tokens): names.index(record["label"])}


def test_the_label_of_a_word_stands_behind_its_first_token(convert, tokenizer):
    report, rows, names = convert(WORDS)
    assert names == ["0", "1", "2"] and report.trained_tokens == 4
    places, end = {}, 1
    for word, tag in zip(["dog", " and", " cat"], WORDS[0]["tags"]):
        places[end + 1] = tag
        end += len(tokenizer.encode(word, add_special_tokens=False))
    assert labeled(rows[0]) == places


def test_labels_in_an_order_of_their_own(convert):
    _, rows, names = convert(TEXTS, label_names=["good", "bad"])
    assert names == ["good", "bad"] and [list(labeled(row).values())[0] for row in rows] == [0, 1, 0]
    report, rows, _ = convert(TEXTS, label_names=["good"])
    assert len(rows) == 2 and "the label 'bad', which is not among the names given: 1" in str(report)


def test_a_text_that_is_cut_keeps_its_label_and_words_keep_theirs(convert):
    report, rows, names = convert([{"text": "the dog runs " * 20, "label": "good"}, TEXTS[1]], truncate=True)
    assert labeled(rows[0]) == {LENGTH: names.index("good")} and len(report.truncated) == 1
    _, rows, _ = convert([{"tokens": ["dog"] * 40, "tags": list(range(40))}], truncate=True)
    assert list(labeled(rows[0]).values()) == list(range(len(labeled(rows[0]))))
    with pytest.raises(DataError, match="more than 25 tokens"):
        convert([{"text": "the dog runs " * 20, "label": "good"}])


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"text": "a", "label": None}, "a label that is neither a name nor a number"),
        ({"text": "a", "label": -1}, "a label that is neither a name nor a number"),
        ({"text": " ", "label": 0}, "an empty text"),
        ({"tokens": ["a"], "tags": []}, "are not lists of one length"),
        ({"tokens": ["a"], "tags": ["good"]}, "labeled words among texts"),
        ({"label": "good"}, "neither"),
    ],
)
def test_what_cannot_be_used_is_said(convert, record, reason):
    report, rows, _ = convert([*TEXTS, record])
    assert len(rows) == len(TEXTS) and reason in str(report)


def test_names_and_numbers_are_not_mixed(convert):
    with pytest.raises(DataError, match="such as .good., and some are numbers"):
        convert([{"text": "a", "label": "good"}, {"text": "b", "label": 1}])
    with pytest.raises(DataError, match="not packed"):
        convert(TEXTS, pack=True)
