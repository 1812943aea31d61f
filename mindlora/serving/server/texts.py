"""/v1/embeddings as in OpenAI's API; /v1/score and /v1/classify as in vLLM: the model's readings of given texts."""

import asyncio
import base64
import json
import os
import time
from typing import Annotated, Any, Callable, ClassVar, List, Literal, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from mindlora.core.errors import ConfigError, RequestError
from mindlora.core.json_files import parse_object
from mindlora.core.text import first_ten
from mindlora.serving.request import Reading, Sampling
from mindlora.serving.score_head import ScoreHead, misuse, probabilities_of
from mindlora.serving.server import schemas
from mindlora.serving.server.context import Context
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import Asked, Call, note_asked
from mindlora.serving.server.schemas import Text, TextsRequest, TokenId

# Requests and answers of /v1/embeddings, /v1/score and /v1/classify, as pydantic models.

Texts = Union[Text, Annotated[List[Text], Field(min_length=1)]]


class EmbeddingRequest(TextsRequest):
    """Body of /v1/embeddings."""

    input: Union[
        Texts,
        Annotated[List[TokenId], Field(min_length=1)],
        Annotated[List[Annotated[List[TokenId], Field(min_length=1)]], Field(min_length=1)],
    ] = Field(description="a text, token ids, or a list of either")
    encoding_format: Optional[Literal["float", "base64"]] = None
    dimensions: Optional[int] = Field(None, ge=1, description="numbers of an embedding, where the model allows it")

    def texts(self) -> List[Union[str, List[int]]]:
        """The texts, each as a string or token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]
        return self.input  # type: ignore[return-value]


class _Activated(TextsRequest):
    """A request for scores."""

    use_activation: Optional[bool] = Field(None, description="as in vLLM: false for scores in place of probabilities")

    @property
    def is_activated(self) -> bool:
        """Whether scores become probabilities."""
        return self.use_activation is not False


class ClassifyRequest(_Activated):
    """Body of /v1/classify, as in vLLM."""

    input: Texts

    def texts(self) -> List[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class ScoreRequest(_Activated):
    """Body of /v1/score, as in vLLM: one text and others, or pairs of texts."""

    text_field: ClassVar[str] = "text_2"
    text_1: Texts
    text_2: Texts

    def pairs(self) -> List[Tuple[str, str]]:
        """The pairs to score; raises ApiError, 400, if the lists differ in length."""
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise ApiError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1, or one for each text_2.",
                param="text_1",
            )
        return list(zip(first * (len(second) if len(first) == 1 else 1), second))


class TextUsage(BaseModel):
    """Tokens of the texts of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The embedding of a text: numbers, or float32, little-endian, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: Union[List[float], str]


class Embeddings(BaseModel):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: List[Embedding]
    model: str
    usage: TextUsage


class Score(BaseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(BaseModel):
    """Answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: List[Score]
    usage: TextUsage


class Class(BaseModel):
    """The likeliest label of a text, and the probabilities of all."""

    index: int
    label: str
    probs: List[float]
    num_classes: int


class Classes(BaseModel):
    """Answer of /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: List[Class]
    usage: TextUsage


# Pooling: from the hidden states of a text's tokens to its embedding, as the files of a model define it.
#
# The files are sentence-transformers': modules.json, the config.json of its Pooling, and sentence_bert_config.json.

# sentence-transformers' names of modes -> ours.
_MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
_FLAG = "pooling_mode_"


class Pooling(NamedTuple):
    """A model's way of embedding a text.

    Attributes:
        mode (str): "last" or "first", the hidden state of that token; "mean", the mean over all tokens.
        normalizes (bool): Whether an embedding has norm 1.
        dimensions (tuple of int): The sizes to which an embedding may be cut (Kusupati et al., Matryoshka
            Representation Learning, 2022); () for none.
        any_dimension (bool): Whether it may be cut to any size.
        max_tokens (int or None): Maximum number of tokens of a text.
    """

    mode: str
    normalizes: bool = False
    dimensions: Tuple[int, ...] = ()
    any_dimension: bool = False
    max_tokens: Optional[int] = None

    def check_dimensions(self, asked: Optional[int], width: int) -> None:
        """Raises RequestError if embeddings cannot be cut to ``asked``; None leaves them whole."""
        if asked is None or (self.any_dimension and asked <= width) or asked in self.dimensions:
            return
        if self.any_dimension or self.dimensions:
            accepted = first_ten([str(number) for number in self.dimensions]) if self.dimensions else f"1 to {width}"
            raise RequestError(f"dimensions is {asked}, but this model gives {accepted}: ask for one of these.")
        raise RequestError(
            f"dimensions is {asked}, and the model's config.json does not say that its embeddings can be cut "
            "(is_matryoshka, matryoshka_dimensions): leave it out."
        )

    def embed(self, hidden: np.ndarray, dimensions: Optional[int] = None) -> np.ndarray:
        """Returns the embedding, float32 [width] or [dimensions], of the hidden states of a text.

        Args:
            hidden (np.ndarray): float32 [tokens, width]; for "last", the last token's suffices.
            dimensions (int, optional): How many numbers are kept before the norm is set to 1. Default: None, all.
        """
        row = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0, dtype=np.float64)}[self.mode]
        row = row[:dimensions].astype(np.float64)
        if self.normalizes:
            row = row / max(float(np.linalg.norm(row)), 1e-12)
        return row.astype(np.float32)


