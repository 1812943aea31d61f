"""--stats: the figures by hand, and a histogram that is a picture."""

import builtins

import numpy as np
import pytest

from mindlora.cli import main
from mindlora.core.errors import DataError
from mindlora.data.conversion import Encoded
from mindlora.data.packing import Boundary
from mindlora.data.pipeline import length_statistics
from tests.support.instruction_rows import CHINESE, ENGLISH, as_json, names

PNG = b"\x89PNG\r\n\x1a\n"


def examples(*lengths):
    return [Encoded(np.arange(length, dtype=np.int32), np.arange(length) >= length // 2) for length in lengths]


def test_figures():
    lengths = [2, 3, 4, 5, 9]
    found = length_statistics(examples(*lengths), 9, Boundary(0, is_padding=False))
    # n - n // 2 tokens of a row of length n are learned.
    assert (found.counted, found.row_length) == (1 + 2 + 2 + 3 + 5, 10)
    # 23 tokens: 27 of 50 positions are padding, and packed (9; 5 4; 3 2) 7 of 30.
    assert found.packed_rows == 3
    assert (found.padding, found.packed_padding) == (pytest.approx(27 / 50), pytest.approx(7 / 30))
    assert str(found).splitlines() == [
        "lengths of 5 examples: min 2, median 4, mean 4.6, 95th percentile 8, max 9 tokens",
        "counted in the loss: 13 of 23 tokens (56.5%)",
        "padding with one example in a row: 54.0% of 5 rows",
        "padding with packed rows: 23.3% of 3 rows",
    ]


def test_the_first_token_of_an_example_never_counts():
    learned_whole = Encoded(np.arange(4, dtype=np.int32), np.ones(4, bool))
    assert length_statistics([learned_whole] * 2, 9, None).counted == 6


def test_padding_between_examples_takes_room():
    assert length_statistics(examples(5, 5), 9, Boundary(0, is_padding=False)).packed_rows == 1
    assert length_statistics(examples(5, 5), 9, Boundary(0, is_padding=True)).packed_rows == 2
    assert length_statistics(examples(5, 4), 9, Boundary(0, is_padding=True)).packed_rows == 1
    assert length_statistics(examples(10), 9, Boundary(0, is_padding=True)).packed_rows == 1


def test_examples_that_cannot_be_packed_have_statistics_too():
    found = length_statistics(examples(5, 4), 9, None)
    assert found.packed_padding is None and "cannot be packed" in str(found)


@pytest.mark.parametrize("packed", [[], ["--pack"]], ids=["one in a row", "packed"])
def test_the_command_prints_and_draws(tmp_path, tokenizer_path, capsys, packed):
    source = as_json(tmp_path / "in.json", [ENGLISH, CHINESE] * 4)
    command = ["data", "alpaca", "--input", source, "--output", str(tmp_path / "x.mindrecord"), "--tokenizer"]
    command += [tokenizer_path, "--seq-length", "300", "--template", "plain", *packed]
    assert main([*command, "--stats", str(tmp_path / "lengths.png")]) == 0
    printed = capsys.readouterr().out
    assert "lengths of 8 examples: min" in printed and "padding with packed rows" in printed
    assert (tmp_path / "lengths.png").read_bytes().startswith(PNG)
    assert main([*command, "--overwrite", "--stats"]) == 0
    assert "lengths of 8 examples: min" in capsys.readouterr().out
    assert main([*command, "--overwrite"]) == 0
    assert "lengths of" not in capsys.readouterr().out
    assert names(tmp_path) == ["in.json", "lengths.png", "x.mindrecord", "x.mindrecord.db"]


def test_what_cannot_be_drawn_is_refused_before_anything_is_written(tmp_path, tokenizer, monkeypatch):
    from mindlora.data.alpaca import convert_alpaca

    source, output = as_json(tmp_path / "in.json", [ENGLISH]), str(tmp_path / "x.mindrecord")
    with pytest.raises(DataError, match=r"histogram .*in\.json must end in \.png"):
        convert_alpaca(source, output, tokenizer, 300, stats=source)
    imported = builtins.__import__

    def without_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(DataError, match=r"pip install 'mindlora\[plot\]'"):
        convert_alpaca(source, output, tokenizer, 300, stats=str(tmp_path / "x.png"))
    assert names(tmp_path) == ["in.json"]
