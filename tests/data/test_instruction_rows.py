"""Reading rows of instructions in every layout."""

import pytest

from mindlora.data.instruction_rows import read_rows, row_problem
from mindlora.errors import DataError
from tests.support.instruction_rows import as_jsonl


def test_lines_of_every_layout(tmp_path):
    listed = tmp_path / "a.json"
    listed.write_text('\n[{"instruction": "a\\n[,{"},\n\n  {"x":\n1}, 3\n,"]"]\n')
    assert [row.location for row in read_rows(str(listed))] == [
        "row 1 at line 2",
        "row 2 at line 4",
        "row 3 at line 5",
        "row 4 at line 6",
    ]
    lines = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, but not in JSON.
    lines.write_text('\ufeff{"instruction": "a\u2028b"}\r\n\n7\n', encoding="utf-8")
    assert read_rows(str(lines)) == [("line 1", {"instruction": "a\u2028b"}), ("line 3", 7)]
    seeds = as_jsonl(
        tmp_path / "s.jsonl",
        [{"id": 1, "instruction": "i", "instances": [{"input": "1", "output": "a"}, {"input": "2", "output": "b"}, 5]}],
    )
    assert [(row.location, row_problem(row.record)) for row in read_rows(seeds)] == [
        ("line 1 (instance 1)", None),
        ("line 1 (instance 2)", None),
        ("line 1 (instance 3)", "not an object"),
    ]
    assert read_rows(seeds)[1].record == {"id": 1, "instruction": "i", "input": "2", "output": "b"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b'[{"a": 1},\n {"b" 2}]', "not valid JSON at line 2, column 7"),
        ("a.jsonl", b'{"a": 1}\n\n{"b" 2}\n', "not valid JSON at line 3, column 6"),
        ("a.json", b'{"a": 1}', "holds a JSON dict, not a list"),
        ("a.json", b"[]", "holds no rows"),
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.json", b"[\xff]", "not UTF-8: byte 1"),
        ("a.csv", b"a,b", r"must be a \.json file .* or a \.jsonl"),
        ("a.json", None, "There is no file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
