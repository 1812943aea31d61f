"""The openai package against the server, as users have it."""

import openai
import pytest

from tests.support.scripted_engine import BASE
from tests.support.served_apps import live, make_app

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(running, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann sk-ann\n")
    app = make_app(running, api_key_file=str(keys))
    with live(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk-ann", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [BASE, "broken", "formal", "pirate"]
    assert client.models.retrieve("pirate").id == "pirate"


def test_completions(client):
    answer = client.completions.create(model="pirate", prompt=["a", "b"], max_tokens=20, logprobs=1, seed=1)
    assert [choice.text for choice in answer.choices] == ["Arr, a", "Arr, b"]
    assert answer.choices[0].logprobs.tokens[0] == "A" and answer.usage.prompt_tokens_details.cached_tokens == 0
    pieces = client.completions.create(model=BASE, prompt="hello", max_tokens=20, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "hello"


def test_chat(client):
    answer = client.chat.completions.create(model="pirate", messages=HI, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Arr, user\nhi"] * 2
    assert answer.choices[0].finish_reason == "stop" and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer._request_id


def test_streamed_chat_with_vllms_extra_fields(client):
    options = {"stream_options": {"include_usage": True}, "extra_body": {"top_k": 5, "repetition_penalty": 1.0}}
    chunks = list(client.chat.completions.create(model="formal", messages=HI, stream=True, **options))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == "Dear Sir, user\nhi" and chunks[-1].usage.completion_tokens > 10
    with client.chat.completions.stream(model="formal", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == said


def test_a_conversation_goes_on(client):
    messages = list(HI)
    for _ in range(2):
        answer = client.chat.completions.create(model=BASE, messages=messages, max_completion_tokens=3)
        messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_errors_are_the_packages_own(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="pirat", prompt="x")
    assert unknown.value.code == "model_not_found" and "'pirate'" in unknown.value.message
    with pytest.raises(openai.BadRequestError, match="tools") as refused:
        client.chat.completions.create(model=BASE, messages=HI, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_field")
    with pytest.raises(openai.BadRequestError, match="no tensors"):
        client.completions.create(model="broken", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-bob").models.list()
    with pytest.raises(openai.BadRequestError, match="names no pooling"):
        client.embeddings.create(model=BASE, input="x")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_an_error_in_the_middle_of_a_stream_is_raised(client, engine):
    engine.runner.delay = 0.01
    with pytest.raises(openai.APIError, match="out of order"):
        for _ in client.completions.create(model=BASE, prompt="y" * 50, max_tokens=200, stream=True):
            engine.runner.error = RuntimeError("out of order")


def test_a_stream_that_is_closed_ends_the_request(client, engine):
    engine.runner.delay = 0.01
    with client.completions.create(model=BASE, prompt="y" * 50, max_tokens=200, stream=True) as stream:
        next(iter(stream))
        steps = engine.runner.steps
    from tests.support.served_apps import until

    until(lambda: not engine.snapshot().running)
    assert engine.runner.steps - steps < 50
