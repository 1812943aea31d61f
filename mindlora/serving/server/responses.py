"""/v1/responses, OpenAI's Responses API, as another form of a chat completion: nothing is stored."""

import json
import uuid
from typing import Annotated, Any, ClassVar, Dict, List, Literal, Optional, Sequence, Union

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette import responses
from starlette.requests import Request

from mindlora.serving.server import schemas
from mindlora.serving.server.asked import Asked, Table, Text
from mindlora.serving.server.chat import ChatForm, answer_chat
from mindlora.serving.server.errors import ApiError

# An event's name for the text of each kind of item.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class InputPart(Asked):
    """A part of an item: text alone."""

    passes_unknown: ClassVar[bool] = True
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text


class InputItem(Asked):
    """A message, a call of a function, its output, or a thought, each as sent in an answer.

    Fields of other names pass: answers have some that only describe them.
    """

    unsupported: ClassVar[Table] = {"audio": ()}
    passes_unknown: ClassVar[bool] = True
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Optional[Literal["system", "developer", "user", "assistant"]] = Field(None, description="of a message")
    content: Union[Text, List[InputPart], None] = Field(None, description="of a message or a thought")
    call_id: Optional[Text] = Field(None, description="of a call and of its output")
    name: Optional[Text] = Field(None, description="of a call: the function's")
    arguments: Optional[Text] = Field(None, description="of a call: JSON in a string")
    output: Union[Text, List[InputPart], None] = Field(None, description="what a function returned")
    summary: Optional[List[InputPart]] = Field(None, description="of a thought")

    def text(self, field: str, where: str) -> str:
        """Returns the text in a field; raises ApiError, 400, if there is none."""
        value = getattr(self, field)
        if value is None:
            path = f"{where}.{field}"
            raise ApiError(
                f"{path} is missing: give it, as an item of the type {self.type} has it.",
                code="missing_field",
                param=path,
            )
        return value if isinstance(value, str) else "".join(part.text for part in value)


class FunctionTool(Asked):
    """A function that the assistant may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Optional[Text] = None
    parameters: Optional[Dict[str, Any]] = Field(None, description="a JSON schema, which the arguments keep")
    strict: Optional[bool] = None


class FunctionChoice(Asked):
    """A function that the answer must call."""

    type: Literal["function"]
    name: Text


class TextFormat(Asked):
    """The required form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Optional[Text] = None
    description: Optional[Text] = None
    schema_: Optional[Dict[str, Any]] = Field(None, alias="schema")
    strict: Optional[bool] = None


class TextOptions(Asked):
    """Options for the text of the answer."""

    unsupported: ClassVar[Table] = {"verbosity": ("low", "medium", "high")}
    format: Optional[TextFormat] = None


class ReasoningOptions(Asked):
    """Whether the model thinks first. A summary would be the thought itself, which is always sent."""

    unsupported: ClassVar[Table] = dict.fromkeys(("summary", "generate_summary"), ("auto", "concise", "detailed"))
    effort: Optional[Text] = Field(None, description="as reasoning_effort of a chat")


