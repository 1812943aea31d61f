"""Teachers that rl.teacher may name, and a served teacher's log-probabilities of the student's tokens."""

import concurrent.futures
import time
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, Sequence, Union

import numpy as np

from mindlora.core.errors import ConfigError, TeacherError
from mindlora.core.fields import POSITIVE, check_keys, check_number
from mindlora.core.text import shown
from mindlora.training.rl.asking import ask, path_of

# The model without the trained adapter.
BASE = "base"
# Number of concurrent requests.
_TOGETHER = 8
_LIMIT = "rl.teacher.timeout"
# Tokenizers that agree on these letters, digits, marks and spaces are almost certainly the same.
_PROBE = 'The 31 quick foxes jumped: "déjà vu", 9.5 %\n\tif x != y_2:  你好'


@dataclass(frozen=True)
class ServedTeacher:
    """A model behind an OpenAI-compatible server that scores prompts of token ids: vLLM, or ``mindlora serve``.

    It is queried by /v1/completions with echo and logprobs, without new tokens.

    Args:
        url (str): The server's address, such as http://localhost:8000.
        model (str): The teacher's name there.
        timeout (float): Seconds that it may take for a step's answers. Default: 300.

    Raises:
        ConfigError: A value is wrong.
    """

    url: str
    model: str
    timeout: float = 300.0

    def __post_init__(self):
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"rl.teacher: url is {self.url!r}, but it must be the address of a server. Write it with http://, as "
                "in http://localhost:8000."
            )
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"rl.teacher: model is {self.model!r}. Write the name of a model that {self.url} serves.")
        check_number(self.timeout, "rl.teacher: timeout", POSITIVE)

    def check_tokenizer(self, encode: Callable[[str], List[int]]) -> bool:
        """Compares the tokenizations of teacher and student by /tokenize; returns whether the server supports it.

        ``encode`` is the student's: it returns the ids of a text, without special tokens.

        Raises TeacherError if the tokenizations differ, or the server does not answer.
        """
        body = {"model": self.model, "prompt": _PROBE, "add_special_tokens": False}
        path = path_of(self.url, "tokenize")
        answer = ask(path, body, _error, time.monotonic() + self.timeout, _LIMIT, optional=True)
        if answer is None:
            return False
        tokens = encode(_PROBE)
        if not isinstance(answer, Mapping) or answer.get("tokens") != tokens:
            theirs = answer.get("tokens") if isinstance(answer, Mapping) else answer
            raise TeacherError(
                f"rl.teacher: {path} takes {_PROBE!r} apart into {shown(theirs)}, and the student's tokenizer into "
                f"{shown(tokens)}: the teacher would score other texts. Use a teacher with the student's tokenizer."
            )
        return True

    def scores(self, rows: Sequence[Sequence[int]], begins: Sequence[int]) -> List[np.ndarray]:
        """Returns the teacher's log-probabilities of each row's tokens from ``begins`` on.

        Args:
            rows (list of list of int): Token ids, at least one in each row.
            begins (list of int): Index of the first scored token of each row, at least 1.

        Returns:
            list of array, float64 [len(row) - begin] each, in nats.

        Raises:
            TeacherError: The server does not answer, refuses, does not finish within ``timeout`` seconds, or its answer
                lacks a log-probability for a token.
        """
        end = time.monotonic() + self.timeout
        pool = concurrent.futures.ThreadPoolExecutor(_TOGETHER)
        try:
            return list(pool.map(lambda row, begin: self._scored(list(row), begin, end), rows, begins))
        finally:
            # After an error, waiting rows are not sent any more.
            pool.shutdown(wait=False, cancel_futures=True)

    def _scored(self, row: List[int], begin: int, end: float) -> np.ndarray:
        path = path_of(self.url, "v1/completions")
        body = {"model": self.model, "prompt": row, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 1.0}
        answer = ask(path, body, _error, end, _LIMIT)
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"][begin : len(row)]
            scores = np.array(values, np.float64)
        except (KeyError, IndexError, TypeError, ValueError):
            scores = np.array([])
        if scores.shape != (len(row) - begin,) or not np.isfinite(scores).all():
            raise TeacherError(
                f"rl.teacher: {path} answered {shown(answer)} to a prompt of {len(row)} tokens, without a finite "
                "number for each in logprobs.token_logprobs. Use a server that scores prompts (echo with logprobs), "
                "such as vLLM or mindlora serve."
            )
        return scores


def _error(message: str) -> TeacherError:
    return TeacherError(f"rl.teacher: {message}")


def teacher_of(value: Any) -> Union[str, ServedTeacher]:
    """Returns the teacher that rl.teacher names: BASE, the path of an adapter, or a ServedTeacher.

    Raises ConfigError if the value is none of these, or a key of the node is missing, unknown or wrong.
    """
    advice = "Write base, the path of an adapter, or a node {url: http://localhost:8000, model: NAME}."
    if isinstance(value, str) and value:
        if value.startswith(("http://", "https://")):
            raise ConfigError(f"rl.teacher is {value!r}, without a model. Write {{url: {value}, model: NAME}}.")
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"rl.teacher is {value!r}. {advice}")
    check_keys(value, ServedTeacher, "rl.teacher")
    missing = [key for key in ("url", "model") if key not in value]
    if missing:
        raise ConfigError(f"rl.teacher has no {missing[0]}. {advice}")
    return ServedTeacher(**value)
