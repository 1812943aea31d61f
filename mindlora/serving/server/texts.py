"""/v1/embeddings as OpenAI has it; /v1/score and /v1/classify as vLLM has them: what the model makes of given texts."""

import asyncio
import base64
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request

from mindlora.core.errors import ConfigError
from mindlora.serving.pooling import Pooling, read_pooling
from mindlora.serving.request import Reading, Sampling
from mindlora.serving.score_head import ScoreHead, misuse
from mindlora.serving.server import schemas, text_schemas
from mindlora.serving.server.context import Context
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import Asked, Call, note_asked


class _Texts(NamedTuple):
    """Texts as the model gets them, what is read of them, and what is made of that."""

    tokens: List[List[int]]
    reading: Reading
    finish: Callable[[List[np.ndarray]], Any]


def add_routes(router: APIRouter) -> None:
    """Adds all three; score and classify also where vLLM has them."""

    @router.post("/v1/embeddings", response_model=text_schemas.Embeddings)
    async def embed(body: text_schemas.EmbeddingRequest, request: Request) -> text_schemas.Embeddings:
        vectors, usage = await _read(request, body, body.texts(), lambda context: _embeddings(context, body))
        data = [
            text_schemas.Embedding(object="embedding", index=index, embedding=_encoded(vector, body.encoding_format))
            for index, vector in enumerate(vectors)
        ]
        return text_schemas.Embeddings(object="list", data=data, model=body.model, usage=usage)

    @router.post("/score", response_model=text_schemas.Scores)
    @router.post("/v1/score", response_model=text_schemas.Scores)
    async def score(body: text_schemas.ScoreRequest, request: Request) -> text_schemas.Scores:
        texts = [list(pair) for pair in body.pairs()]
        scores, usage = await _read(request, body, texts, lambda context: _scores(context, body))
        data = [text_schemas.Score(index=index, object="score", score=value) for index, value in enumerate(scores)]
        return text_schemas.Scores(**_head(request, body, "score"), data=data, usage=usage)

    @router.post("/classify", response_model=text_schemas.Classes)
    @router.post("/v1/classify", response_model=text_schemas.Classes)
    async def classify(body: text_schemas.ClassifyRequest, request: Request) -> text_schemas.Classes:
        classes, usage = await _read(request, body, body.texts(), lambda context: _classes(context, body))
        data = [
            text_schemas.Class(index=index, label=label, probs=numbers, num_classes=len(numbers))
            for index, (label, numbers) in enumerate(classes)
        ]
        return text_schemas.Classes(**_head(request, body, "classify"), data=data, usage=usage)


def _head(request: Request, body: schemas.TextsRequest, prefix: str) -> dict:
    identity = f"{prefix}-{request.scope['state']['record'].id}"
    return {"id": identity, "object": "list", "created": int(time.time()), "model": body.model}


async def _read(
    request: Request, body: schemas.TextsRequest, texts: List[Any], prepare: Callable[[Context], _Texts]
) -> Tuple[Any, text_schemas.TextUsage]:
    """Returns what is made of the texts of a request, which ``prepare`` takes apart in a thread."""
    context = note_asked(request, body.model, len(texts), texts)
    body.check_extra()
    if len(texts) > context.settings.max_choices:
        raise ApiError(
            f"{len(texts)} texts are given, and this server takes {context.settings.max_choices} at most. Send fewer.",
            param=body.text_field,
        )

    def prepared() -> _Texts:
        context.models.check(body.model)
        made = prepare(context)
        for tokens in made.tokens:
            context.prompts.check_text(tokens, body.text_field)
        return made

    made = await asyncio.to_thread(prepared)
    sampling = Sampling(max_tokens=0, temperature=0.0, reading=made.reading)
    call = Call(request, Asked(body.model, made.tokens, [sampling] * len(made.tokens), 1))
    await call.begin()
    try:
        vectors: List[Any] = [None] * call.count
        async for choice, piece in call.pieces():
            vectors[choice] = piece.vectors
        tokens = call.usage().prompt_tokens
        return made.finish(vectors), text_schemas.TextUsage(prompt_tokens=tokens, total_tokens=tokens)
    finally:
        call.close()


def _embeddings(context: Context, body: text_schemas.EmbeddingRequest) -> _Texts:
    _refuse_misuse(context, body.model, wants_scores=False)
    pooling = _pooling(context, body.model)
    pooling.check_dimensions(body.dimensions, context.engine.runner.hidden_size)
    tokens = [_tokens(context, text, body, pooling) for text in body.texts()]

    def finish(vectors: Sequence[np.ndarray]) -> List[np.ndarray]:
        return [pooling.embed(hidden, body.dimensions) for hidden in vectors]

    return _Texts(tokens, Reading(scores=False, every=pooling.mode != "last"), finish)


