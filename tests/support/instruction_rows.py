"""Instruction rows, files of them, and reading MindRecords back, for the tests of data conversion."""

import json

import mindspore.dataset

from mindlora.data.alpaca import AlpacaExamples, prompt_template
from mindlora.data.conversion import IGNORE_TOKEN_ID

UNK, BOS, EOS, PAD = range(4)
CHINESE = {"instruction": "这个温太医啊，也是古怪。", "input": "", "output": "你们俩话太多了，我该和温太医要一剂药。"}
ENGLISH = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "2 and 3 make 5."}


def as_json(path, records):
    """Writes records as one list; returns the path."""
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    return str(path)


def as_jsonl(path, records):
    """Writes records line by line; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def encode_row(record, tokenizer, template="alpaca"):
    """Returns a record as tokens."""
    examples = AlpacaExamples(prompt_template(template))
    return examples.encode(examples.parse(record), tokenizer)


def read_back(path):
    """Returns the rows of a MindRecord."""
    rows = mindspore.dataset.MindDataset(str(path), columns_list=["input_ids", "labels"], shuffle=False)
    return list(rows.create_dict_iterator(num_epochs=1, output_numpy=True))


def learned(row, tokenizer):
    """Returns the text of the labels of a row that count in the loss."""
    return tokenizer.decode(row["labels"][row["labels"] != IGNORE_TOKEN_ID].tolist())


def names(folder):
    """Returns what a folder holds."""
    return sorted(entry.name for entry in folder.iterdir())
