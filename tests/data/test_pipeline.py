"""Drawing from several inputs: shares as asked for, nothing repeated, the same draw for the same seed."""

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.data.alpaca import convert_alpaca
from mindlora.data.pipeline import drawn_counts, mix
from tests.support.instruction_rows import as_jsonl, learned, read_back


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [
        ([100, 100], [0.7, 0.3], [100, 43]),
        ([100, 10], [0.7, 0.3], [23, 10]),
        ([100, 10], [7, 3], [23, 10]),
        ([10, 20, 30], [1, 2, 3], [10, 20, 30]),
        ([1000, 1], [1, 9], [1, 1]),
        ([3], [0.2], [3]),
    ],
)
def test_counts(sizes, weights, counts):
    found = drawn_counts(sizes, weights)
    assert found == counts
    # One input is used up, and no other share is off by more than the rounding.
    assert any(count == size for count, size in zip(found, sizes))
    ideal = np.array(weights) * min(size / weight for size, weight in zip(sizes, weights))
    assert (np.abs(np.array(found) - ideal) < 1).all()


def test_the_draw_is_by_seed_and_without_repetition():
    inputs = [list(range(100)), list(range(100, 120))]
    first = mix(inputs, [1, 1], 0)
    assert [len(part) for part in first] == [20, 20] and first[1] == inputs[1]
    assert first[0] == sorted(set(first[0])) and first[0] != inputs[0][:20]
    assert mix(inputs, [1, 1], 0) == first != mix(inputs, [1, 1], 1)
    assert mix(inputs, None, 0) == inputs


def test_shares_are_those_of_what_is_written(tmp_path, tokenizer):
    record = {"instruction": "i", "input": ""}
    first = as_jsonl(tmp_path / "a.jsonl", [{**record, "output": f"a{n}"} for n in range(20)] + [5, 6])
    second = as_jsonl(tmp_path / "b.jsonl", [{**record, "output": f"b{n}"} for n in range(40)])
    report = convert_alpaca(
        [first, second], str(tmp_path / "x.mindrecord"), tokenizer, 200, weights=[0.8, 0.2], holdout=0.2
    )
    # Rows that cannot be used do not count.
    assert report.inputs == {first: [20, 20], second: [5, 40]}
    assert report.skipped == {"not an object": [f"{first}: line 21", f"{first}: line 22"]}
    assert f"{second}: 5 of 40 usable rows" in str(report)
    outputs = [learned(row, tokenizer) for path in (report.output, report.held_out) for row in read_back(path)]
    assert len(outputs) == len(set(outputs)) == report.rows + report.held_out_rows == 25
    assert sum(output.startswith("b") for output in outputs) == 5


@pytest.mark.parametrize(
    "weights, message",
    [
        ([0.5], "2 inputs have 1 weights"),
        ([1, 0], "A weight of an input is 0: it must be a number above 0"),
        ([1, float("nan")], "is nan"),
        ([1, float("inf")], "is inf"),
    ],
)
def test_weights_that_cannot_be_meant(tmp_path, weights, message):
    with pytest.raises(DataError, match=message):
        convert_alpaca(["a.json", "b.json"], str(tmp_path / "x.mindrecord"), "t", 8, weights=weights)


def test_an_input_without_usable_rows_is_named(tmp_path, tokenizer):
    first = as_jsonl(tmp_path / "a.jsonl", [{"instruction": "i", "input": "", "output": "o"}])
    second = as_jsonl(tmp_path / "b.jsonl", [5])
    with pytest.raises(DataError, match=r"b\.jsonl has no row that can be used\. not an object: 1"):
        convert_alpaca([first, second], str(tmp_path / "x.mindrecord"), tokenizer, 200)
