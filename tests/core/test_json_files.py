"""JSON in one form, and what is refused on reading it."""

import pytest

from mindlora.core.errors import CheckpointError
from mindlora.core.json_files import parse_object, write_json


def test_keys_are_sorted(tmp_path):
    write_json(str(tmp_path / "a.json"), {"b": [1], "a": "\u03b1"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text == '{\n  "a": "\\u03b1",\n  "b": [\n    1\n  ]\n}'
    assert parse_object(text, "a.json", CheckpointError) == {"a": "\u03b1", "b": [1]}


@pytest.mark.parametrize(
    "text, problem",
    [
        (b"", "a.json is not JSON: Expecting value"),
        ('{"x": ' + "[" * 50_000, "a.json is not JSON: "),
        (b'{"x": "\xff"}', "a.json is not JSON: 'utf-8' codec"),
        ("[1]", "a.json holds a list instead of a JSON object."),
        ('{"a": {"x": 1, "y": 2, "x": 3, "y": 4}}', "a.json has x, y twice, so it is unclear which one counts."),
    ],
)
def test_what_is_refused(text, problem):
    with pytest.raises(CheckpointError) as error:
        parse_object(text, "a.json", CheckpointError)
    assert str(error.value).startswith(problem)
