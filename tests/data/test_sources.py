"""Reading inputs of every kind: the same rows come out of each, and what cannot be read is named."""

import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import csv, parquet

from mindlora.core.errors import DataError
from mindlora.data.alpaca import LAYOUT
from mindlora.data.conversations import LAYOUT as CHAT
from mindlora.data.sources import read_inputs
from tests.support.instruction_rows import CHINESE, ENGLISH, as_json, as_jsonl

MULTILINE = {"instruction": 'Say "a, b".\nTwice.', "input": "", "output": "a, b\na, b\u2028c"}
RECORDS = [ENGLISH, CHINESE, MULTILINE]


def written(path, records=RECORDS):
    """Writes records as what the name of the path says; returns the path."""
    table = pyarrow.Table.from_pylist(records)
    name, _, packed = path.name.partition(".jsonl")
    if path.suffix == ".json":
        return as_json(path, records)
    if path.suffix == ".csv":
        csv.write_csv(table, str(path))
    elif path.suffix == ".parquet":
        parquet.write_table(table, str(path), row_group_size=2)
    elif path.suffix == ".saved":
        datasets.Dataset.from_list(records).save_to_disk(str(path))
    else:
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        compressed = {
            "": bytes,
            ".gz": gzip.compress,
            ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
        }
        path.write_bytes(compressed[packed](text))
    return str(path)


LINES = ["line 1", "line 2", "line 3"]
NUMBERS = ["row 1", "row 2", "row 3"]


@pytest.mark.parametrize(
    "name, locations",
    [
        ("a.json", ["row 1 at line 2", "row 2 at line 7", "row 3 at line 12"]),
        ("a.jsonl", LINES),
        ("a.jsonl.gz", LINES),
        ("a.jsonl.zst", LINES),
        ("a.csv", ["line 2", "line 3", "line 4"]),
        ("a.parquet", NUMBERS),
        ("a.saved", NUMBERS),
    ],
)
def test_every_kind_gives_the_same_rows(tmp_path, name, locations):
    path = written(tmp_path / name)
    (source,) = read_inputs(path, LAYOUT)
    assert source.path == path and source.notes == []
    assert [row.record for row in source.rows] == RECORDS
    assert [row.location for row in source.rows] == locations


def test_lines_of_every_layout(tmp_path):
    listed = tmp_path / "a.json"
    listed.write_text('\n[{"instruction": "a\\n[,{", "output": ""},\n\n  {"x":\n1}, 3\n,"]"]\n')
    (source,) = read_inputs(str(listed), LAYOUT)
    assert [row.location for row in source.rows] == [
        "row 1 at line 2",
        "row 2 at line 4",
        "row 3 at line 5",
        "row 4 at line 6",
    ]
    lines = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, but not in JSON.
    lines.write_text('\ufeff{"messages": "a\u2028b"}\r\n\n7\n', encoding="utf-8")
    assert read_inputs(str(lines), CHAT)[0].rows == [
        ("line 1", {"messages": "a\u2028b", "system": "", "tools": []}),
        ("line 3", 7),
    ]
    table = tmp_path / "a.csv"
    table.write_text('\ufeffinstruction,output\r\n"a\r\nb",c\r\n\r\nd,e\r\n', encoding="utf-8")
    assert [(row.location, row.record["instruction"]) for row in read_inputs(str(table), LAYOUT)[0].rows] == [
        ("line 2", "a\nb"),
        ("line 5", "d"),
    ]


def test_a_folder_is_one_input(tmp_path):
    (tmp_path / "d").mkdir()
    second, first = written(tmp_path / "d" / "b.csv", [ENGLISH]), written(tmp_path / "d" / "a.parquet", [CHINESE])
    for name in ("README.md", ".hidden.json"):
        (tmp_path / "d" / name).write_text("x")
    (source,) = read_inputs([str(tmp_path / "d")], LAYOUT)
    assert source.rows == [(f"{first}: row 1", CHINESE), (f"{second}: line 2", ENGLISH)]
    assert source.notes == [f"left out in {tmp_path / 'd'}: README.md"]
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"e holds no file of a known kind; it holds a\.txt\. Give a file that ends in"):
        read_inputs(str(tmp_path / "e"), LAYOUT)


