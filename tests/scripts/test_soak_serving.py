"""scripts/soak_serving.py: what it takes for right, and for memory that grows. The soak itself: test_real_engine.py."""

import json

import pytest

from tests.support.soak import memory_figures
from tests.support.soak_answers import ANSWERED, FAILED, LOST, WRONG, Answer, Question, judge

BODY = json.dumps({"model": "one", "prompt": "x"})
RIGHT = [{"text": text, "reason": "length", "tokens": 2, "numbers": [-0.5]} for text in ("yes", "no")]
QUESTION = Question("completion", "/v1/completions", BODY, RIGHT, {"queue_full": 429})


@pytest.mark.parametrize(
    "outcome, fields",
    [
        (ANSWERED, {}),
        (ANSWERED, {"text": "no"}),
        (WRONG, {"text": "yes."}),
        (WRONG, {"tokens": 1}),
        (ANSWERED, {"numbers": [-0.5001]}),
        (WRONG, {"numbers": [-0.6]}),
        (WRONG, {"numbers": []}),
        (WRONG, {"reason": "stop"}),
        (LOST, {"complete": False}),
        ("queue_full", {"status": 429, "code": "queue_full"}),
        (WRONG, {"status": 200, "code": "queue_full"}),
        (WRONG, {"status": 400, "code": "adapter_refused"}),
        (FAILED, {"status": 500, "code": "engine_error"}),
    ],
)
def test_a_request_is_judged_by_all_that_came(outcome, fields):
    whole = {"status": 200, "text": "yes", "reason": "length", "tokens": 2, "numbers": [-0.5], "complete": True}
    assert judge(QUESTION, Answer(**{**whole, **fields})) == outcome


def test_a_stream_is_lost_without_its_end_and_wrong_with_an_error():
    def taken(*lines):
        answer = Answer(200)
        parts = [answer.take_line(line) for line in lines]
        return judge(QUESTION, answer), sum(parts)

    text = [
        'data: {"choices": [{"text": "y", "logprobs": {"token_logprobs": [null, -0.5]}}]}',
        "",
        'data: {"choices": [{"text": "es", "finish_reason": "length"}]}',
    ]
    usage, done = 'data: {"choices": [], "usage": {"completion_tokens": 2}}', "data: [DONE]"
    assert taken(*text, usage, done) == (ANSWERED, 2)
    assert taken(*text, usage) == (LOST, 2)
    assert taken(*text[1:], usage, done) == (WRONG, 1)
    assert taken(text[0], 'data: {"error": {"code": "engine_error"}}', done) == (WRONG, 1)


@pytest.mark.parametrize(
    "content, text, numbers",
    [
        ({"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}, "f{}", []),
        ({"data": [{"embedding": [0.5, 1.0]}, {"embedding": [2.0]}]}, "", [0.5, 1.0, 2.0]),
        ({"data": [{"label": "no", "probs": [0.25, 0.75]}]}, "no", [0.25, 0.75]),
        ({"data": [{"score": 0.0}]}, "", [0.0]),
        ({"count": 2, "tokens": [5, 6], "token_strs": None}, "[5, 6]", []),
    ],
)
def test_calls_labels_tokens_and_numbers_are_part_of_what_is_said(content, text, numbers):
    answer = Answer(200)
    answer.take_whole(json.dumps(content).encode())
    assert (answer.text, answer.numbers) == (text, numbers)


def test_memory_that_grows_after_the_warm_up_shows():
    flat = [(second, 5e8 + 1e8 * min(second, 10)) for second in range(100)]
    figures = memory_figures(flat, 100)
    assert figures["MB a minute after the warm-up"] == 0 == figures["MB, last fifth less the second"]
    figures = memory_figures([(second, 1e9 + 1e6 * second) for second in range(100)], 100)
    assert figures["MB a minute after the warm-up"] == pytest.approx(60)
    assert figures["MB, last fifth less the second"] == pytest.approx(60)
