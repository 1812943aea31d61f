"""pydantic-ai, whose agents call tools and return types by themselves."""

import asyncio

from plan import NEXT, QUESTION, TOKENS, Forecast, taken, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def _agent(url, model, tokens=TOKENS, tool_choice=None, **options):
    settings = {"temperature": 0, "max_tokens": tokens, "parallel_tool_calls": False}
    if tool_choice:
        settings["extra_body"] = {"tool_choice": tool_choice}
    chat_model = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="-"))
    return Agent(chat_model, model_settings=settings, **options)


def chat(url, model):
    """Returns the text of an answer."""
    return _agent(url, model).run_sync(QUESTION).output


def stream(url, model):
    """Returns the text of the same answer, streamed."""

    async def last():
        async with _agent(url, model).run_stream(QUESTION) as answer:
            return [text async for text in answer.stream_text()][-1]

    return asyncio.run(last())


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    typed_answer = _agent(url, model, 200, tools=[weather], output_type=ToolOutput(Forecast)).run_sync(QUESTION)
    calls = taken()
    agent = _agent(url, model, TOKENS, "none", tools=[weather])
    history, texts = typed_answer.all_messages(), []
    for question in (QUESTION, NEXT):
        answer = agent.run_sync(question, message_history=history)
        history = answer.all_messages()
        texts.append(answer.output)
    return {"calls": calls, "texts": texts, "typed": typed_answer.output.model_dump()}


def typed(url, model):
    """Returns an answer of a type, by a tool and by a schema, from agents that have tools too."""
    answers = [
        _agent(url, model, 200, tools=[weather], output_type=kind(Forecast)).run_sync(QUESTION).output.model_dump()
        for kind in (ToolOutput, NativeOutput)
    ]
    taken()
    return answers
