"""LangChain's ChatOpenAI."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from plan import NEXT, QUESTION, TOKENS, City, Forecast, taken, weather

RAIN = StructuredTool.from_function(weather, args_schema=City)


def _model(url, model, tokens=TOKENS):
    return ChatOpenAI(base_url=url, api_key="-", model=model, temperature=0, max_tokens=tokens, max_retries=0)


def chat(url, model):
    """Returns the text of an answer."""
    return _model(url, model).invoke(QUESTION).content


def stream(url, model):
    """Returns the text of the same answer, streamed."""
    return "".join(chunk.content for chunk in _model(url, model).stream(QUESTION))


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    messages, texts = [HumanMessage(QUESTION)], []
    forced = _model(url, model, 200).bind_tools([RAIN], tool_choice="required", parallel_tool_calls=False, strict=True)
    messages.append(forced.invoke(messages))
    for call in messages[-1].tool_calls:
        messages.append(ToolMessage(RAIN.invoke(call["args"]), tool_call_id=call["id"]))
    free = _model(url, model).bind_tools([RAIN], tool_choice="none")
    for _ in range(2):
        answer = free.invoke(messages)
        texts.append(answer.content)
        messages += [answer, HumanMessage(NEXT)]
    return {"calls": taken(), "texts": texts}


def typed(url, model):
    """Returns answers of a type, from a request without tools and one that has them."""
    plain = _model(url, model, 200).with_structured_output(Forecast, strict=True).invoke(QUESTION)
    options = {"response_format": Forecast, "strict": True, "tool_choice": "none"}
    beside = _model(url, model, 200).bind_tools([RAIN], **options).invoke(QUESTION)
    return [plain.model_dump(), beside.additional_kwargs["parsed"].model_dump()]
