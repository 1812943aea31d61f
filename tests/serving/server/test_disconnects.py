"""Clients that are gone: what they asked for ends within a step."""

import contextlib
import json
import socket
import time

import httpx
import pytest

from tests.support.scripted_engine import BASE
from tests.support.served_apps import live, make_app, until


@contextlib.contextmanager
def connected(url, path, body):
    """Sends a request on a connection of its own, which is cut when the context ends."""
    address, content = httpx.URL(url), json.dumps(body).encode()
    with contextlib.closing(socket.create_connection((address.host, address.port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection
        # As kill -9 of the client does.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def idle(engine):
    snapshot = engine.snapshot()
    return snapshot.blocks_free == snapshot.blocks_total and not snapshot.running + snapshot.waiting


@pytest.mark.parametrize("stream", [False, True])
def test_the_blocks_of_a_client_that_is_gone_are_free_within_a_step(engine, stream):
    engine.runner.delay = 0.02
    body = {"model": "pirate", "prompt": "x" * 50, "max_tokens": 200, "ignore_eos": True, "n": 2, "stream": stream}
    with live(make_app(engine)) as url:
        with connected(url, "/v1/completions", body) as connection:
            until(lambda: engine.snapshot().running == 2)
            if stream:
                # The head may arrive before.
                assert any(line.startswith(b"data: ") for line in connection.makefile("rb"))
            steps = engine.runner.steps
        until(lambda: idle(engine))
        assert engine.runner.steps - steps < 20  # of 200
        assert engine.adapters.stats().leased == 0


def test_a_client_that_waits_for_its_turn_can_leave(engine):
    engine.runner.going.clear()
    with live(make_app(engine)) as url:
        bodies = [{"model": BASE, "prompt": "x", "stream": stream} for stream in (False, True)]
        for body in bodies:
            with connected(url, "/v1/completions", body):
                until(lambda: not idle(engine))
            until(lambda: idle(engine))
        engine.runner.going.set()


def test_others_go_on(engine):
    engine.runner.delay = 0.005
    body = {"model": "formal", "prompt": "x" * 50, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as client:
        with connected(url, "/v1/completions", body), connected(url, "/v1/completions", body):
            until(lambda: engine.snapshot().running == 2)
        answer = client.post("/v1/completions", json={"model": "pirate", "prompt": "hello", "max_tokens": 20})
        assert answer.json()["choices"][0]["text"] == "Arr, hello"
        until(lambda: idle(engine))


def test_a_disconnect_is_logged_as_such(engine, tmp_path):
    engine.runner.delay = 0.02
    path = tmp_path / "requests.jsonl"
    with live(make_app(engine, request_log=str(path))) as url:
        with connected(url, "/v1/completions", {"model": BASE, "prompt": "x" * 50, "max_tokens": 50}):
            until(lambda: engine.snapshot().running)
            time.sleep(0.05)
        line = json.loads(until(path.read_text))
    assert line["reason"] == "disconnected" and line["prompt_tokens"] == 51 and 0 < line["generated_tokens"] < 50


def test_a_client_that_reads_slowly_gets_everything(engine):
    body = {"model": BASE, "prompt": "y" * 50, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as client:
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for piece in answer.iter_text(1 << 14):
                time.sleep(0.002)
                text += piece
        assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 4
