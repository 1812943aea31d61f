"""Instruction rows to MindRecord: seed tasks, what is learned, which rows are skipped, and how many are held out."""

import os
import pathlib

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.data import tokenizers
from mindlora.data.alpaca import LAYOUT, convert_alpaca, prompt_template, row_problem
from mindlora.data.conversion import IGNORE_TOKEN_ID, Encoded
from mindlora.data.sources import read_inputs
from tests.support.instruction_rows import (
    CHINESE,
    ENGLISH,
    EOS,
    PAD,
    as_json,
    as_jsonl,
    encode_row,
    learned,
    names,
    read_back,
)

# A folder with real files to convert, in addition to those that the tests write.
REAL = pathlib.Path(os.environ.get("MINDLORA_TEST_DATA", "not given"))


# What is in a row


@pytest.mark.parametrize("record", [CHINESE, ENGLISH])
@pytest.mark.parametrize("template", ["alpaca", "plain"])
def test_only_the_output_and_eos_are_learned(tmp_path, tokenizer, record, template):
    output = tmp_path / "x.mindrecord"
    source = as_json(tmp_path / "in.json", [record])
    convert_alpaca(source, str(output), tokenizer, 400, template=template)
    (row,) = read_back(output)
    assert row["input_ids"].dtype == row["labels"].dtype == np.int32
    assert row["input_ids"].shape == row["labels"].shape == (401,)
    assert learned(row, tokenizer) == record["output"] + "</s>"
    tokens = row["input_ids"][row["input_ids"] != PAD]
    prompt = prompt_template(template).prompt(record)
    assert tokenizer.decode(tokens.tolist()) == "<s>" + prompt + record["output"] + "</s>"
    # A label is the token at its own position.
    counted = row["labels"] != IGNORE_TOKEN_ID
    assert (row["labels"][counted] == row["input_ids"][counted]).all()
    assert counted.sum() == counted[: len(tokens)][::-1].argmin()


def test_columns_pad_and_mask_exactly():
    encoded = Encoded(np.array([1, 10, 11, 20, 2], np.int32), np.array([0, 0, 0, 1, 1], bool))
    columns = encoded.columns(6, pad_token_id=9, ignore_token_id=-1)
    assert columns["input_ids"].tolist() == [1, 10, 11, 20, 2, 9, 9]
    assert columns["labels"].tolist() == [-1, -1, -1, 20, 2, -1, -1]


def test_a_row_may_have_one_token_more_than_the_model(tmp_path, tokenizer):
    length = len(encode_row(ENGLISH, tokenizer, "plain").tokens)
    source = as_json(tmp_path / "in.json", [ENGLISH])
    report = convert_alpaca(source, str(tmp_path / "fits.mindrecord"), tokenizer, length - 1, template="plain")
    assert (report.rows, report.longest, report.skipped) == (1, length, {})
    message = rf"no row that can be used\. more than {length - 1} tokens: 1 \(row 1 at line 2\)\. Raise seq_length"
    with pytest.raises(DataError, match=message):
        convert_alpaca(source, str(tmp_path / "short.mindrecord"), tokenizer, length - 2, template="plain")


def test_the_loss_of_llama_is_the_mean_over_the_labels(tmp_path, tokenizer, make_llama, pynative_mode):
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    output = tmp_path / "x.mindrecord"
    report = convert_alpaca(
        as_json(tmp_path / "in.json", [ENGLISH, CHINESE]), str(output), tokenizer, 160, template="plain"
    )
    dataset = CausalLanguageModelDataset(
        dataset_config=MindFormerConfig(
            data_loader={"type": "MindDataset", "dataset_dir": str(output), "shuffle": False},
            batch_size=2,
            input_columns=["input_ids", "labels"],
            drop_remainder=True,
            num_parallel_workers=1,
            python_multiprocessing=False,
        )
    )
    input_ids, labels = next(dataset.create_tuple_iterator(num_epochs=1))
    network = make_llama(
        seq_length=160,
        batch_size=2,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=32,
        vocab_size=report.vocab_size,
        pad_token_id=report.pad_token_id,
    )
    loss = float(network.set_train(True)(input_ids, labels).asnumpy().item())
    logits = network.set_train(False)(input_ids[:, :-1], labels[:, 1:])[0].asnumpy().astype(np.float64)
    targets = labels.asnumpy()[:, 1:]
    counted = targets != IGNORE_TOKEN_ID
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert counted.sum() == report.trained_tokens
    assert loss == pytest.approx(-log_probabilities[counted, targets[counted]].mean(), rel=1e-5)


