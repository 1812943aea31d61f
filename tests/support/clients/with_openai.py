"""The openai package."""

import json

import openai
from plan import NEXT, QUESTION, TOKENS, TOOL, Forecast, taken, weather


def _client(url):
    return openai.OpenAI(base_url=url, api_key="-", max_retries=0)


def chat(url, model):
    """Returns the text of an answer."""
    messages = [{"role": "user", "content": QUESTION}]
    answer = _client(url).chat.completions.create(model=model, messages=messages, max_tokens=TOKENS, temperature=0)
    return answer.choices[0].message.content


def stream(url, model):
    """Returns the text of the same answer, streamed."""
    options = {"max_tokens": TOKENS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": QUESTION}]
    chunks = list(_client(url).chat.completions.create(model=model, messages=messages, **options))
    assert chunks[-1].usage.completion_tokens == TOKENS
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    client, messages, texts = _client(url), [{"role": "user", "content": QUESTION}], []
    options = {"model": model, "tools": [TOOL], "temperature": 0}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(messages=messages, **forced, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    messages.append(answer.message)
    for call in answer.message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    for _ in range(2):
        answer = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=TOKENS, **options)
        texts.append(answer.choices[0].message.content)
        messages += [answer.choices[0].message, {"role": "user", "content": NEXT}]
    return {"calls": taken(), "texts": texts}


def typed(url, model):
    """Returns an answer of a type, from a request that has tools too."""
    options = {"model": model, "tools": [TOOL], "tool_choice": "none", "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    answer = _client(url).chat.completions.parse(messages=messages, response_format=Forecast, **options)
    return answer.choices[0].message.parsed.model_dump()
