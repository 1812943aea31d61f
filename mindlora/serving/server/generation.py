"""What completions and chat completions have in common: from a request that was read to its answer."""

import asyncio
import dataclasses
import time
from typing import Any, Callable, List, Optional, Protocol, Sequence, Union

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.server import fields, schemas
from mindlora.serving.server.calls import Asked, Call
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.streaming import stream_answer

Body = Union[schemas.CompletionRequest, schemas.ChatRequest]
# Makes the tokens of a request's prompts.
Prepare = Callable[[Context], List[List[int]]]


class Form(Protocol):
    """How one of the APIs shows an answer."""

    def begin(self, identity: str, created: int) -> None:
        """Takes what the whole answer and every chunk of it begin with."""

    def chunks(self, choice: int, piece: Any) -> List[Any]:
        """Returns the choices that show a piece of an answer: none, one or two."""

    def chunk(self, choices: Sequence[Any], **usage: Any) -> BaseModel:
        """Returns a chunk of a streamed answer."""

    def whole(self, choices: Sequence[Sequence[Any]], usage: schemas.Usage) -> BaseModel:
        """Returns the answer; ``choices`` has what ``chunks`` returned for each."""


def check(body: Body, table: Any, context: Context, prompts: int) -> None:
    """Checks what the schemas do not say.

    Raises:
        ApiError: 400, a field asks for what this server lacks, or two fields contradict each other.
    """
    fields.check(body.model_extra, table)
    if body.stream_options is not None:
        fields.check(body.stream_options.model_extra, fields.STREAM_OPTIONS, "stream_options.")
        if not body.stream:
            raise ApiError("stream_options is only for stream: true.", param="stream_options")
    choices = prompts * (body.n or 1)
    if choices > context.settings.max_choices:
        raise ApiError(
            f"{choices} answers are asked for (prompts times n), and this server gives "
            f"{context.settings.max_choices} at most.",
            param="n",
        )


async def answer(
    request: Request, body: Body, form: Form, prepare: Prepare, max_tokens: Optional[int], default: Optional[int]
) -> Response:
    """Answers a request.

    Args:
        request (Request): The HTTP request.
        body (CompletionRequest or ChatRequest): What it holds, checked.
        form (Form): How to show the answer.
        prepare (callable): Makes the tokens of the prompts; called in a thread.
        max_tokens (int or None): What the request asks for.
        default (int or None): What it gets where it asks for nothing; None for all that there is room for.
    """
    context = context_of(request)

    def asked():
        context.models.check(body.model)
        prompts, sampling = prepare(context), body.sampling(context.prompts.ends)
        rooms = [context.prompts.room(tokens, max_tokens, default) for tokens in prompts]
        samplings = [dataclasses.replace(sampling, max_tokens=room) for room in rooms]
        return Asked(body.model, prompts, samplings, body.n or 1)

    call = Call(request, await asyncio.to_thread(asked))
    form.begin(request.scope["state"]["record"].id, int(time.time()))
    await call.begin()
    if body.stream:
        return await stream_answer(call, form, body.include_usage)
    try:
        parts: List[List[Any]] = [[] for _ in range(call.count)]
        async for choice, piece in call.pieces():
            parts[choice] += form.chunks(choice, piece)
        content = form.whole(parts, call.usage()).model_dump_json(exclude_unset=True)
        return Response(content, media_type="application/json")
    finally:
        call.close()


def note(request: Request, body: Body, choices: int, prompt: List[Any]) -> None:
    """Notes for the log what a request asks for."""
    record = request.scope["state"]["record"]
    record.model, record.stream, record.choices = body.model, bool(body.stream), choices
    if context_of(request).settings.log_prompts:
        record.prompt = prompt