# Rows that are skipped or cut

BAD_RECORDS = [
    (5, "not an object"),
    ({"instruction": "a", "output": "b"}, 'no "input"'),
    ({"instruction": "a", "input": ""}, 'no "output"'),
    ({"input": "", "output": "b"}, 'no "instruction"'),
    ({"instruction": "a", "input": None, "output": "b"}, '"input" is not a string'),
    ({"instruction": "a", "input": "", "output": " \n"}, 'empty "output"'),
    ({"instruction": "", "input": " ", "output": "b"}, 'empty "instruction" and "input"'),
    ({"instruction": "\ud800", "input": "", "output": "b"}, "not valid Unicode"),
    ({"instruction": "a", "instances": []}, '"instances" is not a list with entries'),
    ({"instruction": "a", "input": "", "output": "b " * 400}, "more than 101 tokens"),
]


@pytest.mark.parametrize("record, reason", BAD_RECORDS)
def test_each_bad_row_is_skipped_and_named(tmp_path, tokenizer, record, reason):
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, record, ENGLISH])
    output = tmp_path / "x.mindrecord"
    report = convert_alpaca(source, str(output), tokenizer, 100, template="plain")
    assert report.skipped == {reason: ["line 2"]}
    assert f"skipped, {reason}: 1 (line 2)" in str(report)
    assert report.rows == len(read_back(output)) == 2


@pytest.mark.parametrize("record, reason", BAD_RECORDS)
def test_strict_writes_nothing(tmp_path, record, reason):
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, record])
    with pytest.raises(DataError, match="strict") as caught:
        convert_alpaca(
            source,
            str(tmp_path / "x.mindrecord"),
            str(tmp_path / "t"),
            100,
            template="plain",
            train_vocab_size=260,
            strict=True,
        )
    assert f"{reason}: 1 (line 2)" in str(caught.value)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_file_of_only_bad_rows_is_an_error(tmp_path, tokenizer):
    source = as_jsonl(tmp_path / "in.jsonl", [1] * 12)
    with pytest.raises(DataError, match=r"no row that can be used\. not an object: 12 \(line 1, .*line 10, \.\.\.\)"):
        convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 100)
    assert names(tmp_path) == ["in.jsonl"]


def test_truncate_cuts_the_output_but_never_the_prompt(tmp_path, tokenizer):
    long_output = {**ENGLISH, "output": "word " * 200}
    long_prompt = {**ENGLISH, "instruction": "word " * 200}
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, long_output, long_prompt])
    report = convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 100, template="plain", truncate=True)
    assert report.truncated == ["line 2"]
    assert report.skipped == {"a prompt of more than 100 tokens": ["line 3"]}
    cut = read_back(report.output)[1]
    assert len(cut["input_ids"]) == 101 and EOS not in cut["input_ids"] and cut["labels"][-1] == cut["input_ids"][-1]
    assert long_output["output"].startswith(learned(cut, tokenizer))
    # The shortest row that can be learned from: all of the prompt and one token of the output.
    shortest = int((~encode_row(ENGLISH, tokenizer, "plain").learned).sum())
    source = as_json(tmp_path / "one.json", [ENGLISH])
    report = convert_alpaca(
        source, str(tmp_path / "y.mindrecord"), tokenizer, shortest, template="plain", truncate=True
    )
    assert (report.rows, report.trained_tokens) == (1, 1)
    with pytest.raises(DataError, match=f"a prompt of more than {shortest - 1} tokens"):
        convert_alpaca(source, str(tmp_path / "z.mindrecord"), tokenizer, shortest - 1, template="plain", truncate=True)


def test_an_input_that_the_template_cannot_take_is_not_dropped_silently(tmp_path, tokenizer):
    source = as_json(tmp_path / "in.json", [CHINESE, ENGLISH])
    report = convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 200, template="{instruction}\n")
    assert (report.rows, report.skipped) == (1, {"the template has no {input}": ["row 2 at line 7"]})


