"""Converting preferences to MindRecord: the forms that are read, rows of one example and packed ones, cut prompts."""

import json
import os

import mindspore.dataset
import numpy as np
import pytest

from mindlora.cli import main
from mindlora.core.errors import DataError, TokenizerError
from mindlora.data.conversion import UnusableRow
from mindlora.training.preference.conversion import convert_preference, read_preference
from tests.support.chat_templates import CHATML, MARKED, THINKING, chat_tokenizer
from tests.support.instruction_rows import as_jsonl

LENGTH = 80
DATA = os.environ.get("MINDLORA_TEST_DATA")
PROMPTS = ["How many cats are there?", "And dogs?", "Who counts the cats?"]
PAIRS = [
    {"prompt": PROMPTS[0], "chosen": "Two.", "rejected": "There are no cats."},
    {"prompt": PROMPTS[1], "chosen": "None at all.", "rejected": "Two."},
    {"prompt": PROMPTS[2], "chosen": "I do.", "rejected": "Nobody counts."},
]
GPT = {"from": "gpt", "value": "No."}
JUDGED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n != 1} for n, row in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def chatml():
    return chat_tokenizer(CHATML)


# As Llama 3's, it leaves out white space around a text.
TRIMMING = chat_tokenizer(CHATML.replace("message.content", "(message.content | trim)"))


def rows_of(path):
    rows = mindspore.dataset.MindDataset(path, shuffle=False)
    return list(rows.create_dict_iterator(num_epochs=1, output_numpy=True))


def convert(tmp_path, records, tokenizer, length=LENGTH, **settings):
    source = as_jsonl(tmp_path / "in.jsonl", records)
    return convert_preference(source, str(tmp_path / "x.mindrecord"), tokenizer, length, overwrite=True, **settings)


def answers_of(row, tokenizer):
    """{number: (text of the answer, text before it in its sequence)}, as the columns tell."""
    found = {}
    width = row["input_ids"].shape[-1]
    columns = [row[name].reshape(-1, width) for name in ("input_ids", "labels", "answers")]
    for tokens, labels, answers in zip(*columns):
        assert ((labels >= 0) == (answers >= 0)).all() and (labels[labels >= 0] == tokens[labels >= 0]).all()
        for number in sorted(set(answers[answers >= 0].tolist())):
            (places,) = np.nonzero(answers == number)
            assert (np.diff(places) == 1).all()
            found[number] = tokenizer.decode(tokens[places]), tokenizer.decode(tokens[: places[0]])
    return found


