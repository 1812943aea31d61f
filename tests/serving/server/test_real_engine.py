"""`mindlora serve` on a Qwen3-MoE with adapters of attention and experts, asked by the openai package."""

import concurrent.futures
import re

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.served_apps import until
from tests.support.served_llama import serving, write_adapter, write_qwen3_moe
from tests.support.soak import Plan, soak

PROMPT = "There are cats and dogs"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
HI = [{"role": "user", "content": "How many cats are there?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, source = write_qwen3_moe(str(tmp_path_factory.mktemp("served")), 192), ("--model", "base")
    options = ("--adapters", "adapters", "--allow-runtime-loading", "--slots", "2", "--model-name", "qwen3-moe")
    with serving(folder, *options, source=source) as found:
        found.folder = folder
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def metric(client, name):
    text = client._client.get(f"{str(client.base_url).removesuffix('/v1/')}/metrics").text
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def test_the_base_and_each_adapter_answer_for_themselves(client):
    assert [model.id for model in client.models.list()] == ["qwen3-moe", "damaged", "first", "second"]
    answers = {name: client.completions.create(model=name, **GREEDY) for name in ("qwen3-moe", "first", "second")}
    texts = {name: answer.choices[0].text for name, answer in answers.items()}
    assert len(set(texts.values())) == 3
    for name, answer in answers.items():
        assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"
        streamed = client.completions.create(model=name, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in streamed) == texts[name]


def test_answers_together_are_those_of_each_alone(client):
    jobs = [(name, f"{PROMPT} {number}") for number in range(4) for name in ("qwen3-moe", "first", "second")]

    def text(job):
        return client.completions.create(model=job[0], **{**GREEDY, "prompt": job[1]}).choices[0].text

    alone = [text(job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        assert list(threads.map(text, jobs)) == alone


def test_each_token_of_a_prompt_is_scored_as_if_it_were_the_answer(client, server):
    """A bias of 100 has the engine choose a token, whose log-probability it reports without the bias."""
    tokens = client._client.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]

    def logprobs(name, prompt, **given):
        answer = client.completions.create(model=name, prompt=prompt, temperature=0, logprobs=0, **given)
        return answer.choices[0].logprobs.token_logprobs

    for name in ("qwen3-moe", "first"):
        scores = logprobs(name, tokens, max_tokens=0, echo=True)
        assert len(scores) == len(tokens) and scores[0] is None
        for place in range(1, len(tokens)):
            bias = {str(tokens[place]): 100}
            (expected,) = logprobs(name, tokens[:place], max_tokens=1, logit_bias=bias)
            assert scores[place] == pytest.approx(expected, abs=1e-4)


def test_chat(client):
    def ask(**given):
        return client.chat.completions.create(model="first", messages=HI, max_tokens=12, seed=3, **given)

    answer = ask(logprobs=True, top_logprobs=3, n=2)
    choices = answer.choices
    assert all(1 <= len(choice.logprobs.content) <= 12 for choice in choices)
    entry = choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob >= entry.logprob
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = ask(n=1)
    assert again.choices[0].message.content == choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    said = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
    assert said == choices[0].message.content


def test_constrained_answers_come_beside_free_ones(client):
    pytest.importorskip("llguidance")
    regex = "[0-9]{3}-(cat|dog)s?"
    free = client.completions.create(model="first", **GREEDY).choices[0].text

    def text(job):
        model, constraint = job
        extra = {"extra_body": {"guided_regex": regex}} if constraint else {"extra_body": {"ignore_eos": True}}
        return client.completions.create(model=model, **{**GREEDY, **extra}).choices[0].text

    jobs = [(model, constraint) for model in ("qwen3-moe", "first", "second") for constraint in (True, False)]
    alone = [text(job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(text, jobs)) == alone
    assert all(re.fullmatch(regex, answer) for answer in alone[::2]) and alone[3] == free


def test_a_damaged_adapter_is_refused_with_the_readers_own_words_and_no_path(client, server):
    with pytest.raises(openai.BadRequestError, match="damaged/adapter_model.safetensors") as refused:
        client.completions.create(model="damaged", prompt="x")
    assert refused.value.code == "adapter_refused" and server.folder not in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="'second'"):
        client.completions.create(model="secnd", prompt="x")


def test_more_adapters_than_slots_take_turns_and_one_can_be_replaced(client, server):
    body = {"lora_name": "third", "lora_path": "second"}
    assert client._client.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 200
    first, second, third = (
        client.completions.create(model=name, **GREEDY).choices[0].text for name in ("first", "second", "third")
    )
    assert second == third != first and metric(client, "mindlora_adapter_slots") == 2
    write_adapter(server.folder, "first", 77)
    assert client.completions.create(model="first", **GREEDY).choices[0].text != first
    write_adapter(server.folder, "first", 1)
    assert client.completions.create(model="first", **GREEDY).choices[0].text == first


def test_everything_is_given_back_and_logged(client, server):
    with client.completions.create(model="second", stream=True, **{**GREEDY, "max_tokens": 60}) as stream:
        next(iter(stream))
    last = until(lambda: next((line for line in server.log() if line.get("reason") == "disconnected"), None))
    assert last["model"] == "second" and 0 < last["generated_tokens"] < 60
    until(lambda: metric(client, "mindlora_requests_running") == 0)
    assert metric(client, "mindlora_cache_blocks_free") == metric(client, "mindlora_cache_blocks")
    assert {"length", "adapter_refused", "model_not_found"} <= {line.get("reason") for line in server.log()}


def test_clients_that_vanish_and_adapters_that_change_leave_every_answer_right(server):
    found = soak(server, server.folder, "qwen3-moe", Plan(clients=6, seconds=3.0, adapters=3, questions=1))
    assert found["defects"] == []
    assert found["tokens in whole answers"] > 0 and found["adapters changed"] > 0 and found["sent again"] == 0
    came = {words.split(": ")[1] for words in found["outcomes"]}
    assert {"answered", "cut by its client", "client killed"} <= came
    assert found["server"]["evictions from slots"] and found["server"]["cancelled"]
