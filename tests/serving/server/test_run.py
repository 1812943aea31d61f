"""The server from its start to the signal that ends it."""

import contextlib
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from mindlora.core.errors import ConfigError, ServingError
from mindlora.serving.server.run import run
from mindlora.serving.server.settings import ServerSettings
from tests.support.scripted_engine import BASE, make_engine
from tests.support.served_apps import error_of, until

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = {"model": BASE, "prompt": "x" * 50, "max_tokens": 200, "ignore_eos": True}


def serve(talk, delay=0.0, **settings):
    """Runs a server here, and ``talk(client, engine)`` in a thread; returns the engine and what talk returned."""
    results, threads = [], []

    def slow_engine():
        engine = make_engine()
        engine.runner.delay = delay
        return engine

    def listening(engine, url):
        def work():
            with httpx.Client(base_url=url, timeout=20, verify=False) as client:
                try:
                    results.append(talk(client, engine))
                except BaseException as error:
                    results.append(error)
                    os.kill(os.getpid(), signal.SIGTERM)

        threads.append(threading.Thread(target=work))
        threads[0].start()

    engine = run(slow_engine, ServerSettings(port=0, **settings), listening)
    threads[0].join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return engine, results[0]


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def in_the_background(client, body, answers):
    thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
    thread.start()
    return thread


def test_on_sigterm_running_requests_end_and_new_ones_are_told_to_come_again():
    def talk(client, engine):
        assert [client.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [200] * 3
        answers = []
        thread = in_the_background(client, LONG, answers)
        until(lambda: engine.snapshot().running)
        stop()
        refused = until(lambda: (answer := client.get("/ready")).status_code == 503 and answer)
        assert refused.headers["Retry-After"] == "10" and error_of(refused)["code"] == "shutting_down"
        for fields in ({}, {"stream": True}):
            refused = client.post("/v1/completions", json={"model": BASE, "prompt": "x", **fields})
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
        assert client.get("/health").status_code == 200
        thread.join()
        return answers[0]

    engine, answer = serve(talk, delay=0.003)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 200
    assert not engine.alive


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_not_ended_after_the_grace_is_ended(stream):
    def talk(client, engine):
        answers, begin = [], time.monotonic()
        thread = in_the_background(client, {**LONG, "stream": stream}, answers)
        until(lambda: engine.snapshot().running)
        time.sleep(0.1)
        stop()
        thread.join()
        assert time.monotonic() - begin < 3
        return answers[0]

    _, answer = serve(talk, delay=0.05, grace=0.2)
    if stream:
        assert answer.status_code == 200 and '"code": "shutting_down"' in answer.text
    else:
        assert answer.status_code == 503 and error_of(answer)["code"] == "shutting_down"


def test_a_second_signal_ends_the_grace():
    def talk(client, engine):
        answers, begin = [], time.monotonic()
        thread = in_the_background(client, LONG, answers)
        until(lambda: engine.snapshot().running)
        stop()
        until(lambda: client.get("/ready").status_code == 503)
        os.kill(os.getpid(), signal.SIGINT)
        thread.join()
        assert time.monotonic() - begin < 5
        return answers[0].status_code

    assert serve(talk, delay=0.05, grace=100.0)[1] == 503


def test_health_answers_while_the_model_is_loaded_and_the_engine_starts():
    loaded, compiled, answers, engine = threading.Event(), threading.Event(), [], make_engine()
    engine.runner.warm_up = lambda *_: compiled.wait()

    def load():
        loaded.wait()
        return engine

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def talk():
        def answer(path):
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}{path}", verify=False)

        assert until(lambda: answer("/health")).status_code == 200
        answers.extend(map(answer, ("/ready", "/v1/models")))
        loaded.set()
        until(lambda: (found := answer("/v1/models")) and found.status_code == 200)
        answers.append(answer("/ready"))
        compiled.set()
        answers.append(until(lambda: (found := answer("/ready")).status_code == 200 and found))
        stop()

    thread = threading.Thread(target=talk)
    thread.start()
    run(load, ServerSettings(port=port))
    thread.join()
    assert len(answers) == 4
    for answer in answers[:3]:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "10"
        assert answer.json()["error"]["code"] == "starting"


def test_what_cannot_be_loaded_ends_the_server():
    def load():
        raise ConfigError("There are no weights.")

    with pytest.raises(ConfigError, match="no weights"):
        run(load, ServerSettings(port=0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_start_ends_the_server():
    engine = make_engine()

    def broken(*_):
        raise RuntimeError("no such operator")

    engine.runner.warm_up = broken
    with pytest.raises(ServingError, match="first step"):
        run(lambda: engine, ServerSettings(port=0))


def closed_after(connection, limit=5.0):
    """Returns what came before the server closed a connection, and after how many seconds that was."""
    begin, data = time.monotonic(), b""
    connection.settimeout(limit)
    while part := connection.recv(4096):
        data += part
    return data, time.monotonic() - begin


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", HEALTH, HEALTH + b"GET /hea"], ids=["nothing", "half", "one", "one and a half"]
)
def test_a_connection_is_closed_unless_the_head_of_a_request_comes(sent):
    def talk(client, _):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(sent)
            found = closed_after(connection)
        stop()
        return found

    data, seconds = serve(talk, idle_seconds=0.5)[1]
    assert data.count(b"200 OK") == sent.count(HEALTH) and 0.4 < seconds < 4


def test_a_request_that_takes_longer_than_an_idle_connection_is_answered():
    def talk(client, _):
        answer = client.post("/v1/completions", json={**LONG, "max_tokens": 20})
        again = client.get("/health")
        stop()
        return answer, again

    answers = serve(talk, delay=0.03, idle_seconds=0.2)[1]
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed():
    both = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )

    def talk(client, _):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(both + HEALTH)
            found = closed_after(connection)
        stop()
        return found

    data, seconds = serve(talk)[1]
    assert data.startswith(b"HTTP/1.1 400") and b"invalid_framing" in data and data.count(b"HTTP/1.1") == 1
    assert seconds < 4


def test_answers_are_sent_at_once():
    def talk(client, _):
        seconds = []
        for _ in range(21):
            begin = time.perf_counter()
            assert client.get("/health").status_code == 200
            seconds.append(time.perf_counter() - begin)
        stop()
        return sorted(seconds)[10]

    # Where small packets wait for each other, it is 40 ms.
    assert serve(talk)[1] < 0.03


def test_a_port_that_is_taken_is_an_error_before_the_engine_starts():
    engine = make_engine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            run(lambda: engine, ServerSettings(port=port))
    assert not engine.alive


def test_ready_tells_when_the_engine_has_ended():
    def talk(client, engine):
        engine.stop()
        answers = [client.get("/ready"), client.post("/v1/completions", json={"model": BASE, "prompt": "x"})]
        assert client.get("/health").status_code == 200
        stop()
        return answers

    for answer in serve(talk)[1]:
        assert answer.status_code == 503 and error_of(answer)["code"] == "not_ready"
