"""llama-index's OpenAILike."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from plan import NEXT, QUESTION, TOKENS, Forecast, taken, weather


def _model(url, model, tokens=TOKENS):
    kinds = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=model, api_base=url, api_key="-", temperature=0, max_tokens=tokens, max_retries=0, **kinds)


def chat(url, model):
    """Returns the text of an answer."""
    return _model(url, model).chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream(url, model):
    """Returns the text of the same answer, streamed."""
    chunks = _model(url, model).stream_chat([ChatMessage(role="user", content=QUESTION)])
    return "".join(chunk.delta or "" for chunk in chunks)


def tools(url, model):
    """Lets the model call a tool and read its answer; returns the calls and the texts of that turn and the next."""
    rain, messages, texts = FunctionTool.from_defaults(weather), [ChatMessage(role="user", content=QUESTION)], []
    caller = _model(url, model, 200)
    answer = caller.chat_with_tools([rain], chat_history=messages, tool_required=True)
    messages.append(answer.message)
    for call in caller.get_tool_calls_from_response(answer):
        result = str(rain(**call.tool_kwargs))
        messages.append(ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id}))
    for _ in range(2):
        answer = _model(url, model).chat(messages)
        texts.append(answer.message.content)
        messages += [answer.message, ChatMessage(role="user", content=NEXT)]
    return {"calls": taken(), "texts": texts}


def typed(url, model):
    """Returns an answer of a type."""
    model = _model(url, model, 200).as_structured_llm(Forecast)
    return model.chat([ChatMessage(role="user", content=QUESTION)]).raw.model_dump()
