"""instructor, whose answers are typed: by a tool, by a schema, and streamed."""

import instructor
import openai
from plan import QUESTION, TOKENS, Forecast


def _client(url, mode):
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="-", max_retries=0), mode=mode)


def _request(model):
    return {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_retries": 0}


def chat(url, model):
    """Returns the text of an answer."""
    request = {**_request(model), "max_tokens": TOKENS, "response_model": None}
    return _client(url, instructor.Mode.TOOLS).chat.completions.create(**request).choices[0].message.content


def stream(url, model):
    """Returns the last of the parts of a typed answer, as it was streamed."""
    parts = _client(url, instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Forecast, **_request(model)
    )
    return list(parts)[-1].model_dump()


def typed(url, model):
    """Returns an answer of a type, by a tool and by a schema."""
    return [
        _client(url, mode).chat.completions.create(response_model=Forecast, **_request(model)).model_dump()
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    ]
