"""Plain text to MindRecord: packed without gaps, or by paragraphs."""

import gzip

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.data import text as text_data
from mindlora.data import tokenizers
from mindlora.data.conversion import IGNORE_TOKEN_ID
from mindlora.data.text import convert_text
from tests.support.instruction_rows import PAD, read_back


def test_text_is_packed_without_gaps(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(text_data, "CHARACTERS_PER_CALL", 40)
    text = "".join(f"Line {number}: 温太医 and the cat.\n" for number in range(30))
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    report = convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 64)
    rows = read_back(report.output)
    labels = np.concatenate([row["labels"] for row in rows])
    assert {row["input_ids"].shape for row in rows} == {(65,)}
    assert report.tokens == (labels != IGNORE_TOKEN_ID).sum()
    assert tokenizer.decode(labels[labels != IGNORE_TOKEN_ID].tolist()) == f"<s>{text}</s>"
    last = rows[-1]
    assert (last["input_ids"][last["labels"] == IGNORE_TOKEN_ID] == PAD).all() and PAD in last["input_ids"]
    for full in rows[:-1]:
        assert (full["input_ids"] == full["labels"]).all()


def test_each_paragraph_is_a_document(tmp_path, tokenizer):
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress(b"the cat\r\nsat\n\n \nthe mat\n"))
    report = convert_text(str(tmp_path / "in.txt.gz"), str(tmp_path / "x.mindrecord"), tokenizer, 63, paragraphs=True)
    ids = np.concatenate([row["input_ids"] for row in read_back(report.output)])
    assert tokenizer.decode(ids[ids != PAD].tolist()) == "<s>the cat\nsat</s><s>the mat</s>"


def test_a_single_token_left_over_makes_no_row(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("the cat")
    length = len(tokenizers.encode(tokenizer, "the cat")) + 2
    report = convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, length - 2)
    assert (report.rows, report.tokens, report.trained_tokens) == (1, length - 1, length - 2)


def test_text_without_text(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text(" \n")
    with pytest.raises(DataError, match="in.txt holds no text"):
        convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 8)
    with pytest.raises(DataError, match="seq_length is 0"):
        convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 0)
