"""Dialogue: what a question's prompt holds of what was said, seeds, and the window."""

import pytest

from mindlora.core.errors import RequestError
from mindlora.serving.chat_prompt import choose_prompt_form
from mindlora.serving.dialogue import Dialogue
from mindlora.serving.request import Sampling
from tests.support.scripted_engine import SEQ_LENGTH, make_engine, started


@pytest.fixture(scope="module")
def engine():
    with started(make_engine()) as engine:
        yield engine


@pytest.fixture
def dialogue(engine):
    """Returns a function that makes one."""

    def make(template=None, sampling=None, **settings):
        sampling = sampling or Sampling(temperature=0.0)
        return Dialogue(engine, choose_prompt_form(engine.tokenizer, template), sampling, **settings)

    return make


def asked(dialogue, question, answer="yes"):
    """Asks, and takes an answer of the test's own; returns the request."""
    stream = dialogue.ask(question)
    stream.cancel()
    dialogue.take(question, answer)
    return stream.request


def text(engine, request):
    return engine.tokenizer.decode(request.prompt)


def test_a_question_is_asked_with_what_was_said_before(engine, dialogue):
    talk = dialogue(system="be kind")
    asked(talk, "hi", "hello")
    assert text(engine, asked(talk, "well")) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nwell<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.system = None
    assert talk.take_back() == "well"
    assert "kind" not in text(engine, asked(talk, "so")) and len(talk.history) == 4
    talk.reset()
    assert text(engine, asked(talk, "hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_a_turn_ends_an_answer(engine, dialogue):
    (end,) = asked(dialogue(), "hi").sampling.stop_tokens
    assert engine.tokenizer.decode([end]) == "<|im_end|>"


def test_the_oldest_turns_are_left_behind_when_the_window_is_full(engine, dialogue):
    talk, dropped = dialogue(max_tokens=20), []
    for number in range(12):
        request = asked(talk, f"{number} cats", "there are cats and dogs")
        dropped.append(talk.dropped)
        assert len(request.prompt) + request.sampling.max_tokens <= SEQ_LENGTH and request.sampling.max_tokens == 20
        said = [turn["content"] for turn in talk.history if turn["role"] == "user"]
        # What is remembered is what was sent, the newest without a gap.
        assert said == [f"{turn} cats" for turn in range(number - len(said) + 1, number + 1)]
        assert all(f"user\n{question}<" in text(engine, request) for question in said)
        assert text(engine, request).count("<|im_start|>user") == len(said)
    assert dropped[:3] == [0, 0, 0] and 0 < sum(dropped) < 12


def test_an_answer_may_use_what_is_left_of_the_window(dialogue):
    request = asked(dialogue(), "hi")
    assert len(request.prompt) + request.sampling.max_tokens == SEQ_LENGTH


def test_a_question_longer_than_the_window_is_refused_and_nothing_is_forgotten(dialogue):
    talk = dialogue()
    asked(talk, "hi")
    with pytest.raises(RequestError, match="^This message is .* make it shorter.$"):
        talk.ask("long " * SEQ_LENGTH)
    assert len(talk.history) == 2


def test_a_form_of_one_message_sends_each_alone(engine, dialogue):
    talk = dialogue("plain")
    asked(talk, "hi")
    assert not talk.can_remember and text(engine, asked(talk, "well")) == "<s>well\n"
    talk.system = "be kind"
    with pytest.raises(RequestError, match="^A system message needs a chat template"):
        talk.ask("hi")


def test_each_answer_has_a_seed_of_its_own(dialogue):
    talk = dialogue(sampling=Sampling(seed=5))
    assert [asked(talk, "hi").sampling.seed for _ in range(3)] == [5, 6, 7]
    talk.set_seed(9)
    assert [asked(talk, "hi").sampling.seed for _ in range(2)] == [9, 10]
    talk.reset()
    assert asked(talk, "hi").sampling.seed == 9
    talk.set_seed(None)
    assert asked(talk, "hi").sampling.seed is None


def test_there_is_nothing_to_take_back_at_first(dialogue):
    with pytest.raises(RequestError, match="^Nothing has been asked yet"):
        dialogue().take_back()