# Whole files


def test_holdout_draws_rows_by_seed(tmp_path, tokenizer):
    records = [{"instruction": "i", "input": "", "output": f"answer {number}"} for number in range(10)]
    source = as_json(tmp_path / "in.json", records)
    report = convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 200, holdout=0.2)
    assert (report.rows, report.held_out_rows, report.held_out) == (8, 2, str(tmp_path / "x-heldout.mindrecord"))
    kept, held_out = ([learned(row, tokenizer) for row in read_back(path)] for path in (report.output, report.held_out))
    # Nothing is lost or doubled, and the order is kept.
    assert sorted(kept + held_out) == [record["output"] + "</s>" for record in records]
    assert kept == sorted(kept) and held_out == sorted(held_out) and held_out != ["answer 8</s>", "answer 9</s>"]
    again = [
        convert_alpaca(source, report.output, tokenizer, 200, holdout=0.2, seed=seed, overwrite=True)
        and [learned(row, tokenizer) for row in read_back(report.held_out)]
        for seed in (0, 1)
    ]
    assert again[0] == held_out != again[1]
    os.unlink(report.output)
    with pytest.raises(DataError, match="x-heldout.mindrecord exists already"):
        convert_alpaca(source, report.output, tokenizer, 200, holdout=0.2)
    with pytest.raises(DataError, match="holdout is 1.0"):
        convert_alpaca(source, str(tmp_path / "y.mindrecord"), tokenizer, 200, holdout=1.0)
    with pytest.raises(DataError, match="holdout needs at least two usable rows"):
        convert_alpaca(
            as_json(tmp_path / "one.json", [CHINESE]), str(tmp_path / "y.mindrecord"), tokenizer, 400, holdout=0.5
        )


@pytest.mark.parametrize("name, length, count", [("huanhuan.json", 1024, 3729), ("alpaca_seed_tasks.jsonl", 2048, 175)])
def test_real_files(tmp_path, name, length, count):
    if not (REAL / name).exists():
        pytest.skip(f"MINDLORA_TEST_DATA is not a folder with {name}")
    report = convert_alpaca(
        str(REAL / name), str(tmp_path / "x.mindrecord"), str(tmp_path / "t"), length, train_vocab_size=1000
    )
    rows = read_inputs(str(REAL / name), LAYOUT)[0].rows
    assert report.rows + sum(map(len, report.skipped.values())) == len(rows) == count
    tokenizer = tokenizers.load_tokenizer(str(tmp_path / "t"))
    skipped = {location for locations in report.skipped.values() for location in locations}
    kept = [row.record["output"] + "</s>" for row in rows if row.location not in skipped]
    assert [learned(row, tokenizer) for row in read_back(report.output)] == kept


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


def test_templates():
    with_input, without_input = {"instruction": "{Do}", "input": "{it}"}, {"instruction": "{Do}", "input": ""}
    alpaca = prompt_template("alpaca")
    assert alpaca.prompt(with_input).endswith(
        "completes the request.\n\n### Instruction:\n{Do}\n\n### Input:\n{it}\n\n### Response:"
    )
    assert alpaca.prompt(without_input).endswith("completes the request.\n\n### Instruction:\n{Do}\n\n### Response:")
    plain = prompt_template("plain")
    assert (plain.prompt(with_input), plain.prompt(without_input)) == ("{Do}\n{it}\n", "{Do}\n")
    own = prompt_template("{{Q}} {instruction}|{input}>")
    assert (own.prompt(with_input), own.prompt(without_input)) == ("{Q} {Do}|{it}>", "{Q} {Do}|>")


@pytest.mark.parametrize(
    "text, message",
    [
        ("alpacca", "neither alpaca nor plain nor a text with {instruction}"),
        ("{input}", "neither alpaca"),
        ("{instruction} {output}", r"has \{output\}"),
        ("{instruction} {}", r"has \{\}"),
        ("{instruction.upper}", r"has \{instruction.upper\}"),
        ("{instruction!r}", "with a format or a conversion"),
        ("{instruction:>9}", "with a format or a conversion"),
        ("{instruction", "expected '}'"),
    ],
)
def test_wrong_templates(text, message):
    with pytest.raises(DataError, match=message):
        prompt_template(text)
