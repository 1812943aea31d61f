"""openai-agents, which asks /v1/responses unless it is told otherwise."""

import asyncio

from agents import Agent, AsyncOpenAI, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from plan import NEXT, QUESTION, TOKENS, Forecast, taken, weather

set_tracing_disabled(True)


def _agent(url, model, tokens=TOKENS, tool_choice=None, **options):
    client = AsyncOpenAI(base_url=url, api_key="-", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=tokens, tool_choice=tool_choice, parallel_tool_calls=False)
    return Agent(name="a", model=OpenAIResponsesModel(model, client), model_settings=settings, **options)


def chat(url, model):
    """Returns the text of an answer."""
    return Runner.run_sync(_agent(url, model), QUESTION).final_output


def stream(url, model):
    """Returns a typed answer that was streamed: it refuses one that was cut off."""

    async def text():
        parts = []
        run = Runner.run_streamed(_agent(url, model, 200, output_type=Forecast), QUESTION)
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                parts.append(event.data.delta)
        assert Forecast.model_validate_json("".join(parts)) == run.final_output
        return run.final_output.model_dump()

    return asyncio.run(text())


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    agent = _agent(url, model, 200, "required", tools=[function_tool(weather)])
    answer, texts = Runner.run_sync(agent, QUESTION, max_turns=4), []
    calls = taken()
    texts.append(answer.final_output)
    following = [*answer.to_input_list(), {"role": "user", "content": NEXT}]
    texts.append(Runner.run_sync(_agent(url, model), following).final_output)
    return {"calls": calls, "texts": texts}


def typed(url, model):
    """Returns an answer of a type, from an agent that has tools too."""
    agent = _agent(url, model, 200, "required", tools=[function_tool(weather)], output_type=Forecast)
    answer = Runner.run_sync(agent, QUESTION, max_turns=8).final_output.model_dump()
    taken()
    return answer
