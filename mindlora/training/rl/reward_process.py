"""The process that computes rewards: python -m mindlora.training.rl.reward_process DESCRIPTOR.

It never imports MindSpore. Its parent (mindlora.training.rl.rewards) sends one request after another over the
connection with this descriptor; each answer is JSON, {"result": ...} or {"error": text}. It ends with the connection.
"""

import asyncio
import faulthandler
import inspect
import json
import math
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from mindlora.core.errors import LoraError, RewardError
from mindlora.core.text import shown
from mindlora.training.rl.reward_functions import Reward, RewardFunction, shown_tool

# The last lines of a traceback name the cause.
_LINES = 12


class Functions:
    """The loaded functions; requests can call the public methods."""

    def __init__(self) -> None:
        self._functions: List[RewardFunction] = []
        self._tools: List[Callable[..., Any]] = []

    def load(self, reward: Reward, folder: str) -> None:
        """Loads the next function, whose relative paths start from ``folder``."""
        self._functions.append(reward.load(folder))

    def rate(
        self, number: int, prompts: List[str], completions: List[str], columns: Mapping[str, Sequence[Any]]
    ) -> List[Optional[float]]:
        """Returns the rewards of completions by the function with this number."""
        result = self._functions[number](prompts=prompts, completions=completions, **columns)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return checked_rewards(result, len(completions))

    def load_tool(self, tool: Reward, folder: str) -> Dict[str, Any]:
        """Loads the next tool, and returns it in OpenAI's form."""
        self._tools.append(tool.load(folder))
        return shown_tool(self._tools[-1])

    def call(self, number: int, arguments: str) -> List[Any]:
        """Calls the tool with this number; returns its result as JSON, and whether it raised."""
        try:
            result = self._tools[number](**json.loads(arguments))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as problem:
            return [str({"error": str(problem)}), True]
        return [str(result), False]


def serve(connection: Connection) -> None:
    """Executes requests from a connection until it closes.

    A request is (seconds, name of a method of Functions, its arguments). A request that takes longer ends the process,
    whatever it does: its stack is written to stderr, and nothing keeps running if the parent has already ended.
    """
    functions = Functions()
    while True:
        try:
            seconds, method, arguments = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        answer = _answer(getattr(functions, method), arguments)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(json.dumps(answer).encode())


def _answer(method: Callable[..., Any], arguments: Sequence[Any]) -> Dict[str, Any]:
    try:
        return {"result": method(*arguments)}
    except LoraError as refusal:
        return {"error": str(refusal)}
    except (Exception, SystemExit) as problem:
        frames = traceback.extract_tb(problem.__traceback__)
        theirs = [frame for frame in frames if frame.filename != __file__]
        lines = [*traceback.format_list(theirs), *traceback.format_exception_only(type(problem), problem)]
        last = "".join(lines).rstrip().splitlines()[-_LINES:]
        return {"error": "\n".join([f"it raised {type(problem).__name__}:", *last, "Correct the function."])}


def checked_rewards(result: Any, count: int) -> List[Optional[float]]:
    """Returns a function's result as floats, with None for an answer without a rating.

    Raises RewardError if the result is not a list of ``count`` finite numbers or None.
    """
    try:
        values = list(result)
    except TypeError:
        raise RewardError(
            f"it returned {shown(result)}, but it must return a list with a number for each completion."
        ) from None
    if len(values) != count:
        raise RewardError(f"it returned {len(values)} rewards for {count} completions. Return one for each.")
    return [None if value is None else _number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float:
    try:
        # A text is not a number, even if it could be parsed as one.
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"it returned {shown(value)} for completion {index}, but a reward must be a finite number, or None where "
            "there is none."
        )
    return number


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
