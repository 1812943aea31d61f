"""Converting conversations to MindRecord: rows skipped, cut and held out, and a tokenizer trained on them."""

import json
import os

import numpy as np
import pyarrow.parquet
import pytest

from mindlora.core.errors import DataError, TokenizerError
from mindlora.data import tokenizers
from mindlora.data.chat import convert_chat
from mindlora.data.conversion import IGNORE_TOKEN_ID
from tests.support.chat_templates import CHATML, DIALOGUE, HERMES_TOOLS, MISTRAL, THINKING, chat_tokenizer
from tests.support.instruction_rows import as_jsonl, learned, names, read_back


@pytest.fixture(scope="module")
def chatml():
    return chat_tokenizer(CHATML)


def said(messages, end="<|im_end|>"):
    return "".join(message["content"] + end for message in messages if message["role"] == "assistant")


def test_conversations_become_rows(tmp_path, chatml):
    sharegpt = [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "你好！"}]
    source = as_jsonl(tmp_path / "in.jsonl", [{"messages": DIALOGUE}, {"messages": sharegpt}])
    report = convert_chat(source, str(tmp_path / "x.mindrecord"), chatml, 200)
    first, second = read_back(report.output)
    assert learned(first, chatml) == said(DIALOGUE) and learned(second, chatml) == "你好！<|im_end|>"
    for row, messages in ((first, DIALOGUE), (second, [{"role": "user", "content": "你好"}])):
        counted = row["labels"] != IGNORE_TOKEN_ID
        assert row["input_ids"].shape == row["labels"].shape == (201,)
        assert (row["labels"][counted] == row["input_ids"][counted]).all()
        start = chatml.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert chatml.decode(row["input_ids"]).startswith(start)
    assert report.trained_tokens == sum((row["labels"] != IGNORE_TOKEN_ID).sum() for row in (first, second))
    assert report.longest == (first["input_ids"] != report.pad_token_id).sum()


def test_a_turn_that_ends_where_the_model_does_not_stop_is_reported(tmp_path):
    source = as_jsonl(tmp_path / "in.jsonl", [{"messages": DIALOGUE}])

    def notes(eos, stops=None):
        folder = tmp_path / "tokenizer"
        chat_tokenizer(CHATML, eos_token=eos).save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops} if stops else {}))
        loaded = tokenizers.load_tokenizer(str(folder))
        report = convert_chat(source, str(tmp_path / "x.mindrecord"), loaded, 200, overwrite=True)
        return [note for note in report.notes if "ends the assistant's turns with" in note]

    end = chat_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")
    (note,) = notes("</s>")
    assert f"turns with '<|im_end|>' ({end}), and the model stops at 2 alone" in note and "mindlora base merge" in note
    assert "stops at 2, 9 alone" in notes("<|im_end|>", stops=[2, 9])[0]
    assert notes("<|im_end|>") == notes("</s>", stops=[2, end]) == []


def test_nulls_in_calls_and_tools_are_counted_where_tables_did_not_leave_them_out(tmp_path, chatml):
    def conversation(arguments, properties):
        call = {"type": "function", "function": {"name": "count", "arguments": arguments}}
        tool = {"type": "function", "function": {"name": "count", "parameters": {"properties": properties}}}
        asked = [DIALOGUE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": asked, "tools": [tool]}

    rows = [
        conversation({"what": "cats", "where": None}, {"what": {"type": "string"}}),
        conversation({"what": "cats"}, {"what": {"type": "string"}, "where": None}),
        conversation({"what": "cats"}, {"what": {"type": "string"}}),
    ]
    tokenizer = chat_tokenizer(HERMES_TOOLS, eos_token="<|im_end|>")
    report = convert_chat(as_jsonl(tmp_path / "in.jsonl", rows), str(tmp_path / "x.mindrecord"), tokenizer, 400)
    (note,) = [note for note in report.notes if "null" in note]
    assert note.startswith("in 2 rows, arguments of a call or fields of a tool are null")
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    report = convert_chat(str(tmp_path / "in.parquet"), str(tmp_path / "y.mindrecord"), tokenizer, 400)
    assert report.rows == 3 and not any("null" in note for note in report.notes)


def test_what_a_template_does_not_show_is_reported(tmp_path, chatml):
    source = as_jsonl(tmp_path / "in.jsonl", [{"messages": DIALOGUE, "system": "Be brief."}] * 2)
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("in messages", "in messages if message.role != 'system'"))
    report = convert_chat(source, str(tmp_path / "x.mindrecord"), chatml, 200, chat_template=str(template))
    assert "the chat template does not show all of the system messages of 2 rows" in report.notes


