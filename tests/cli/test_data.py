"""mindlora data: both kinds of data, what the command prints, and its errors."""

import json
import os

import datasets
import pytest

from mindlora import cli
from mindlora.data import tokenizers
from tests.support.chat_templates import CHATML, DIALOGUE, chat_tokenizer
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
    # A new tokenizer, of two more texts, for a base that has one already.
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("zyzzyva " * 9)
    new = ["--train-tokenizer", "270", "--train-tokenizer-on", *map(str, tmp_path.glob("?.txt"))]
    command[command.index("--tokenizer") + 1] = str(tmp_path / "new")
    assert cli.main([*command, *new, "--base", tokenizer_path, "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert f"note: WARNING: {tokenizer_path} was trained with another vocabulary: " in out
    assert len(tokenizers.encode(tokenizers.load_tokenizer(str(tmp_path / "new")), "zyzzyva")) == 1


def test_the_command_converts_conversations(tmp_path, capsys):
    rows = [{"dialogue": DIALOGUE}] * 6
    jsonl, folder = as_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "d"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"messages": DIALOGUE}] * 20)}).save_to_disk(str(folder))
    (tmp_path / "t.jinja").write_text(CHATML)
    chat_tokenizer(None).save_pretrained(str(tmp_path / "t"))
    command = ["data", "chat", "--input", jsonl, "--input", str(folder), "--output", str(tmp_path / "x.mindrecord")]
    command += ["--tokenizer", str(tmp_path / "t"), "--seq-length", "120", "--json"]
    command += ["--columns", "messages=dialogue", "--columns", "", "--split", "train"]
    assert cli.main(command) == 1
    assert "The tokenizer has no chat template: give one with --chat-template FILE" in capsys.readouterr().err
    command += ["--chat-template", str(tmp_path / "t.jinja"), "--weights", "0.6,0.4", "--holdout", "0.5", "--seed", "3"]
    assert cli.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["inputs"] == {jsonl: [6, 6], str(folder): [4, 20]}
    assert (report["rows"], report["held_out_rows"]) == (5, 5)
    for wrong, message in (
        (["--weights", "0.6;0.4"], "--weights 0.6;0.4: write numbers with commas between them, such as 0.7,0.3."),
        (["--columns", "messages"], "--columns messages: write FIELD=COLUMN, and a comma between two of them."),
        (["--seed", "-1"], "seed is -1: it must be a whole number of at least 0."),
    ):
        assert cli.main(command + wrong + ["--overwrite"]) == 1
        assert capsys.readouterr() == ("", f"mindlora: error: {message}\n")


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
