"""Real clients ask a real server: chats, streams, loops of tools and typed answers beside tools."""

import httpx
import pytest

CLIENTS = (
    "openai",
    # They ask what the others ask, and take a quarter of the time of all: before a release.
    *(pytest.param(name, marks=pytest.mark.long) for name in ("litellm", "litellm_vllm")),
    "langchain",
    "instructor",
    "pydantic_ai",
    "openai_agents",
    "llama_index",
)
MODEL = "first"
TYPED = {"city", "days"}


@pytest.fixture(params=CLIENTS, scope="module")
def ask(request, clients, server):
    """Returns a function that has one of the clients do something."""

    def do(verb):
        return getattr(clients, verb)(client=request.param, url=f"{server.url}/v1", model=MODEL)

    do.client = request.param
    return do


@pytest.fixture(scope="module")
def expected(server):
    """The text of the answer to the question, by HTTP alone."""
    messages = [{"role": "user", "content": "How many cats are there?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    with httpx.Client(base_url=server.url, verify=False, timeout=60) as client:
        text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text.strip()
    return text


def is_forecast(found):
    return found.keys() == TYPED and found["city"] in ("Rome", "Paris") and 0 <= found["days"] <= 9


def test_the_text_is_the_servers_whole_or_streamed(ask, expected):
    assert ask("chat") == expected
    streamed = ask("stream")
    assert is_forecast(streamed) if isinstance(streamed, dict) else streamed == expected


def test_tools_are_called_and_the_conversation_goes_on(ask):
    if ask.client == "instructor":
        pytest.skip("it has no loop of tools: it reads the first call")
    found = ask("tools")
    assert len(found["texts"]) == 2 and all(isinstance(text, str) and text for text in found["texts"])
    assert set(found["calls"]) <= {"Rome", "Paris"} and (found["calls"] or "typed" in found)


def test_answers_have_types_beside_tools(ask):
    found = ask("typed")
    assert all(map(is_forecast, found if isinstance(found, list) else [found]))