def read_pooling(folder: str) -> Optional[Pooling]:
    """Returns the pooling that the modules.json of a model's folder names, or None without that file.

    Raises ConfigError if it cannot be used here.
    """
    path = os.path.join(folder, "modules.json")
    if not os.path.isfile(path):
        return None
    modules = _read_modules(path)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"{path} names the modules {first_ten(kinds)}; here they can be Transformer, Pooling and Normalize: use "
            "sentence-transformers itself."
        )
    mode = _read_mode(os.path.join(folder, modules[1][1], "config.json"))
    model = _read_object(os.path.join(folder, "config.json"))
    dimensions = tuple(model.get("matryoshka_dimensions") or ())
    any_dimension = bool(model.get("is_matryoshka")) and not dimensions
    return Pooling(mode, "Normalize" in kinds, dimensions, any_dimension, _read_max_tokens(folder))


def _read_modules(path: str) -> List[Tuple[str, str]]:
    """Returns the kind and the subfolder of each module, in order."""
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        return [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is not a list of modules with type and path: copy it again.") from error


def _read_mode(path: str) -> str:
    config = _read_object(path)
    named = config.get("pooling_mode")
    if named is None:
        modes = [key[len(_FLAG) :] for key, value in config.items() if key.startswith(_FLAG) and value]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"{path} asks for the pooling {first_ten(modes)}; here it can be one of lasttoken, mean_tokens and "
            "cls_token: use sentence-transformers itself."
        )
    return _MODES[modes[0]]


def _read_max_tokens(folder: str) -> Optional[int]:
    path = os.path.join(folder, "sentence_bert_config.json")
    config = _read_object(path)
    if config.get("do_lower_case"):
        raise ConfigError(f"{path} has do_lower_case, which is not done here: use sentence-transformers itself.")
    return config.get("max_seq_length")


def _read_object(path: str) -> Any:
    """Returns the content of a JSON file, or an empty object if the file does not exist."""
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return parse_object(file.read(), path, ConfigError)


class _Texts(NamedTuple):
    """Texts for the model, their readings, and the results."""

    tokens: List[List[int]]
    reading: Reading
    finish: Callable[[List[np.ndarray]], Any]


