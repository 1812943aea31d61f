"""Dialogue: a conversation with one engine, in which the base or any adapter may give each answer."""

import dataclasses
from typing import Dict, List, Optional

from mindlora.core.errors import RequestError
from mindlora.serving.answer import Stream
from mindlora.serving.chat_prompt import PromptForm
from mindlora.serving.engine import Engine
from mindlora.serving.request import Sampling


class Dialogue:
    """The turns of a conversation, kept within the model's window.

    Args:
        engine (Engine): It must have been started before the first question.
        form (PromptForm): The form of prompts. If it takes single messages, each question is independent.
        sampling (Sampling): How answers are sampled. A seed applies to the first answer; each later one adds 1.
        adapter (str, optional): The adapter that answers. Default: None, the base.
        max_tokens (int, optional): Tokens of an answer. Default: None, as many as fit into the window.

    Attributes:
        history (list of dict): Alternating messages of the user and the assistant.
        dropped (int): Turns that the last question dropped, the oldest first, since the window had no room for
            them.
        sampling, adapter, system: As given; they may be set at any time and apply from the next question on.
    """

    def __init__(
        self,
        engine: Engine,
        form: PromptForm,
        sampling: Sampling,
        adapter: Optional[str] = None,
        system: Optional[str] = None,
        max_tokens: Optional[int] = None,
    ):
        self._engine = engine
        self._form = form
        self._max_tokens = max_tokens
        self.sampling = sampling
        self.adapter = adapter
        self.system = system
        self.history: List[Dict[str, str]] = []
        self.dropped = 0
        self._answers = 0

    @property
    def can_remember(self) -> bool:
        """Whether earlier turns and a system message are part of a prompt."""
        return self._form.takes_conversations

    def ask(self, text: str) -> Stream:
        """Asks the next question; ``take`` adds question and answer to the history.

        Raises RequestError if the question alone does not fit into the window or cannot be used, and the errors of
        Engine.submit.
        """
        history = self.history if self.can_remember else []
        self.dropped = 0
        prompt = self._form.tokens(text, history, self.system)
        while len(prompt) + self._least_room() > self._engine.seq_length and history:
            history = history[2:]
            self.dropped += 1
            prompt = self._form.tokens(text, history, self.system)
        room = self._engine.seq_length - len(prompt)
        if room < 1:
            raise RequestError(
                f"This message is {len(prompt)} tokens in its prompt, but the model takes {self._engine.seq_length}, "
                "its answer included: make it shorter."
            )
        seed = self.sampling.seed
        stream = self._engine.submit(
            prompt,
            dataclasses.replace(
                self.sampling,
                max_tokens=min(self._max_tokens or room, room),
                seed=None if seed is None else seed + self._answers,
                stop_tokens=tuple(self._form.prompt.ends),
            ),
            self.adapter,
        )
        self._answers += 1
        return stream

    def take(self, question: str, answer: str) -> None:
        """Adds a turn to the history."""
        del self.history[: 2 * self.dropped]
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str:
        """Removes the last turn from the history and returns its question; raises RequestError if there is none."""
        if not self.history:
            raise RequestError("Nothing has been asked yet: ask something before /again.")
        question = self.history[-2]["content"]
        del self.history[-2:]
        return question

    def reset(self) -> None:
        """Forgets the conversation, and restarts the seeds."""
        self.history.clear()
        self._answers = 0

    def set_seed(self, seed: Optional[int]) -> None:
        """Sets the seed of the next answer; None draws one for each answer."""
        self.sampling = dataclasses.replace(self.sampling, seed=seed)
        self._answers = 0

    def _least_room(self):
        """The least room for an answer, in tokens, below which old turns are dropped."""
        quarter = self._engine.seq_length // 4
        return max(1, min(self._max_tokens or quarter, quarter))