class ResponsesRequest(Asked):
    """Body of /v1/responses. Nothing is stored, whatever ``store`` says: the input is the whole conversation."""

    unsupported: ClassVar[Table] = {
        "background": (False,),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "service_tier": ("auto", "default", "flex", "priority"),
        "store": (True, False),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    model: Text = Field(max_length=1000, description="the base's name, or an adapter's")
    input: Union[Text, Annotated[List[InputItem], Field(min_length=1)]]
    instructions: Optional[Text] = Field(None, description="a system message before the input")
    tools: Optional[List[FunctionTool]] = Field(None, max_length=128)
    tool_choice: Union[Literal["none", "auto", "required"], FunctionChoice, None] = None
    parallel_tool_calls: Optional[bool] = None
    text: Optional[TextOptions] = None
    reasoning: Optional[ReasoningOptions] = None
    max_output_tokens: Optional[int] = Field(None, ge=1)
    temperature: Optional[float] = Field(None, ge=0, le=100)
    top_p: Optional[float] = Field(None, gt=0, le=1)
    stream: Optional[bool] = None

    def check_extra(self, where: str = "") -> None:
        """See Asked; previous_response_id has an error that says what to do."""
        if (self.model_extra or {}).get("previous_response_id") is not None:
            raise ApiError(
                "previous_response_id is not supported: this server stores no responses. Send the whole conversation "
                "as input.",
                code="unsupported_field",
                param="previous_response_id",
            )
        super().check_extra(where)

    def as_chat(self) -> schemas.ChatRequest:
        """Returns this request as a request for a chat completion.

        Raises ApiError, 400, if an item lacks what its type needs, or pydantic's ValidationError.
        """
        names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
        fields: Dict[str, Any] = {name: getattr(self, name) for name in names}
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}  # type: ignore[assignment]
        tools = [{"type": "function", "function": _function(tool)} for tool in self.tools or ()]
        form = self.text.format if self.text is not None else None
        return schemas.ChatRequest(
            **fields,
            messages=self._messages(),
            tools=tools or None,
            tool_choice=choice,
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=None if form is None else _response_format(form),
        )

    def _messages(self) -> List[Dict[str, Any]]:
        """Returns the instructions and the input as messages: all items of an assistant's turn are one message."""
        messages: List[Dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            where = f"input.{number}"
            if item.type == "function_call_output":
                call = item.text("call_id", where)
                messages.append({"role": "tool", "tool_call_id": call, "content": item.text("output", where)})
            elif item.type == "message" and item.role != "assistant":
                messages.append({"role": item.text("role", where), "content": item.text("content", where)})
            else:
                _add_to_turn(_turn_for(item, messages), item, where)
        return messages


def _function(tool: FunctionTool) -> Dict[str, Any]:
    return {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}


def _response_format(form: TextFormat) -> Dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        field = "text.format.schema"
        raise ApiError(f"{field} is missing: give the schema there.", code="missing_field", param=field)
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict}}


