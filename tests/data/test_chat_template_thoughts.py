"""What the assistant thought: learned where the template has it, counted where it does not, and never in two blocks."""

import pytest

from mindlora.data.chat import ChatExamples
from mindlora.data.conversion import UnusableRow
from mindlora.training.preference.conversion import PreferenceExamples
from tests.support.chat_templates import CHATML, OPENING, THINKING, chat_tokenizer, runs

QUESTION = {"role": "user", "content": "2+2?"}
THOUGHT, ANSWER = "two and two", "Four."
IN_BLOCK = f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"
# Shows a block of its own, and knows no field.
EMPTY_BLOCK = OPENING.replace("(message.reasoning_content or '')", "''")


def encode(template, *messages):
    """Returns what is learned of a conversation, and the notes on it that speak of thoughts."""
    tokenizer = chat_tokenizer(template, eos_token="<|im_end|>")
    examples = ChatExamples()
    examples.prepare(tokenizer)
    encoded = examples.encode(examples.parse({"messages": list(messages)}), tokenizer)
    return runs(encoded, tokenizer), examples.notes()


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "message",
    [
        *(said(ANSWER, **{field: THOUGHT}) for field in ("reasoning_content", "reasoning", "thinking")),
        said(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"),
        said(f"<think>{THOUGHT}</think>{ANSWER}"),
        said(f"{THOUGHT}\n</think>\n\n{ANSWER}"),
    ],
    ids=["reasoning_content", "reasoning", "thinking", "in the content", "without new lines", "without a beginning"],
)
def test_thoughts_stand_in_the_block_of_the_template_wherever_a_row_has_them(message):
    learned, notes = encode(OPENING, QUESTION, message, QUESTION, message)
    assert learned == [IN_BLOCK] * 2 and notes == []


def test_an_answer_without_thoughts_has_an_empty_block():
    learned, notes = encode(OPENING, QUESTION, said(ANSWER))
    assert learned == [f"\n</think>\n\n{ANSWER}<|im_end|>"] and notes == []


def test_a_second_block_in_an_answer_is_left_out_and_named():
    for template, content in (
        (EMPTY_BLOCK, f"{THOUGHT}</think>{ANSWER}"),
        (EMPTY_BLOCK, f"<think>{THOUGHT}</think>{ANSWER}"),
        (OPENING, f"Well. <think>{THOUGHT}</think>{ANSWER}"),
    ):
        with pytest.raises(UnusableRow, match='^"</think>" in the assistant.s content, behind the block'):
            encode(template, QUESTION, said(content))
    # What others say of it is theirs.
    asked = {"role": "user", "content": "What does </think> mean?"}
    assert encode(EMPTY_BLOCK, asked, said(ANSWER))[0] == [f"\n</think>\n\n{ANSWER}<|im_end|>"]


def test_a_template_without_a_block_takes_the_content_as_it_is():
    content = f"<think>{THOUGHT}</think>{ANSWER}"
    assert encode(CHATML, QUESTION, said(content)) == ([f"{content}<|im_end|>"], [])
    assert encode(THINKING, QUESTION, said(content)) == ([f"{content}<|im_end|>"], [])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "thoughts"])
def test_thoughts_that_the_template_does_not_show_are_counted(field):
    learned, notes = encode(CHATML, QUESTION, said(ANSWER, **{field: THOUGHT}))
    assert learned == [f"{ANSWER}<|im_end|>"]
    assert notes == ["the chat template does not show all of the assistant's thoughts of 1 rows"]
    assert encode(CHATML, QUESTION, said(ANSWER, **{field: " "}))[1] == []


def test_a_pair_that_differs_in_what_is_not_shown_alone_is_left_out():
    def pair(template):
        tokenizer = chat_tokenizer(template)
        examples = PreferenceExamples(64)
        row = {"prompt": [QUESTION], **{name: [said(ANSWER, reasoning=name)] for name in ("chosen", "rejected")}}
        preference = examples.parse(row)
        examples.prepare(tokenizer)
        return examples.encode(preference, tokenizer)

    with pytest.raises(UnusableRow, match="^two answers that are the same as tokens"):
        pair(CHATML)
    first, second = pair(OPENING).parts
    assert first.tokens.tolist() != second.tokens.tolist()
