"""Answers of /v1/models, as pydantic models."""

from typing import List, Literal, Optional

from pydantic import BaseModel


class Model(BaseModel):
    """The base, or an adapter, whose parent is the base."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: Optional[str]
    max_model_len: int


class ModelPage(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: List[Model]
