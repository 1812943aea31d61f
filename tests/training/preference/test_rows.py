"""The forms in which people store preferences, read as a prompt and what was answered, and the rows that hold none."""

import json

import pytest

from mindlora.data.conversion import UnusableRow
from mindlora.training.preference.conversion import read_preference

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
