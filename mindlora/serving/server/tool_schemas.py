"""Tools in requests: the functions that the assistant may call, and those that tool_choice allows or requires."""

from typing import Annotated, Any, Dict, List, Literal, Optional, Sequence, Union

from pydantic import Field

from mindlora.serving.server.asked import Asked, Text
from mindlora.serving.server.errors import ApiError

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Asked):
    """A function that the assistant may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Optional[Text] = None
    parameters: Optional[Dict[str, Any]] = Field(
        None, description="a JSON schema, which the arguments keep; without it there are none"
    )
    strict: Optional[bool] = Field(
        None, description="refuse keywords of the schema that cannot be enforced, in place of leaving them out"
    )

    @property
    def arguments(self) -> Dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.parameters or _NO_ARGUMENTS


class Tool(Asked):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(Asked):
    """The name of a tool."""

    name: Text


class NamedTool(Asked):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Asked):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: List[NamedTool] = Field(min_length=1, max_length=128)


class AllowedToolsChoice(Asked):
    """The tools that the answer may call, or must call one of."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Union[Literal["none", "auto", "required"], NamedTool, AllowedToolsChoice, None]


def chosen_functions(functions: Sequence[Function], choice: ToolChoice) -> Dict[int, Function]:
    """Returns the functions that an answer may call, by place: none, all, or those that tool_choice names.

    Raises ApiError, 400, if it names a missing one, requires a call without tools, or two have the same name.
    """
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(f"Two of the tools have the name {twice!r}: give each its own name.", param="tools")
    if choice == "required" and not functions:
        raise ApiError("tool_choice is required, but there are no tools: give some.", param="tool_choice")
    chosen = _named_in(choice)
    if chosen is None:
        return dict(enumerate(functions))
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ApiError(
            f"tool_choice names {unknown[0]!r}, which is none of the tools ({', '.join(names) or 'none'}): give one "
            "of them.",
            param="tool_choice",
        )
    return {number: function for number, function in enumerate(functions) if function.name in chosen}


def demands_call(choice: ToolChoice) -> bool:
    """Returns whether the answer must call a tool."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _named_in(choice: ToolChoice) -> Optional[List[str]]:
    """Returns the names that tool_choice restricts calls to; None for any."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedToolsChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [] if choice == "none" else None
