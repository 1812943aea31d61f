"""The rows that a trial makes up, and how it words an error of MindSpore."""

import numpy as np
import pytest


@pytest.fixture
def trial(mindformers):
    from mindlora.training.launch import trial

    return trial


def rows_of(trial, columns, **settings):
    asked = {"columns": columns, "count": 2, "tokens": 5, "labels": None, "begin": [], **settings}
    return list(trial.made_up_rows(asked))


def test_rows_count_up_and_their_labels_are_a_place_ahead(trial):
    rows = rows_of(trial, {"input_ids": [7], "labels": [7]})
    assert len(rows) == 2
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert rows[0]["labels"].tolist() == [2, 3, 4, 1, 2, 3, 1]
    assert {column.dtype for column in rows[0].values()} == {np.dtype(np.int32)}


def test_a_classifiers_labels_are_the_first_one(trial):
    assert not rows_of(trial, {"input_ids": [3], "labels": [3]}, labels=2)[0]["labels"].any()


def test_the_tokens_that_an_adapter_waits_for_are_at_the_beginning(trial):
    assert rows_of(trial, {"input_ids": [5]}, begin=[4, 4])[0]["input_ids"].tolist() == [4, 4, 3, 4, 1]


def test_a_preference_is_two_answers_and_a_mark(trial):
    columns = {"input_ids": [2, 4], "labels": [2, 4], "answers": [2, 4], "pairs": [1]}
    row = rows_of(trial, columns)[0]
    assert row["answers"].tolist() == [[0] * 4, [1] * 4] and row["pairs"].tolist() == [1]
    assert row["input_ids"].shape == (2, 4)


def test_an_error_of_the_compiler_names_the_line_of_the_network(trial):
    message = "\n".join(
        [
            "----------------------------------------------------",
            "For 'Dropout', the number of layouts is 1.",
            "# 0 In file /env/site-packages/mindformers/models/llama/llama.py:17, 8~20",
            "# 1 In file /env/site-packages/mindlora/network/cells/parallel_linear.py:59, 12~30",
        ]
    )
    told = trial.described(ValueError(message))
    assert (
        told
        == "ValueError: For 'Dropout', the number of layouts is 1. (mindlora/network/cells/parallel_linear.py, line 59)"
    )