def test_rows_that_cannot_be_used_are_named(tmp_path, chatml):
    long = [DIALOGUE[0], {"role": "assistant", "content": "cats " * 100}]
    thinking = [{"role": "assistant", "content": "<think>x</think>y"}, *DIALOGUE]
    rows = [DIALOGUE, thinking, long, [DIALOGUE[0]]]
    source = as_jsonl(tmp_path / "in.jsonl", [{"conversations": messages} for messages in rows] + [{"messages": "a"}])
    with pytest.raises(DataError, match="has the columns messages and conversations"):
        convert_chat(source, str(tmp_path / "x.mindrecord"), chatml, 100)
    source = as_jsonl(tmp_path / "in.jsonl", [{"conversations": messages} for messages in rows])
    tokenizer = chat_tokenizer(THINKING)
    report = convert_chat(source, str(tmp_path / "x.mindrecord"), tokenizer, 100)
    assert (report.rows, report.skipped) == (
        1,
        {
            "no turn of the assistant": ["line 4"],
            "the chat template renders earlier turns differently once the conversation goes on": ["line 2"],
            "more than 101 tokens": ["line 3"],
        },
    )
    before = names(tmp_path)
    with pytest.raises(DataError, match=r"strict allows none\. no turn of the assistant: 1 \(line 4\)"):
        convert_chat(source, str(tmp_path / "y.mindrecord"), tokenizer, 100, strict=True)
    assert names(tmp_path) == before


def test_truncate_cuts_at_the_end_of_a_turn(tmp_path, chatml):
    source = as_jsonl(tmp_path / "in.jsonl", [{"messages": DIALOGUE}])
    whole = np.array(chatml.apply_chat_template(DIALOGUE, return_dict=False))
    ends = np.flatnonzero(whole == chatml.convert_tokens_to_ids("<|im_end|>")) + 1
    kept = {}
    for length in (ends[1] - 2, ends[1] - 1, ends[3] - 2, ends[3] - 1, len(whole) - 1):
        length = int(length)
        output = str(tmp_path / f"{length}.mindrecord")
        if length + 1 < ends[1]:
            with pytest.raises(
                DataError, match=f"a first turn of the assistant that ends after more than {length + 1} t"
            ):
                convert_chat(source, output, chatml, length, truncate=True)
            continue
        report = convert_chat(source, output, chatml, length, truncate=True)
        assert report.truncated == (["line 1"] if length + 1 < len(whole) else [])
        kept.setdefault((report.longest, learned(read_back(output)[0], chatml)), []).append(length + 1)
    # Up to the end of the first answer, up to that of the second, and with the new line behind it.
    first, both = said(DIALOGUE[:2]), said(DIALOGUE)
    assert list(kept) == [(ends[1], first), (ends[3], both), (len(whole), both)]
    assert list(kept.values()) == [[ends[1], ends[3] - 1], [ends[3]], [len(whole)]]


def test_a_tokenizer_is_trained_and_keeps_the_template(tmp_path):
    rows = [{"messages": DIALOGUE[:2]}, {"messages": [DIALOGUE[0], {"role": "assistant", "content": "cats?"}]}] * 3
    source = as_jsonl(tmp_path / "in.jsonl", rows)
    template, folder = tmp_path / "mistral.jinja", str(tmp_path / "t")
    template.write_text(MISTRAL)
    call = {"output_path": str(tmp_path / "x.mindrecord"), "tokenizer": folder, "seq_length": 150}
    with pytest.raises(TokenizerError, match="give one with --chat-template"):
        convert_chat(source, **call, train_vocab_size=300)
    assert not os.path.exists(folder)
    for overwrite in (False, True):
        report = convert_chat(
            source, **call, train_vocab_size=300, chat_template=str(template), holdout=0.4, overwrite=overwrite
        )
    assert (report.rows, report.held_out_rows) == (4, 2)
    trained = tokenizers.load_tokenizer(folder)
    assert trained.chat_template == MISTRAL and len(trained) == report.vocab_size <= 300
    texts = [learned(row, trained) for path in (report.output, report.held_out) for row in read_back(path)]
    assert sorted(texts) == [" There are 2 cats, 温太医.</s>"] * 3 + [" cats?</s>"] * 3
    # Later, the template is found beside the tokenizer.
    again = convert_chat(source, str(tmp_path / "y.mindrecord"), folder, 150)
    assert [learned(row, trained) for row in read_back(again.output)[:2]] == [
        " There are 2 cats, 温太医.</s>",
        " cats?</s>",
    ]