def _scores(context: Context, body: text_schemas.ScoreRequest) -> _Texts:
    """A reward model reads both texts as one; of any other model, the score is the cosine of two embeddings."""
    head = _head_of(context, body.model)
    special = body.add_special_tokens is not False
    if head is not None:
        if not head.is_reward or head.of_tokens:
            raise ApiError(
                f"{body.model} is a classifier with {len(head.weight)} labels, and /v1/score needs a model with one "
                "score: ask /v1/classify.",
                param="model",
            )
        tokens = [context.prompts.tokens(first, special, second) for first, second in body.pairs()]
        return _Texts(tokens, Reading(scores=True, every=False), lambda found: _rewards(found, body.is_activated))
    pooling = _pooling(context, body.model)
    texts = [text for pair in body.pairs() for text in pair]
    tokens = [_tokens(context, text, body, pooling) for text in texts]

    def cosines(vectors: Sequence[np.ndarray]) -> List[float]:
        rows = [pooling._replace(normalizes=True).embed(hidden).astype(np.float64) for hidden in vectors]
        return [float(first @ second) for first, second in zip(rows[::2], rows[1::2])]

    return _Texts(tokens, Reading(scores=False, every=pooling.mode != "last"), cosines)


def _rewards(vectors: Sequence[np.ndarray], is_activated: bool) -> List[float]:
    return [_activated(scores[0], is_activated)[0] for scores in vectors]


def _classes(context: Context, body: text_schemas.ClassifyRequest) -> _Texts:
    head = _refuse_misuse(context, body.model, wants_scores=True)
    if head.of_tokens:
        raise ApiError(
            f"{body.model} labels words, and /v1/classify whole texts: use mindlora classify.", param="model"
        )
    special = body.add_special_tokens is not False
    tokens = [context.prompts.tokens(text, special) for text in body.texts()]

    def finish(vectors: Sequence[np.ndarray]) -> List[Tuple[str, List[float]]]:
        return [(head.names[int(scores[0].argmax())], _activated(scores[0], body.is_activated)) for scores in vectors]

    return _Texts(tokens, Reading(scores=True, every=False), finish)


def _activated(scores: np.ndarray, is_activated: bool) -> List[float]:
    """Returns probabilities of scores [labels], as vLLM: softmax of several, the sigmoid of one; or the scores."""
    scores = scores.astype(np.float64)
    if not is_activated:
        return scores.tolist()
    # The sigmoid is the softmax of the score and 0.
    logits = scores if len(scores) > 1 else np.append(scores, 0.0)
    shifted = np.exp(logits - logits.max())
    return (shifted / shifted.sum())[: len(scores)].tolist()


def _tokens(context: Context, text: Union[str, List[int]], body: schemas.TextsRequest, pooling: Pooling) -> List[int]:
    tokens = context.prompts.tokens(text, body.add_special_tokens is not False)
    if pooling.max_tokens is not None:
        context.prompts.check_text(tokens, body.text_field, pooling.max_tokens)
    return tokens


def _head_of(context: Context, model: str) -> Optional[ScoreHead]:
    return context.engine.score_head(context.models.adapter(model))


def _refuse_misuse(context: Context, model: str, wants_scores: bool) -> Any:
    """Returns the head of a model, after raising the reason why it cannot do what is asked, if there is one."""
    head = _head_of(context, model)
    problem = misuse(context.models.adapter(model), head, wants_scores)
    if problem is not None:
        raise ApiError(str(problem), param="model")
    return head


def _pooling(context: Context, model: str) -> Pooling:
    """Returns the pooling that the folder of an adapter names, or else that of the base.

    Raises ApiError, 400, if neither names one that can be used.
    """
    adapter = context.models.adapter(model)
    engine = context.engine
    folders = [engine.adapters.registry.path(adapter)] if adapter is not None else []
    folders += [engine.base_folder] if engine.base_folder is not None else []
    try:
        poolings = [read_pooling(folder) for folder in folders]
    except ConfigError as error:
        message = str(error)
        for folder in folders:
            message = message.replace(f"{folder}/", "")
        raise ApiError(message, code="no_pooling", param="model") from error
    pooling = next((found for found in poolings if found is not None), None)
    if pooling is None:
        raise ApiError(
            f"{model} names no pooling: there is no modules.json in the folder of its model, which would say how the "
            "hidden states of a text become its embedding. Serve a model of sentence-transformers.",
            code="no_pooling",
            param="model",
        )
    return pooling


def _encoded(vector: np.ndarray, form: Optional[str]) -> Union[str, List[float]]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
