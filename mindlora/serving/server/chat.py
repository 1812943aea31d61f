"""/v1/chat/completions."""

from typing import Any, Dict, List, Sequence, Set

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.detokenizer import REPLACEMENT
from mindlora.serving.server import schemas
from mindlora.serving.server.context import Context
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import Form, accept, answer, joined_logprobs
from mindlora.serving.server.prompts import TokenTexts


class ChatForm(Form):
    """An answer as /v1/chat/completions shows it."""

    prefix = "chatcmpl"

    def __init__(self, model: str, texts: TokenTexts):
        super().__init__(model, texts)
        self._begun: Set[int] = set()

    def chunks(self, choice: int, piece: Any) -> List[schemas.ChatChoice]:
        """Returns what shows a piece: first the role, then each time what there is to add."""
        choices = []
        if choice not in self._begun:
            self._begun.add(choice)
            role = schemas.Answer(role="assistant", content="")
            choices.append(schemas.ChatChoice(index=choice, delta=role, logprobs=None, finish_reason=None))
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if piece.text or logprobs or piece.finish_reason:
            delta = schemas.Answer(content=piece.text) if piece.text else schemas.Answer()
            reason = piece.finish_reason
            choices.append(schemas.ChatChoice(index=choice, delta=delta, logprobs=logprobs, finish_reason=reason))
        return choices

    def chunk(self, choices: Sequence[schemas.ChatChoice], **usage: Any) -> schemas.ChatCompletion:
        """See Form."""
        return schemas.ChatCompletion(object="chat.completion.chunk", **self.head, choices=choices, **usage)

    def whole(self, choices: Sequence[Sequence[schemas.ChatChoice]], usage: schemas.Usage) -> schemas.ChatCompletion:
        """See Form."""
        answers = []
        for index, parts in enumerate(choices):
            text = "".join(part.delta.content or "" for part in parts)
            message = schemas.Answer(role="assistant", content=text)
            reason = parts[-1].finish_reason
            logprobs = joined_logprobs(parts)
            answers.append(schemas.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason))
        return schemas.ChatCompletion(object="chat.completion", **self.head, choices=answers, usage=usage)

    def _logprobs(self, sampled: List[Any]) -> schemas.ChatLogprobs:
        tokens = []
        for entry in sampled:
            top = [schemas.TopLogprob(**self._token(token, value)) for token, value in entry.top]
            tokens.append(schemas.TokenLogprobs(**self._token(entry.token, entry.logprob), top_logprobs=top))
        return schemas.ChatLogprobs(content=tokens)

    def _token(self, token: int, logprob: float) -> Dict[str, Any]:
        text = self.texts.text(token)
        # The bytes of a part of a character are not known.
        data = None if REPLACEMENT in text else list(text.encode("utf-8"))
        return {"token": text, "logprob": logprob, "bytes": data}


def add_routes(router: APIRouter) -> None:
    """Adds /v1/chat/completions."""

    @router.post("/v1/chat/completions", response_model=schemas.ChatCompletion)
    async def complete_chat(body: schemas.ChatRequest, request: Request) -> Response:
        context = accept(request, body, 1, [message.for_template() for message in body.messages])
        _check_messages(body)
        form = ChatForm(body.model, context.texts)

        def tokens(context: Context) -> List[List[int]]:
            return [context.prompts.chat(body.messages)]

        return await answer(request, body, form, tokens, body.max_completion_tokens or body.max_tokens, None)


def _check_messages(body: schemas.ChatRequest) -> None:
    for number, message in enumerate(body.messages):
        message.check_extra(f"messages.{number}.")
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            part.check_extra(f"messages.{number}.content.{place}.")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs is only for logprobs: true. Set it too.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of them.", param="max_tokens")