def _turn_for(item: InputItem, messages: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns the message to which an item of the assistant belongs: the last one, unless its contents come later."""
    last = messages[-1] if messages else {"role": None}
    complete = "tool_calls" in last or last.get("content") is not None
    if last["role"] != "assistant" or complete and item.type != "function_call":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_to_turn(turn: Dict[str, Any], item: InputItem, where: str) -> None:
    if item.type == "message":
        turn["content"] = item.text("content", where)
    elif item.type == "reasoning":
        turn["reasoning_content"] = item.text("content" if item.content is not None else "summary", where)
    else:
        function = {"name": item.text("name", where), "arguments": item.text("arguments", where)}
        call = {"id": item.text("call_id", where), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


class Response(BaseModel):
    """Answer of /v1/responses; when streamed, events hold its current state."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Optional[Dict[str, Any]]
    incomplete_details: Optional[Dict[str, Any]]
    instructions: Optional[str]
    max_output_tokens: Optional[int]
    metadata: Dict[str, Any]
    model: str
    output: List[Dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Dict[str, Any]
    store: bool
    temperature: float
    text: Dict[str, Any]
    tool_choice: Any
    tools: List[Dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: Optional[Dict[str, Any]]


def add_routes(router: APIRouter) -> None:
    """Adds /v1/responses."""

    @router.post("/v1/responses", response_model=Response)
    async def respond(body: ResponsesRequest, request: Request) -> responses.Response:
        body.check_extra()
        try:
            chat = body.as_chat()
        except ValidationError as error:
            # FastAPI's place for errors in a body.
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(errors) from error

        def make_form(*parts: Any) -> ResponsesForm:
            return ResponsesForm(body, *parts)

        return await answer_chat(request, chat, make_form)


class ResponsesForm(ChatForm):
    """The form of answers of /v1/responses: items, and in a stream an event for each change of an item."""

    def __init__(self, body: ResponsesRequest, *parts: Any):
        super().__init__(*parts)
        self.ending = b""
        self._body = body
        self._output = Output()
        self._sent = 0
        self._reason: Optional[str] = None

    def begin(self, identity: str, created: int) -> None:
        """See Form."""
        self.head.update(id=f"resp_{identity}", created_at=created)

    def events(self, choice: int, piece: Any) -> List[bytes]:
        """See Form."""
        events = [] if self._sent else [self._of_response(kind) for kind in ("created", "in_progress")]
        for part in self.chunks(choice, piece):
            events += map(self._event, self._output.add(part.delta))
            self._reason = part.finish_reason
        return events

    def last_events(self, usage: schemas.Usage) -> List[bytes]:
        """See Form."""
        events = [self._event(event) for event in self._output.finish(self._status)]
        return [*events, self._of_response(self._status, usage)]

    def failure(self, problem: ApiError) -> bytes:
        """See Form."""
        error = {"code": problem.code, "message": str(problem)}
        return self._of_response("failed", error=error)

    def whole(self, choices: Sequence[Sequence[schemas.ChatChoice]], usage: schemas.Usage) -> Response:
        """See Form."""
        (parts,) = choices
        for part in parts:
            self._output.add(part.delta)
            self._reason = part.finish_reason
        self._output.finish(self._status)
        return self._response(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _of_response(self, kind: str, usage: Optional[schemas.Usage] = None, error: Any = None) -> bytes:
        """Returns the event with the final state of the response, which it contains."""
        status = "in_progress" if kind == "created" else kind
        return self._event({"type": f"response.{kind}", "response": self._response(status, usage, error).model_dump()})

    def _event(self, event: Dict[str, Any]) -> bytes:
        data = json.dumps({**event, "sequence_number": self._sent}, ensure_ascii=False)
        self._sent += 1
        return f"event: {event['type']}\ndata: {data}\n\n".encode()

    def _response(self, status: str, usage: Optional[schemas.Usage], error: Any = None) -> Response:
        body = self._body
        effort = body.reasoning.effort if body.reasoning is not None else None
        form = body.text.format if body.text is not None else None
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        return Response(
            **self.head,
            object="response",
            status=status,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=(body.model_extra or {}).get("metadata") or {},
            output=self._output.items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": effort, "summary": None},
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text={"format": shown},
            tool_choice=body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if usage is None else self._usage(usage),
        )

    def _usage(self, usage: schemas.Usage) -> Dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "total_tokens": usage.total_tokens,
        }


class Output:
    """The items of an answer so far: a thought, a message, calls of functions. Events describe their changes."""

    def __init__(self) -> None:
        self.items: List[Dict[str, Any]] = []
        self._is_open = False

    def add(self, delta: schemas.Answer) -> List[Dict[str, Any]]:
        """Takes an answer's addition to a chat's message; returns its events."""
        events: List[Dict[str, Any]] = []
        for kind, text in (("reasoning", delta.reasoning_content), ("message", delta.content)):
            if text:
                events += self._add_text(kind, text)
        for call in delta.tool_calls or ():
            if call.id is not None:
                item = {"type": "function_call", "call_id": call.id, "name": call.function.name, "arguments": ""}
                events += self._open("fc", item)
            if call.function.arguments:
                self.items[-1]["arguments"] += call.function.arguments
                events.append(self._change("response.function_call_arguments.delta", delta=call.function.arguments))
        return events

    def finish(self, status: str = "completed") -> List[Dict[str, Any]]:
        """Ends the last item; returns its events."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = self._change("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            events = [done]
        else:
            part = item["content"][0]
            events = [
                self._change(f"response.{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part)),
                self._change("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("response.output_item.done")]

    def _add_text(self, kind: str, text: str) -> List[Dict[str, Any]]:
        events: List[Dict[str, Any]] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            part: Dict[str, Any] = {"type": _TEXTS[kind], "text": ""}
            if kind == "message":
                events += self._open("msg", {"type": kind, "role": "assistant", "content": []})
                part.update(annotations=[], logprobs=[])
            else:
                events += self._open("rs", {"type": kind, "summary": [], "content": []})
            events.append(self._change("response.content_part.added", content_index=0, part=dict(part)))
            self.items[-1]["content"].append(part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        events.append(self._change(f"response.{part['type']}.delta", content_index=0, delta=text, **_logprobs(part)))
        return events

    def _open(self, prefix: str, item: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Begins an item; returns the events of its beginning and of the previous item's end."""
        events = self.finish()
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        self._is_open = True
        return [*events, self._item_event("response.output_item.added")]

    def _item_event(self, kind: str) -> Dict[str, Any]:
        # A copy of its current state.
        return {"type": kind, "output_index": len(self.items) - 1, "item": json.loads(json.dumps(self.items[-1]))}

    def _change(self, kind: str, **fields: Any) -> Dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _logprobs(part: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the logprobs field, which only events of the answer's text have."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
