"""/v1/responses, OpenAI's Responses API, as another form of a chat completion: nothing is stored."""

import json
import uuid
from typing import Any, Dict, List, Optional, Sequence

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette import responses
from starlette.requests import Request

from mindlora.serving.server import schemas
from mindlora.serving.server.chat import ChatForm, answer_chat
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.response_schemas import Response, ResponsesRequest

# What an event calls the text of each kind of item.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


def add_routes(router: APIRouter) -> None:
    """Adds /v1/responses."""

    @router.post("/v1/responses", response_model=Response)
    async def respond(body: ResponsesRequest, request: Request) -> responses.Response:
        body.check_extra()
        try:
            chat = body.as_chat()
        except ValidationError as error:
            # As FastAPI has it of a body.
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(errors) from error

        def make_form(*parts: Any) -> ResponsesForm:
            return ResponsesForm(body, *parts)

        return await answer_chat(request, chat, make_form)


class ResponsesForm(ChatForm):
    """An answer as /v1/responses shows it: items, and in a stream one event for each thing that happens to one."""

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
        """Returns the event that says what became of the response, which it holds."""
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
    """The items of an answer so far: a thought, a message, calls of functions. Events say what changes them."""

    def __init__(self) -> None:
        self.items: List[Dict[str, Any]] = []
        self._is_open = False

    def add(self, delta: schemas.Answer) -> List[Dict[str, Any]]:
        """Takes what an answer adds to a chat's message; returns the events of it."""
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
        """Ends the last item; returns the events of it."""
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
        """Begins an item; returns the events of that, and of the end of the one before."""
        events = self.finish()
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        self._is_open = True
        return [*events, self._item_event("response.output_item.added")]

    def _item_event(self, kind: str) -> Dict[str, Any]:
        # As it is now.
        return {"type": kind, "output_index": len(self.items) - 1, "item": json.loads(json.dumps(self.items[-1]))}

    def _change(self, kind: str, **fields: Any) -> Dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _logprobs(part: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the field that only events of the answer's text have."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
