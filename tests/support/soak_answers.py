"""What a soak asks a server, and whether what comes is right. Imports the standard library alone: killed clients do."""

import dataclasses
import json
from typing import Dict, List, Optional


@dataclasses.dataclass(frozen=True)
class Question:
    """A request, and what may come.

    Attributes:
        kind (str): Where it is counted.
        path (str): /v1/completions or /v1/chat/completions.
        content (str): The body, without ``stream``.
        texts (list of str): The answers that are right; none if only an error is.
        tokens (int): Tokens of an answer.
        errors (dict): Code -> status of the errors that are right too.
    """

    kind: str
    path: str
    content: str
    texts: List[str]
    tokens: int
    errors: Dict[str, int]

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
    """What has come. ``code`` is an error's, and ``complete`` tells whether the end was seen."""

    status: int
    text: str = ""
    reason: Optional[str] = None
    tokens: int = 0
    code: Optional[str] = None
    complete: bool = False

    def take_whole(self, content: bytes) -> None:
        """Reads an answer that is not streamed, or an error."""
        found = json.loads(content)
        self._take(found)
        self.complete = True

    def take_line(self, line: str) -> bool:
        """Reads a line of a streamed answer; tells whether it is a part of the answer's text."""
        if not line.startswith("data: "):
            return False
        if line == "data: [DONE]":
            self.complete = True
            return False
        found = json.loads(line[len("data: ") :])
        self._take(found)
        return bool(found.get("choices"))

    def _take(self, found):
        for choice in found.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or said.get("content") or ""
            self.reason = choice.get("finish_reason") or self.reason
        self.tokens = (found.get("usage") or {}).get("completion_tokens", self.tokens)
        self.code = found.get("error", {}).get("code", self.code)


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
    is_right = answer.text in question.texts and answer.tokens == question.tokens and answer.reason == "length"
    return ANSWERED if answer.status == 200 and is_right else WRONG
