"""Requests and answers of /v1/responses, as pydantic models, and a request as one of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Dict, List, Literal, Optional, Union

from pydantic import BaseModel, Field

from mindlora.serving.server import schemas
from mindlora.serving.server.asked import Asked, Table, Text
from mindlora.serving.server.errors import ApiError


class InputPart(Asked):
    """A part of an item: text alone."""

    passes_unknown: ClassVar[bool] = True
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text


class InputItem(Asked):
    """A message, a call of a function, its output, or a thought, each as it came in an answer.

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
    """What the text of the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Optional[Text] = None
    description: Optional[Text] = None
    schema_: Optional[Dict[str, Any]] = Field(None, alias="schema")
    strict: Optional[bool] = None


class TextOptions(Asked):
    """How the text of the answer is to be."""

    unsupported: ClassVar[Table] = {"verbosity": ("low", "medium", "high")}
    format: Optional[TextFormat] = None


class ReasoningOptions(Asked):
    """Whether the model thinks first. A summary would be the thought itself, which comes in any case."""

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
        """The same as a request for a chat completion.

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
        """Returns the instructions and the input as messages: all items of a turn of the assistant are one."""
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
    """Returns the message that an item of the assistant belongs to: the last one, unless what it has comes later."""
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
    """Answer of /v1/responses; streamed, the events have it as it is at their time."""

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
