"""Plain text to MindRecord: packed without a gap, or by paragraphs."""

import numpy as np
import pytest

from mindlora.data import instruction_data, tokenizers
from mindlora.data.instructions import DataError
from tests.support.instruction_rows import PAD, read_back


def test_text_is_packed_without_a_gap(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(instruction_data, "_CHARACTERS_A_CALL", 40)
    text = "".join(f"Line {number}: 温太医 and the cat.\n" for number in range(30))
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    report = instruction_data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 64)
    rows = read_back(report.output)
    labels = np.concatenate([row["labels"] for row in rows])
    assert {row["input_ids"].shape for row in rows} == {(65,)}
    assert report.tokens == (labels != instruction_data.IGNORE_TOKEN_ID).sum()
    assert tokenizer.decode(labels[labels != instruction_data.IGNORE_TOKEN_ID].tolist()) == f"<s>{text}</s>"
    last = rows[-1]
    assert (last["input_ids"][last["labels"] == instruction_data.IGNORE_TOKEN_ID] == PAD).all() and PAD in last[
        "input_ids"
    ]
    for full in rows[:-1]:
        assert (full["input_ids"] == full["labels"]).all()


def test_paragraphs_are_documents_of_their_own(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("the cat\nsat\n\n \nthe mat\n")
    report = instruction_data.convert_text(
        str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 63, paragraphs=True
    )
    ids = np.concatenate([row["input_ids"] for row in read_back(report.output)])
    assert tokenizer.decode(ids[ids != PAD].tolist()) == "<s>the cat\nsat</s><s>the mat</s>"


def test_a_single_token_that_is_left_over_makes_no_row(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("the cat")
    length = len(tokenizers.encode(tokenizer, "the cat")) + 2
    report = instruction_data.convert_text(
        str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, length - 2
    )
    assert (report.rows, report.tokens, report.trained_tokens) == (1, length - 1, length - 2)


def test_text_without_text(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text(" \n")
    with pytest.raises(DataError, match="in.txt holds no text"):
        instruction_data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 8)
    with pytest.raises(DataError, match="seq_length is 0"):
        instruction_data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 0)