def prompted(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_pairs_become_rows_of_two_sequences(tmp_path, chatml):
    report = convert(tmp_path, PAIRS, chatml)
    rows = rows_of(report.output)
    assert len(rows) == report.rows == 3
    for row, record in zip(rows, PAIRS):
        assert row["input_ids"].shape == row["answers"].shape == (2, LENGTH + 1) and row["pairs"].tolist() == [1]
        expected = [(record[side] + "<|im_end|>", prompted(record["prompt"])) for side in ("chosen", "rejected")]
        assert list(answers_of(row, chatml).values()) == expected
    counted = sum((row["labels"] >= 0).sum() for row in rows)
    assert report.trained_tokens == counted


@pytest.mark.parametrize("template", [CHATML, THINKING, MARKED], ids=["ChatML", "thinking", "marked"])
def test_only_the_answer_is_learned(tmp_path, template):
    messages = [
        {"role": "user", "content": "How many cats are there?"},
        {"role": "assistant", "content": "<think>Let me see.</think>Two."},
        {"role": "user", "content": "And dogs?"},
    ]
    said = [{"role": "assistant", "content": text} for text in ("None.", "Two cats.")]
    tokenizer = chat_tokenizer(template)
    report = convert(tmp_path, [{"prompt": messages, "chosen": said[:1], "rejected": said[1:]}], tokenizer, 200)
    (row,) = rows_of(report.output)
    found = [text.removesuffix("<|im_end|>") for text, _ in answers_of(row, tokenizer).values()]
    assert found == ["None.", "Two cats."]


def test_packed_rows_hold_both_answers_of_a_pair(tmp_path, chatml):
    length = 2 * LENGTH
    report = convert(tmp_path, PAIRS * 3, chatml, length, pack=True)
    rows = rows_of(report.output)
    assert len(rows) == report.rows < 9 and report.packed_boundary is not None
    found = []
    for row in rows:
        answers = answers_of(row, chatml)
        (count,) = np.nonzero(row["pairs"])
        assert sorted(answers) == list(range(2 * len(count))) and row["input_ids"].shape == (length + 1,)
        found += [(answers[2 * number][0], answers[2 * number + 1][0]) for number in range(len(count))]
    expected = [tuple(record[side] + "<|im_end|>" for side in ("chosen", "rejected")) for record in PAIRS * 3]
    assert sorted(found) == sorted(expected)
    assert len({len(row["pairs"]) for row in rows}) == 1


def test_a_prompt_is_cut_at_its_beginning_and_an_answer_never(tmp_path, chatml):
    rows = [PAIRS[0], {"prompt": "cats " * 60, "chosen": "Two.", "rejected": "There are no cats."}]
    rows.append({"prompt": "x", "chosen": "dogs " * 100, "rejected": "No."})
    whole = convert(tmp_path, rows, chatml)
    assert whole.rows == 1 and sum(map(len, whole.skipped.values())) == 2
    report = convert(tmp_path, rows, chatml, truncate=True)
    assert report.rows == 2 and len(report.truncated) == 1 and "cut at the beginning: 1" in str(report)
    ((problem, _),) = report.skipped.items()
    assert problem == f"answers that leave no room for a prompt in {LENGTH + 1} tokens"
    answers = answers_of(rows_of(report.output)[1], chatml)
    assert [text for text, _ in answers.values()] == ["Two.<|im_end|>", "There are no cats.<|im_end|>"]
    prompts = [prompt for _, prompt in answers.values()]
    assert prompts[0] == prompts[1] and prompts[0].endswith("cats <|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0].startswith("<|im_start|>cats") or prompts[0].startswith("<|im_start|>")
    packed = convert(tmp_path, rows, chatml, 2 * LENGTH, truncate=True, pack=True)
    texts = [text for row in rows_of(packed.output) for text, _ in answers_of(row, chatml).values()]
    assert texts.count("Two.<|im_end|>") == 2


@pytest.mark.parametrize("pack", [False, True])
def test_judged_answers_stand_beside_those_to_other_prompts(tmp_path, chatml, pack):
    # The same prompt twice: its own other answer tells nothing of other prompts.
    judged = [*JUDGED, {**JUDGED[2], "completion": "You do.", "label": False}]
    report = convert(tmp_path, judged, chatml, 2 * LENGTH, pack=pack)
    found = {}
    for row in rows_of(report.output):
        answers = answers_of(row, chatml)
        for number, judgment in enumerate(row["judgments"]):
            if judgment:
                found[answers[2 * number][0]] = judgment, answers[2 * number + 1][0]
    end = "<|im_end|>"
    assert found == {
        f"Two.{end}": (1, f"You do.{end}"),
        f"None at all.{end}": (-1, f"Two.{end}"),
        f"I do.{end}": (1, f"None at all.{end}"),
        f"You do.{end}": (-1, f"None at all.{end}"),
    }


def test_prompts_that_were_cut_are_compared_as_they_were(tmp_path, chatml):
    long = "cats " * 60
    judged = [
        {"prompt": "dogs", "completion": "Three.", "label": True},
        {"prompt": long, "completion": "Two.", "label": True},
        {"prompt": long, "completion": "There are no cats at all.", "label": False},
    ]
    report = convert(tmp_path, judged, chatml, truncate=True)
    assert len(report.truncated) == 2
    rows = [answers_of(row, chatml) for row in rows_of(report.output)]
    # The two long prompts were cut at different places, since their answers differ in length.
    assert rows[1][0][1] != rows[2][0][1]
    assert [row[1][0] for row in rows[1:]] == ["Three.<|im_end|>"] * 2


def test_an_error_about_the_rows_that_are_left_names_the_others(tmp_path, chatml):
    rows = [JUDGED[0], {**JUDGED[0], "completion": "One.", "label": False}, {**JUDGED[1], "label": 3}]
    others = 'Correct also the rows that cannot be used: a "label" that.*line 3'
    with pytest.raises(DataError, match=f"have the same prompt.* several prompts. {others}"):
        convert(tmp_path, rows, chatml)
    with pytest.raises(DataError, match="there is one. Correct also the rows that cannot be used: .*same as tokens: 1"):
        convert(tmp_path, [PAIRS[0], {**PAIRS[1], "rejected": PAIRS[1]["chosen"] + " "}], TRIMMING, holdout=0.5)


def test_texts_without_a_chat_template_stay_as_they_are(tmp_path, tokenizer):
    report = convert(tmp_path, PAIRS, tokenizer)
    found = answers_of(rows_of(report.output)[0], tokenizer)
    assert found[0] == ("Two.</s>", "<s>" + PROMPTS[0])
    assert "the texts are taken as they are, because there is no chat template" in report.notes
    with pytest.raises(TokenizerError, match="no chat template"):
        convert(
            tmp_path, [{"prompt": "x", "chosen": [{"role": "assistant", "content": "y"}], "rejected": GPT}], tokenizer
        )


def test_pairs_and_judged_answers_are_not_mixed(tmp_path, chatml):
    report = convert(tmp_path, [*PAIRS, JUDGED[0]], chatml)
    assert report.rows == 3 and list(report.skipped) == ["an answer with a label among pairs"]
    with pytest.raises(DataError, match="answers with a label have the same prompt"):
        convert(tmp_path, [JUDGED[0], {**JUDGED[0], "completion": "Three."}], chatml)


@pytest.mark.skipif(not DATA, reason="MINDLORA_TEST_DATA names no folder")
@pytest.mark.parametrize("name", ["dpo_en_demo.json", "kto_en_demo.json"])
def test_published_data_loads_whole(tmp_path, chatml, name):
    report = convert_preference(os.path.join(DATA, name), str(tmp_path / "x.mindrecord"), chatml, 16384, strict=True)
    assert report.rows == 300 and not report.skipped


def test_the_command(tmp_path, tokenizer_path, capsys):
    source, output = as_jsonl(tmp_path / "in.jsonl", PAIRS), str(tmp_path / "x.mindrecord")
    arguments = ["--input", source, "--output", output, "--tokenizer", tokenizer_path, "--seq-length", str(LENGTH)]
    assert main(["data", "preference", *arguments, "--holdout", "0.4"]) == 0
    assert "2 rows of 81 tokens" in capsys.readouterr().out
    assert len(rows_of(output)) == 2 and len(rows_of(output.replace(".mindrecord", "-heldout.mindrecord"))) == 1


# The forms in which people store preferences, and the rows that hold none


USER = {"role": "user", "content": "Who?"}
GOOD = {"role": "assistant", "content": "The keeper."}
BAD = {"role": "assistant", "content": "No."}
ASKED = [USER, BAD, {"role": "user", "content": "Sure?"}]


def sharegpt(message):
    return {"from": "human" if message["role"] == "user" else "gpt", "value": message["content"]}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Who?", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        # UltraFeedback's binarized form.
        {"prompt": "Who?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD], "score": 9},
        # LLaMA-Factory's.
        {"messages": [sharegpt(USER)], "chosen": sharegpt(GOOD), "rejected": sharegpt(BAD)},
        # Anthropic's.
        {"chosen": "\n\nHuman: Who?\n\nAssistant: The keeper.", "rejected": "\n\nHuman: Who?\n\nAssistant: No."},
        # As a table holds lists.
        {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    ],
    ids=["explicit", "both", "text and messages", "implicit", "UltraFeedback", "LLaMA-Factory", "Anthropic", "JSON"],
)
def test_pairs_of_messages(record):
    assert read_preference(record) == ([USER], ([GOOD], [BAD]), None, None)


def test_pairs_of_texts():
    expected = ("Who is it?", (" The keeper.", " The ghost."), None, None)
    assert read_preference({"prompt": expected[0], "chosen": expected[1][0], "rejected": expected[1][1]}) == expected
    # The common words of an implicit prompt end before the word in which the texts differ.
    found = read_preference({"chosen": "Who is it? The keeper.", "rejected": "Who is it? The ghost."})
    assert found == ("Who is it? The", (" keeper.", " ghost."), None, None)
    completions = [{"response": text, "overall_score": score} for text, score in (("b", 4), ("c", 1.5), ("a", 8))]
    assert read_preference({"prompt": "Who?", "completions": completions}) == ("Who?", ("a", "c"), None, None)
    # What looks like JSON is a text all the same.
    assert read_preference({"prompt": "6 7 =", "chosen": "42", "rejected": "[1]"}).answers == ("42", "[1]")


def test_prompts_of_several_turns():
    found = read_preference({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, {**GOOD, "content": "Yes."}]})
    assert found.prompt == ASKED and found.answers[0] == [GOOD]
    # What follows may be several turns.
    found = read_preference({"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, GOOD]})
    assert found.prompt == [USER] and found.answers == ([BAD, USER, GOOD], [GOOD])


def test_system_prompts_and_tools():
    tools = [{"name": "look", "parameters": {}}]
    found = read_preference({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "system": "Short.", "tools": tools})
    assert found.prompt == [{"role": "system", "content": "Short."}, USER]
    assert found.tools == [{"type": "function", "function": tools[0]}]


@pytest.mark.parametrize("label", [True, False, 1, 0, "true"])
def test_judged_answers(label):
    assert read_preference({"messages": [USER, GOOD], "label": label}) == (
        [USER],
        ([GOOD],),
        label in (True, "true"),
        None,
    )
    found = read_preference({"prompt": "Who?", "completion": "I.", "label": label})
    assert found[:2] == ("Who?", ("I.",))


@pytest.mark.parametrize(
    "record, problem",
    [
        ("text", "not an object"),
        ({"prompt": "x", "chosen": "a"}, 'no "rejected"'),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "two answers that are the same"),
        ({"prompt": "x", "chosen": "a", "rejected": " "}, "an empty answer"),
        ({"prompt": "x", "chosen": "a", "rejected": 3}, '"rejected" is neither a text nor messages'),
        ({"prompt": "x", "chosen": "a", "rejected": [BAD]}, "one answer is a text and the other messages"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "some are texts and some are messages"),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]}, "an empty answer"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD]}, "without a common prompt"),
        ({"chosen": "abc", "rejected": "xyz"}, "two texts without a common beginning"),
        ({"prompt": "x", "completions": [{"response": "a", "overall_score": 1}]}, "two responses of different"),
        ({"messages": [USER, GOOD], "label": "maybe"}, '"label" that is neither true nor false'),
        ({"messages": [USER], "label": True}, 'no "messages" with an answer'),
        ({"prompt": "x", "chosen": "a", "rejected": "b", "system": "Short."}, "beside texts: write messages"),
        ({"prompt": "x", "chosen": "a", "rejected": "\ud800"}, "not valid Unicode"),
    ],
)
def test_rows_that_hold_no_preference(record, problem):
    with pytest.raises(UnusableRow, match=problem):
        read_preference(record)
