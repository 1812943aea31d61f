"""Rows of instructions: seed tasks, and columns of other names."""

import pytest

from mindlora.data.instruction_rows import LAYOUT, row_problem
from mindlora.data.sources import read_inputs
from mindlora.errors import DataError
from tests.support.instruction_rows import as_jsonl


def test_a_seed_task_gives_a_row_for_each_instance(tmp_path):
    seeds = as_jsonl(
        tmp_path / "s.jsonl",
        [{"id": 1, "instruction": "i", "instances": [{"input": "1", "output": "a"}, {"input": "2", "output": "b"}, 5]}],
    )
    (source,) = read_inputs(seeds, LAYOUT)
    assert [(row.location, row_problem(row.record)) for row in source.rows] == [
        ("line 1 (instance 1)", None),
        ("line 1 (instance 2)", None),
        ("line 1 (instance 3)", "not an object"),
    ]
    assert source.rows[1].record == {"id": 1, "instruction": "i", "input": "2", "output": "b"}


def test_columns_of_other_names(tmp_path):
    path = as_jsonl(
        tmp_path / "qa.jsonl",
        [{"question": "q", "answer": "a", "output": "old"}, {"question": "r", "output": "old"}, 5],
    )
    (source,) = read_inputs(path, LAYOUT, [{"instruction": "question", "output": "answer"}])
    # No row has an input, so all inputs are empty; a row without an answer does not get what is in another column.
    assert [row.record for row in source.rows] == [
        {"question": "q", "answer": "a", "instruction": "q", "output": "a", "input": ""},
        {"question": "r", "instruction": "r", "input": ""},
        5,
    ]
    other = as_jsonl(tmp_path / "io.jsonl", [{"instruction": "i", "input": "x", "output": "o"}])
    named = [{"instruction": "question", "output": "answer"}, {}]
    first, second = read_inputs([path, other], LAYOUT, named)
    assert first.rows[0].location == f"{path}: line 1"
    assert second.rows[0] == (f"{other}: line 1", {"instruction": "i", "input": "x", "output": "o"})


@pytest.mark.parametrize(
    "columns, message",
    [
        ([], r"has no column 'instruction'\. Known: answer, question\. Name yours with --columns instruction=COLUMN"),
        ([{"instruction": "questoin"}], r"no column 'questoin'\. Did you mean 'question'\? Known: answer, question\."),
        ([{"instruction": "question"}], "has no column 'output'"),
        ([{"instruction": "question", "output": "answer", "input": "context"}], "has no column 'context'"),
        ([{"instructions": "question"}], r"no field 'instructions'\. Did you mean 'instruction'\?"),
        ([{}, {}], "columns is given 2 times for 1 inputs"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, message):
    path = as_jsonl(tmp_path / "qa.jsonl", [5, {"question": "q", "answer": "a"}])
    with pytest.raises(DataError, match=message):
        read_inputs(path, LAYOUT, columns)
