"""What a soak asks a server, and whether what comes is right. Imports the standard library alone: killed clients do."""

import dataclasses
import json
import math
from typing import Any, Dict, List, Optional

# Between two log-probabilities, probabilities or numbers of an embedding of the same text in other batches.
NEAR = 1e-3


@dataclasses.dataclass(frozen=True)
class Question:
    """A request, and what may come.

    Attributes:
        kind (str): Where it is counted.
        path (str): Where it is asked.
        content (str): The body, without ``stream``.
        answers (list of dict): Those that are right, as Answer.said returns them; none if only an error is.
        errors (dict): Code -> status of the errors that are right too.
        streams (bool): Whether it can be streamed.
    """

    kind: str
    path: str
    content: str
    answers: List[Dict[str, Any]]
    errors: Dict[str, int]
    streams: bool = True

    def body(self, stream: bool) -> str:
        """Returns the body to send."""
        if not stream:
            return self.content
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**json.loads(self.content), **streamed})

    def shown(self, stream: bool) -> str:
        """Returns the kind, as tables name it."""
        return f"{self.kind}, streamed" if stream else self.kind


@dataclasses.dataclass
class Answer:
    """What has come. ``code`` is an error's, and ``complete`` says whether the end was seen.

    ``text`` holds calls of tools, labels and tokens too, and ``numbers`` those of tokens, labels and texts.
    """

    status: int
    text: str = ""
    reason: Optional[str] = None
    tokens: int = 0
    numbers: List[float] = dataclasses.field(default_factory=list)
    code: Optional[str] = None
    complete: bool = False

    def take_whole(self, content: bytes) -> None:
        """Reads an answer that is not streamed, or an error."""
        found = json.loads(content)
        self._take(found)
        self.complete = True

    def take_line(self, line: str) -> bool:
        """Reads a line of a streamed answer; returns whether it is a part of the answer's text."""
        if not line.startswith("data: "):
            return False
        if line == "data: [DONE]":
            self.complete = True
            return False
        found = json.loads(line[len("data: ") :])
        self._take(found)
        return bool(found.get("choices"))

    def said(self) -> Dict[str, Any]:
        """Returns what a right answer to the same question says too."""
        return {"text": self.text, "reason": self.reason, "tokens": self.tokens, "numbers": self.numbers}

    def _take(self, found):
        for choice in found.get("choices", ()):
            self._take_choice(choice)
        for entry in found.get("data", ()):
            self.text += entry.get("label", "")
            self.numbers += entry.get("embedding") or entry.get("probs") or [entry["score"]]
        if "token_strs" in found:
            self.text += json.dumps(found["tokens"])
        self.tokens = (found.get("usage") or {}).get("completion_tokens", self.tokens)
        self.code = found.get("error", {}).get("code", self.code)

    def _take_choice(self, choice):
        said = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or ():
            self.text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        logprobs = choice.get("logprobs") or {}
        self.numbers += [value for value in logprobs.get("token_logprobs") or () if value is not None]
        self.reason = choice.get("finish_reason") or self.reason


ANSWERED = "answered"
# What no request may come to.
WRONG, FAILED, LOST = "wrong", "5xx", "lost"


def judge(question: Question, answer: Answer) -> str:
    """Returns what a request has come to: ANSWERED, the code of an error that is right, or one of the three above."""
    if answer.status >= 500:
        return FAILED
    if not answer.complete:
        return LOST
    if answer.code is not None:
        return answer.code if question.errors.get(answer.code) == answer.status else WRONG
    is_right = answer.status == 200 and any(_is(answer, right) for right in question.answers)
    return ANSWERED if is_right else WRONG


def _is(answer, right):
    if {**answer.said(), "numbers": []} != {**right, "numbers": []} or len(answer.numbers) != len(right["numbers"]):
        return False
    return all(math.isclose(*pair, abs_tol=NEAR) for pair in zip(answer.numbers, right["numbers"]))
