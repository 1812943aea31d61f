"""Thoughts: found in an answer however it is cut into pieces, and let in before a constrained answer."""

import pytest

from mindlora.models.thoughts import FAMILIES, marks_of
from mindlora.serving.thoughts import ThoughtReader, Thoughts, thoughts_after
from tests.support.chat_templates import CHATML, THINKING, chat_tokenizer

THINK, MAGISTRAL = FAMILIES


def read(text, size, marks=THINK, begun=False):
    """Returns the thought and the answer in a text that comes in pieces of ``size`` characters."""
    reader = ThoughtReader(Thoughts(marks, begun))
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    read = [reader.read(piece, False) for piece in pieces] + [reader.read("", True)]
    return "".join(thought for thought, _ in read), "".join(answer for _, answer in read)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "text, thought, answer",
    [
        ("<think>\nTwo\n\ncats.\n</think>\n\nThere are 2.", "Two\n\ncats.", "There are 2."),
        ("\n<think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\nThere are 2.\n", "", "There are 2.\n"),
        ("There are <think>2</think>.", "", "There are <think>2</think>."),
        ("\n\nThere are 2.", "", "\n\nThere are 2."),
        ("<thin", "", "<thin"),
        ("<think>\nTwo </thin", "Two </thin", ""),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("", "", ""),
    ],
)
def test_a_thought_is_told_from_the_answer(text, thought, answer, size):
    assert read(text, size) == (thought, answer)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_where_the_prompt_has_begun_the_thought_the_answer_ends_it(size):
    assert read("\nTwo cats.\n</think>\n\nThere are 2.", size, begun=True) == ("Two cats.", "There are 2.")
    assert read("Two cats", size, begun=True) == ("Two cats", "")
    assert read("[THINK]Two[/THINK]2", size, MAGISTRAL) == ("Two", "2")


def test_without_a_thought_all_is_the_answer():
    assert ThoughtReader(None).read("<think>a</think>b", True) == ("", "<think>a</think>b")


def test_the_template_tells_the_family():
    assert marks_of(THINKING) == THINK and marks_of(CHATML) is None
    assert marks_of("{{ '[THINK]' + thought + '[/THINK]' }}") == MAGISTRAL


def test_the_end_of_the_prompt_tells_where_the_thought_is():
    tokenizer = chat_tokenizer(CHATML)

    def after(text):
        return thoughts_after(tokenizer.encode(text), tokenizer, THINK)

    assert after("<|im_start|>assistant\n") == Thoughts(THINK, False)
    assert after("<|im_start|>assistant\n<think>\n") == Thoughts(THINK, True)
    assert after("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert Thoughts(THINK, True).nothing == "\n</think>\n\n"
    assert Thoughts(THINK, False).nothing == "<think>\n\n</think>\n\n"
