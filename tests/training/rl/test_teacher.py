"""rl.teacher: what it may name, and a teacher behind a server."""

import contextlib
import functools
import http.server
import json
import threading
import time

import numpy as np
import pytest

from mindlora.core.errors import ConfigError, TeacherError
from mindlora.data.tokenizers import encode
from mindlora.serving.request import Sampling
from mindlora.training.rl.settings import rl_settings
from mindlora.training.rl.teacher import ServedTeacher
from tests.support.scripted_engine import BASE, make_engine, started
from tests.support.served_apps import live, make_app

PURE = {"prompts": "prompts.jsonl", "teacher": "base"}
NODE = {"url": "http://localhost:8000", "model": "large"}


def test_with_a_teacher_rewards_and_other_answers_to_compare_with_are_not_needed():
    settings = rl_settings({**PURE, "num_generations": 1})
    assert (settings.reward_funcs, settings.reward_names, settings.rows) == ((), (), 8)
    assert (settings.teacher, settings.teacher_coef) == ("base", 1.0)
    assert rl_settings({**PURE, "teacher": NODE}).teacher == ServedTeacher(**NODE)
    both = rl_settings({**PURE, "reward_funcs": "rewards.py:short", "reward_weights": [2], "teacher_coef": 0.1})
    assert (both.reward_weights, both.teacher_coef) == ((2.0,), 0.1)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"algorithm": "rloo"}, "rl.algorithm is 'rloo', and rl.teacher rates each token .* Set algorithm to grpo"),
        ({"importance_sampling_level": "sequence"}, "Set importance_sampling_level to token, or remove teacher"),
        ({"temperature": 0.7}, "rl.temperature is 0.7, .* Set temperature to 1"),
        ({"top_p": 0.9}, "rl.top_p is 0.9"),
        ({"top_k": 20}, "rl.top_k is 20"),
        ({"teacher_coef": 0}, "rl.teacher_coef is 0: it must be a number above 0"),
        ({"reward_weights": [1.0]}, "rl.reward_weights is about rewards, .* no reward_funcs. Remove it"),
        ({"reward_timeout": 5}, "rl.reward_timeout is about rewards"),
        ({"reward_funcs": "rewards.py:short", "num_generations": 1}, "rl.num_generations is 1: .* at least 2"),
        ({"teacher": None}, "rl has no reward_funcs. .*or a teacher to learn from"),
        ({"teacher": None, "reward_funcs": "regex.py:f", "teacher_coef": 1.0}, "teacher_coef and no teacher"),
        ({"teacher": ""}, "rl.teacher is ''. Write base, the path of an adapter, or a node"),
        ({"teacher": "http://localhost:8000"}, "without a model. Write {url: http://localhost:8000, model: NAME}"),
        ({"teacher": {"url": "http://localhost:8000"}}, "rl.teacher has no model"),
        ({"teacher": {**NODE, "modle": "x"}}, "rl.teacher has no key 'modle'. Did you mean 'model'"),
        ({"teacher": {**NODE, "url": "localhost"}}, "url is 'localhost', but it must be the address"),
        ({"teacher": {**NODE, "model": 3}}, "rl.teacher: model is 3"),
        ({"teacher": {**NODE, "timeout": 0}}, "rl.teacher: timeout is 0: it must be a number above 0"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        rl_settings({**PURE, **keys})


def test_a_server_scores_as_its_engine_does():
    engine = make_engine(max_waiting=2)
    rows = [engine.tokenizer.encode("hello cats " * count, add_special_tokens=False) for count in range(1, 7)]
    begins = [1, 2, 1, 4, 5, 3]
    with started(engine), live(make_app(engine)) as url:
        expected = []
        for row, begin in zip(rows, begins):
            piece = next(iter(engine.submit(row, Sampling(max_tokens=0, prompt_logprobs=0, scored_from=begin))))
            expected.append([one.logprob for one in piece.prompt_logprobs[begin:]])
        for end in ("", "/", "/v1"):
            teacher = ServedTeacher(url + end, BASE)
            assert teacher.check_tokenizer(functools.partial(encode, engine.tokenizer))
            # There is room for two that wait: others are refused with 429, and ask again.
            for found, values in zip(teacher.scores(rows, begins), expected):
                np.testing.assert_allclose(found, values, rtol=0, atol=1e-6)
        with pytest.raises(TeacherError, match="rl.teacher: .*/v1/completions answered 404: .*other.*Check the server"):
            ServedTeacher(url, "other").scores(rows, begins)
    assert len({len(row) for row in rows}) == 6


def test_a_teacher_that_reads_other_tokens_is_refused():
    engine = make_engine()
    refused = pytest.raises(TeacherError, match=r"student's tokenizer into \[7, 8, 9\].*Use a teacher")
    with started(engine), live(make_app(engine)) as url, refused:
        ServedTeacher(url, BASE).check_tokenizer(lambda text: [7, 8, 9])


@contextlib.contextmanager
def answering(*answers, seconds=0.0):
    """Yields the URL of a server that gives answers, (status, body), one after the other, and then the last one."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(seconds)
            status, body = left.pop(0) if len(left) > 1 else left[0]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scored(*values):
    return 200, {"choices": [{"logprobs": {"token_logprobs": [None, *values]}}]}


def test_a_busy_server_is_asked_again():
    with answering((429, "full"), (503, "loading"), scored(-1.5, -0.25, -9.0)) as url:
        (found,) = ServedTeacher(url, "large", timeout=30).scores([[1, 2, 3]], [1])
        assert found.tolist() == [-1.5, -0.25]


@pytest.mark.parametrize(
    "answer, message",
    [
        ((200, {"choices": [{"text": "?", "logprobs": None}]}), "a finite number for each .* Use a server that"),
        (scored(-1.0), "answered .* to a prompt of 3 tokens, without a finite number"),
        (scored(-1.0, float("nan")), "without a finite number"),
        ((200, []), "without a finite number"),
        (
            (400, {"error": "logprobs are not supported"}),
            "answered 400: .*logprobs are not supported.*Check the server",
        ),
    ],
)
def test_an_answer_without_scores_is_one_error(answer, message):
    with answering(answer) as url, pytest.raises(TeacherError, match=f"{url}/v1/completions.*{message}"):
        ServedTeacher(url, "large").scores([[1, 2, 3]] * 3, [1] * 3)


def test_a_server_that_is_slow_or_stays_busy_has_a_time_limit():
    with answering((429, "full")) as url, pytest.raises(TeacherError, match="answered 429: .*full.* in time. Raise"):
        ServedTeacher(url, "large", timeout=0.3).scores([[1, 2]], [1])
    with (
        answering(scored(-1.0), seconds=1.0) as url,
        pytest.raises(TeacherError, match="gave no answer in time. Raise"),
    ):
        ServedTeacher(url, "large", timeout=0.3).scores([[1, 2]], [1])


def test_a_server_without_tokenize_is_not_compared_and_no_server_is_an_error():
    with answering((404, {"detail": "Not Found"})) as url:
        assert not ServedTeacher(url, "large").check_tokenizer(len)
    with pytest.raises(TeacherError, match="http://127.0.0.1:9/tokenize does not answer: .*refused.*Start the server"):
        ServedTeacher("http://127.0.0.1:9", "large").check_tokenizer(len)
