"""The server's app asked in the same process, or served on a port."""

import asyncio
import contextlib
import json
import threading
import time

import httpx
import uvicorn

from mindlora.serving.server.run import create_app
from mindlora.serving.server.settings import ServerSettings
from tests.support.scripted_engine import BASE

CHAT = "/v1/chat/completions"


def make_app(engine, **settings):
    return create_app(engine, ServerSettings(**settings))


def ask(app, path, body=None, method=None, headers=None, content=None):
    """Returns the answer of an app to one request, which is a POST if it has a body."""

    async def send():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            verb = method or ("GET" if body is None and content is None else "POST")
            return await client.request(verb, path, json=body, headers=headers, content=content)

    return asyncio.run(send())


def complete(app, prompt="hello cats", **fields):
    return ask(app, "/v1/completions", {"model": BASE, "prompt": prompt, "max_tokens": 40, **fields})


def chat(app, text="hi", **fields):
    return ask(app, CHAT, {"model": BASE, "messages": [{"role": "user", "content": text}], **fields})


def error_of(answer):
    """Returns OpenAI's error object, its form checked."""
    content = answer.json()
    assert content.keys() == {"error"} and content["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    return content["error"]


def events(text):
    """Returns the chunks of a streamed answer, whose form is checked."""
    *parts, end, rest = text.split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@contextlib.contextmanager
def live(app):
    """Serves an app on a port of its own while the context lasts; yields its URL."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    config.timeout_keep_alive = 75
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def until(happened, seconds=10.0):
    """Waits until a function returns something true, and returns that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("it did not happen")
