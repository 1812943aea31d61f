"""mindlora data: both kinds of data, what the command prints, and its errors."""

import json
import os

import pytest

from mindlora import cli
from mindlora.data import tokenizers
from tests.support.instruction_rows import CHINESE, ENGLISH, as_json, as_jsonl, read_back


def test_the_command_trains_a_tokenizer_and_converts(tmp_path, capsys):
    source = as_json(tmp_path / "in.json", [ENGLISH, CHINESE, 5])
    output, folder = str(tmp_path / "x.mindrecord"), str(tmp_path / "t")
    command = [
        "data",
        "alpaca",
        "--input",
        source,
        "--output",
        output,
        "--tokenizer",
        folder,
        "--seq-length",
        "150",
        "--train-tokenizer",
        "280",
        "--template",
        r"{instruction}\n{input}\n",
        "--json",
    ]
    assert cli.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["output"], report["rows"], report["skipped"]) == (output, 2, {"not an object": ["row 3 at line 12"]})
    assert report["vocab_size"] == len(tokenizers.load_tokenizer(folder)) <= 280
    first = read_back(output)[0]
    loaded = tokenizers.load_tokenizer(folder)
    assert loaded.decode(first["input_ids"].tolist()).startswith("<s>Add the numbers.\n2 and 3\n2 and 3 make 5.</s>")

    assert cli.main(command) == 1
    assert capsys.readouterr() == (
        "",
        f"mindlora: error: The output {output} exists already: ask to overwrite it (--overwrite), or give another "
        "name.\n",
    )
    os.unlink(output)
    assert cli.main(command) == 1
    assert capsys.readouterr().err.startswith(f"mindlora: error: {folder} exists already")
    assert not os.path.exists(output)
    assert cli.main(command + ["--overwrite"]) == 0


def test_the_command_converts_text_and_prints_a_report(tmp_path, capsys, tokenizer_path):
    (tmp_path / "in.txt").write_text("the cat sat")
    command = [
        "data",
        "text",
        "--input",
        str(tmp_path / "in.txt"),
        "--output",
        str(tmp_path / "x.mindrecord"),
        "--tokenizer",
        tokenizer_path,
        "--seq-length",
        "32",
    ]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "x.mindrecord: 1 rows of 33 tokens" in out and "pad_token_id: 3" in out


def test_errors_of_the_command_are_one_line(tmp_path, capsys, tokenizer_path):
    source = as_jsonl(tmp_path / "in.jsonl", [1, {"instruction": "a"}])
    command = ["data", "alpaca", "--output", str(tmp_path / "x.mindrecord"), "--seq-length", "32"]
    for more in (
        ["--input", source, "--tokenizer", tokenizer_path],
        ["--input", "missing.json", "--tokenizer", tokenizer_path],
        ["--input", source, "--tokenizer", "missing"],
    ):
        assert cli.main(command + more) == 1
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("mindlora: error: ") and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2
