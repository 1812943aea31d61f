"""What every client asks for: the same questions, the same tool and the same type of an answer."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION, NEXT = "How many cats are there?", "And dogs?"
TOKENS = 24
CALLED = []


class Forecast(BaseModel):
    """The weather of one day. The model is random: any answer of this type is right, and others would have no end."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


class City(BaseModel):
    """The arguments of the tool, and no others."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Returns whether it rains in a city."""
    CALLED.append(city)
    return "no rain"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns whether it rains in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def taken():
    """Returns the cities that the tool was called with since the last time."""
    found = CALLED[:]
    CALLED.clear()
    return found
