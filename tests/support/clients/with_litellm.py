"""LiteLLM, with the prefix of any OpenAI-compatible server and with vLLM's."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from plan import NEXT, QUESTION, TOKENS, TOOL, Forecast, taken, weather

PREFIX = "openai"


def _ask(url, model, messages, **options):
    options = {"temperature": 0, "num_retries": 0, "api_key": "-", **options}
    return litellm.completion(model=f"{PREFIX}/{model}", api_base=url, messages=messages, **options)


def chat(url, model):
    """Returns the text of an answer."""
    return _ask(url, model, [{"role": "user", "content": QUESTION}], max_tokens=TOKENS).choices[0].message.content


def stream(url, model):
    """Returns the text of the same answer, streamed."""
    chunks = _ask(url, model, [{"role": "user", "content": QUESTION}], max_tokens=TOKENS, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    messages, texts = [{"role": "user", "content": QUESTION}], []
    message = _ask(url, model, messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = message.choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        # For vLLM, LiteLLM drops additionalProperties from the schema, so the call may have other arguments too.
        result = weather(json.loads(call.function.arguments)["city"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    for _ in range(2):
        answer = _ask(url, model, messages, tools=[TOOL], tool_choice="none", max_tokens=TOKENS).choices[0]
        texts.append(answer.message.content)
        messages += [answer.message.model_dump(), {"role": "user", "content": NEXT}]
    return {"calls": taken(), "texts": texts}


def typed(url, model):
    """Returns an answer of a type, from a request that has tools too."""
    options = {"response_format": Forecast, "tools": [TOOL], "tool_choice": "none"}
    answer = _ask(url, model, [{"role": "user", "content": QUESTION}], **options)
    return Forecast.model_validate_json(answer.choices[0].message.content).model_dump()