def test_splits_of_a_saved_dataset(tmp_path):
    path = str(tmp_path / "d")
    splits = {
        "train": datasets.Dataset.from_list(RECORDS).select([2, 0]),
        "test": datasets.Dataset.from_list([CHINESE]),
    }
    datasets.DatasetDict(splits).save_to_disk(path)
    assert [row.record for row in read_inputs(path, LAYOUT, split="train")[0].rows] == [MULTILINE, ENGLISH]
    with pytest.raises(DataError, match="d has the splits train, test: choose one with --split"):
        read_inputs(path, LAYOUT)
    with pytest.raises(DataError, match="d has no split 'tset'. Did you mean 'test'?"):
        read_inputs(path, LAYOUT, split="tset")
    datasets.DatasetDict({"train": splits["test"]}).save_to_disk(str(tmp_path / "one"))
    assert [row.record for row in read_inputs(str(tmp_path / "one"), LAYOUT)[0].rows] == [CHINESE]
    with pytest.raises(DataError, match="split is 'train', but no input is a dataset"):
        read_inputs(written(tmp_path / "a.jsonl"), LAYOUT, split="train")
    (tmp_path / "d" / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="d cannot be read as a saved dataset: "):
        read_inputs(path, LAYOUT, split="train")


def test_tables_of_conversations(tmp_path):
    # A table gives every message the keys of all others; those without a value are not there.
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    for name in ("a.parquet", "a.saved"):
        (source,) = read_inputs(
            written(tmp_path / name, [{"dialogue": messages, "id": 1}]), CHAT, [{"messages": "dialogue"}]
        )
        # Columns that nothing asks for are not read.
        assert [row.record["messages"] for row in source.rows] == [messages] and "id" not in source.rows[0].record
    both = as_jsonl(tmp_path / "both.jsonl", [{"messages": messages, "conversations": messages}])
    with pytest.raises(DataError, match=r"both\.jsonl has the columns messages and conversations: choose"):
        read_inputs(both, CHAT)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b'[{"a": 1},\n {"b" 2}]', "not valid JSON at line 2, column 7"),
        ("a.json", b'{"a": 1}\n{"b": 2}\n', "line 2, column 1: Extra data. If each line holds one object, name it"),
        ("a.jsonl", b'{"a": 1}\n\n{"b" 2}\n', "not valid JSON at line 3, column 6"),
        ("a.jsonl", b"{}\n" + b"[" * 100000, "nested too deeply at line 2"),
        ("a.json", b'{"a": 1}', "holds a JSON dict, not a list"),
        ("a.json", b"[]", "holds no rows"),
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.csv", b"instruction,output\n", "holds no rows"),
        ("a.json", b"[\xff]", "not UTF-8: byte 1"),
        ("a.csv", b"a,b\n\xff,c\n", "not UTF-8: byte 4"),
        ("a.csv", b"a,b\n1,2\n\n1,2,3\n", "has 3 cells at line 4, and 2 columns"),
        ("a.csv", b'a,b\n1,2\n1,"2\n', "not valid CSV in the row that starts at line 3"),
        ("a.csv", b"a,a\n1,2\n", "has two columns 'a'"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
        ("a.jsonl.gz", b"{}\n", "cannot be decompressed: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], "cannot be decompressed: Compressed file ended"),
        ("a.jsonl.zst", b"{}\n", "cannot be decompressed: ZSTD"),
        ("a.jsonl.zst", b"", "cannot be decompressed: it is empty"),
        ("a.txt", b"a,b", r"is of an unknown kind\. Give a file that ends in \.json"),
        ("a.json", None, "There is no file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_inputs(str(tmp_path / name), LAYOUT)
    assert str(tmp_path / name) in str(caught.value)


def test_an_input_that_is_given_twice(tmp_path):
    path = written(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"b\.jsonl is given twice"):
        read_inputs([path, str(tmp_path / "b.jsonl")], LAYOUT)
    with pytest.raises(DataError, match="There is no input"):
        read_inputs([], LAYOUT)
