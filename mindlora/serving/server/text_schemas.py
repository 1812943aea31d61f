"""Requests and answers of /v1/embeddings, /v1/score and /v1/classify, as pydantic models."""

from typing import Annotated, ClassVar, List, Literal, Optional, Tuple, Union

from pydantic import BaseModel, Field

from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.schemas import Text, TextsRequest, TokenId

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
        """The texts, each as text or token ids."""
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
    """Body of /v1/classify, as vLLM has it."""

    input: Texts

    def texts(self) -> List[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class ScoreRequest(_Activated):
    """Body of /v1/score, as vLLM has it: one text and others, or pairs of texts."""

    text_field: ClassVar[str] = "text_2"
    text_1: Texts
    text_2: Texts

    def pairs(self) -> List[Tuple[str, str]]:
        """The pairs that are to be scored; raises ApiError, 400, if the lists are not of one length."""
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
