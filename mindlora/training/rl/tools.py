"""Tools that answers call: their display in prompts, the calls in a turn, and the continuation with the results."""

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mindlora.core.errors import ConfigError
from mindlora.data.tokenizers import encode
from mindlora.serving.chat_prompt import TemplatePrompt
from mindlora.serving.constraints import Constraint
from mindlora.serving.tools import CallArguments, CallBegin, CallReader, format_of, tool_constraint
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.settings import RlSettings

# Calls a tool by its number with arguments as JSON; returns its result, and whether it failed.
Call = Callable[[int, str], Tuple[str, bool]]


class Turn(NamedTuple):
    """One turn of an answer.

    Attributes:
        text (str): The text outside calls.
        calls (list of (str, str)): Name and arguments, as JSON, of each call.
        complete (bool): Whether there are calls, all of them complete.
    """

    text: str
    calls: List[Tuple[str, str]]
    complete: bool


class Tools:
    """The tools of a run, for one tokenizer with its chat template.

    Args:
        tokenizer: As load_tokenizer returns it.
        shown (list of dict): The tools in OpenAI's form, {"type": "function", "function": {"name", ...}}.
        call (callable): Calls one of the tools.
        variables (mapping): Further variables of the chat template. Default: None.

    Raises:
        ConfigError: The chat template shows no tools, or two tools have the same name.
        TokenizerError: The tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, shown: Sequence[Dict[str, Any]], call: Call, variables: Optional[Mapping[str, Any]] = None
    ):
        self.shown = list(shown)
        self.prompt = TemplatePrompt(tokenizer, variables=variables)
        self._tokenizer = tokenizer
        self._call = call
        self._names = [tool["function"]["name"] for tool in shown]
        if len(set(self._names)) < len(self._names):
            raise ConfigError(f"rl.tools has functions of one name: {', '.join(self._names)}. Give each its own.")
        form = format_of(self.prompt.template)
        if form is None:
            raise ConfigError(
                "rl.tools needs a chat template that shows tools as Hermes, Qwen or Llama 3 do, and that of "
                "rl.tokenizer does not. Remove tools, or use a model that knows them."
            )
        self._form = form

    def constraint(self, answer: Optional[Constraint]) -> Constraint:
        """Returns the constraint on a turn: text, or ``answer``, and calls with arguments that match their schemas."""
        arguments = {
            tool["function"]["name"]: Constraint(
                "json", tool["function"]["parameters"], f"rl.tools: {tool['function']['name']}", strict=False
            )
            for tool in self.shown
        }
        own_tokens = tuple(self._tokenizer.get_added_vocab())
        return tool_constraint(self._form, arguments, False, True, own_tokens, answer)

    def read(self, text: str) -> Turn:
        """Parses a turn from its complete text."""
        reader = CallReader(self._form, self._names)
        said, calls = "", []
        for part in reader.read(text, True):
            if isinstance(part, CallBegin):
                calls.append((part.name, ""))
            elif isinstance(part, CallArguments):
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
            else:
                said += part
        return Turn(said, calls, reader.complete)

    def results(self, turn: Turn) -> Tuple[List[Dict[str, Any]], int]:
        """Executes the calls of a turn; returns the messages with the results, and the number of failed calls."""
        messages, failures = [], 0
        for name, arguments in turn.calls:
            content, failed = self._call(self._names.index(name), arguments)
            messages.append({"role": "tool", "name": name, "content": content})
            failures += failed
        return messages, failures

    def continuation(self, turn_tokens: Sequence[int], results: Sequence[Mapping[str, Any]]) -> List[int]:
        """Returns the tokens between a sampled turn with calls and the assistant's next turn.

        They are those that the chat template writes there: the end of the turn, if the last token is another one, the
        results, and the beginning of a turn.
        """
        end, behind = self.prompt.behind_calls(results, self.shown)
        end_tokens = encode(self._tokenizer, end)
        ended = list(turn_tokens[-1:]) == end_tokens[-1:]
        return ([] if ended else end_tokens) + encode(self._tokenizer, behind)


def tools_of(rewards: Rewards, tokenizer: Any, settings: RlSettings) -> Optional[Tools]:
    """Returns the tools loaded by a run's reward process; None if there are none."""
    if not rewards.tools:
        return None
    return Tools(tokenizer, rewards.tools, rewards.call, settings.chat_template_kwargs)