def add_routes(router: APIRouter) -> None:
    """Adds all three routes; score and classify also under vLLM's paths."""

    @router.post("/v1/embeddings", response_model=Embeddings)
    async def embed(body: EmbeddingRequest, request: Request) -> Embeddings:
        vectors, usage = await _read(request, body, body.texts(), lambda context: _embeddings(context, body))
        data = [
            Embedding(object="embedding", index=index, embedding=_encoded(vector, body.encoding_format))
            for index, vector in enumerate(vectors)
        ]
        return Embeddings(object="list", data=data, model=body.model, usage=usage)

    @router.post("/score", response_model=Scores)
    @router.post("/v1/score", response_model=Scores)
    async def score(body: ScoreRequest, request: Request) -> Scores:
        texts = [list(pair) for pair in body.pairs()]
        scores, usage = await _read(request, body, texts, lambda context: _scores(context, body))
        data = [Score(index=index, object="score", score=value) for index, value in enumerate(scores)]
        return Scores(**_head(request, body, "score"), data=data, usage=usage)

    @router.post("/classify", response_model=Classes)
    @router.post("/v1/classify", response_model=Classes)
    async def classify(body: ClassifyRequest, request: Request) -> Classes:
        classes, usage = await _read(request, body, body.texts(), lambda context: _classes(context, body))
        data = [
            Class(index=index, label=label, probs=numbers, num_classes=len(numbers))
            for index, (label, numbers) in enumerate(classes)
        ]
        return Classes(**_head(request, body, "classify"), data=data, usage=usage)


def _head(request: Request, body: schemas.TextsRequest, prefix: str) -> dict:
    identity = f"{prefix}-{request.scope['state']['record'].id}"
    return {"id": identity, "object": "list", "created": int(time.time()), "model": body.model}


async def _read(
    request: Request, body: schemas.TextsRequest, texts: List[Any], prepare: Callable[[Context], _Texts]
) -> Tuple[Any, TextUsage]:
    """Returns the results for the texts of a request, which ``prepare`` splits in a thread."""
    context = note_asked(request, body.model, len(texts), texts)
    body.check_extra()
    if len(texts) > context.settings.max_choices:
        raise ApiError(
            f"{len(texts)} texts are given, but this server takes at most {context.settings.max_choices}. Send fewer.",
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
        return made.finish(vectors), TextUsage(prompt_tokens=tokens, total_tokens=tokens)
    finally:
        call.close()


def _embeddings(context: Context, body: EmbeddingRequest) -> _Texts:
    _refuse_misuse(context, body.model, wants_scores=False)
    pooling = _pooling(context, body.model)
    pooling.check_dimensions(body.dimensions, context.engine.runner.hidden_size)
    tokens = [_tokens(context, text, body, pooling) for text in body.texts()]

    def finish(vectors: Sequence[np.ndarray]) -> List[np.ndarray]:
        return [pooling.embed(hidden, body.dimensions) for hidden in vectors]

    return _Texts(tokens, Reading(scores=False, every=pooling.mode != "last"), finish)


def _scores(context: Context, body: ScoreRequest) -> _Texts:
    """Returns scores: a reward model reads both texts as one; for other models, they are cosines of two embeddings."""
    head = _head_of(context, body.model)
    special = body.add_special_tokens is not False
    if head is not None:
        if not head.is_reward or head.of_tokens:
            raise ApiError(
                f"{body.model} is a classifier with {len(head.weight)} labels, but /v1/score needs a model with one "
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


def _classes(context: Context, body: ClassifyRequest) -> _Texts:
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
    """Returns probabilities of scores [labels], as in vLLM: softmax of several, sigmoid of one; or the scores."""
    scores = scores.astype(np.float64)
    if not is_activated:
        return scores.tolist()
    # The sigmoid is the softmax of the score and 0.
    logits = scores if len(scores) > 1 else np.append(scores, 0.0)
    return probabilities_of(logits)[: len(scores)].tolist()


def _tokens(context: Context, text: Union[str, List[int]], body: schemas.TextsRequest, pooling: Pooling) -> List[int]:
    tokens = context.prompts.tokens(text, body.add_special_tokens is not False)
    if pooling.max_tokens is not None:
        context.prompts.check_text(tokens, body.text_field, pooling.max_tokens)
    return tokens


def _head_of(context: Context, model: str) -> Optional[ScoreHead]:
    return context.engine.score_head(context.models.adapter(model))


def _refuse_misuse(context: Context, model: str, wants_scores: bool) -> Any:
    """Returns the head of a model; raises an error with the reason if the model cannot serve the request."""
    head = _head_of(context, model)
    problem = misuse(context.models.adapter(model), head, wants_scores)
    if problem is not None:
        raise ApiError(str(problem), param="model")
    return head


def _pooling(context: Context, model: str) -> Pooling:
    """Returns the pooling that the folder of an adapter, or else of the base, names.

    Raises ApiError, 400, if neither names a usable one.
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
