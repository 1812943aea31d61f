"""/v1/completions."""

import codecs
from typing import Any, Dict, List, Optional, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.detokenizer import TokenTexts
from mindlora.serving.server import schemas
from mindlora.serving.server.context import Context
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import Form, accept, answer, joined_logprobs

# OpenAI's default.
_MAX_TOKENS = 16


class CompletionForm(Form):
    """The form of answers of /v1/completions; ``echoes`` come before each answer, "" for none.

    If an echo has logprobs, they begin with those of the prompt's tokens; the first token has none.
    """

    prefix = "cmpl"

    def __init__(self, model: str, texts: TokenTexts):
        super().__init__(model, texts)
        self.head["object"] = "text_completion"
        self.echoes: Sequence[str] = ()
        self._offsets: Dict[int, _Offsets] = {}

    def chunks(self, choice: int, piece: Any) -> List[schemas.CompletionChoice]:
        """Returns the choice that shows a piece, if there is anything to show."""
        text = piece.text
        ids = self.ids(piece.tokens)
        if choice not in self._offsets:
            if self.prompt_ids is not None:
                ids["prompt_token_ids"] = self.prompt_ids[choice]
            echo = self.echoes[choice] if self.echoes else ""
            text = echo + piece.text
            self._offsets[choice] = _Offsets(text)
        sampled = [*(piece.prompt_logprobs or ()), *(piece.logprobs or ())]
        logprobs = self._logprobs(choice, sampled) if sampled else None
        reason = piece.finish_reason
        if not (text or logprobs or reason or ids):
            return []
        return [schemas.CompletionChoice(index=choice, text=text, logprobs=logprobs, finish_reason=reason, **ids)]

    def chunk(self, choices: Sequence[schemas.CompletionChoice], **usage: Any) -> schemas.Completion:
        """See Form."""
        return schemas.Completion(**self.head, choices=choices, **usage)

    def whole(self, choices: Sequence[Sequence[schemas.CompletionChoice]], usage: schemas.Usage) -> schemas.Completion:
        """See Form."""
        answers = []
        for index, parts in enumerate(choices):
            text = "".join(part.text for part in parts)
            reason = parts[-1].finish_reason
            logprobs = joined_logprobs(parts)
            ids = self.joined_ids(parts)
            if ids:
                ids["prompt_token_ids"] = parts[0].prompt_token_ids
            choice = schemas.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason, **ids)
            answers.append(choice)
        return schemas.Completion(**self.head, choices=answers, usage=usage)

    def _logprobs(self, choice: int, sampled: List[Any]) -> schemas.CompletionLogprobs:
        tokens = []
        offsets = []
        top = []
        for entry in sampled:
            tokens.append(self.texts.name(entry.token))
            offsets.append(self._offsets[choice].add(self.texts.data(entry.token)))
            top.append(self._likeliest(entry))
        values = [entry.logprob for entry in sampled]
        return schemas.CompletionLogprobs(tokens=tokens, token_logprobs=values, top_logprobs=top, text_offset=offsets)

    def _likeliest(self, entry: Any) -> Optional[Dict[str, float]]:
        if entry.logprob is None:
            return None
        # The chosen token is always among them, as in OpenAI's, under its name among the tokens.
        named = self.texts.named([(entry.token, entry.logprob), *entry.top])
        return dict(sorted(named.items(), key=lambda item: -item[1]))


class _Offsets:
    """The place in characters where each token begins in a text; a token inside a character begins with it.

    ``begin`` is the known text before its first token.
    """

    def __init__(self, begin: str):
        self._begin = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def add(self, data: bytes) -> int:
        """Returns the place where the next token, which adds ``data`` to the text, begins."""
        place = self._place
        # Decoders omit the space before the first word of a text.
        if not place and self._begin and not self._begin.startswith(" "):
            data = data.removeprefix(b" ")
        self._place += len(self._decoder.decode(data))
        return place


def add_routes(router: APIRouter) -> None:
    """Adds /v1/completions."""

    @router.post("/v1/completions", response_model=schemas.Completion)
    async def complete(body: schemas.CompletionRequest, request: Request) -> Response:
        prompts = body.prompts()
        context = accept(request, body, len(prompts), prompts)
        _check_scoring(body)
        form = CompletionForm(body.model, context.texts)

        def tokens(context: Context) -> List[List[int]]:
            if body.echo:
                form.echoes = [context.prompts.text(prompt) for prompt in prompts for _ in range(body.n or 1)]
            return [context.prompts.tokens(prompt, body.add_special_tokens is not False) for prompt in prompts]

        return await answer(request, body, form, tokens, body.constraint(), body.max_tokens, _MAX_TOKENS)


def _check_scoring(body: schemas.CompletionRequest) -> None:
    if body.max_tokens == 0 and not (body.echo and body.logprobs is not None):
        raise ApiError(
            "max_tokens is 0, which is for scoring a prompt: set echo and logprobs too, or ask for a token.",
            param="max_tokens",
        )
