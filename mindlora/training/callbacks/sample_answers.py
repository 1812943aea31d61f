"""SampleAnswers: answers given prompts before and after training."""

from typing import Callable, List, Optional, Sequence

import numpy as np
from mindspore import Callback, Tensor, nn, ops
from mindspore.train import RunContext

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.data import tokenizers
from mindlora.data.alpaca import prompt_template
from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.callbacks.common import register
from mindlora.training.held_out.rows import missing_rows, parts_of_batch
from mindlora.training.log import logger
from mindlora.training.model.network import evaluated_model


@register
class SampleAnswers(Callback):
    """Answers prompts before the first step and after the last one, greedily, for the log and the report of the run.

    Each token takes a pass over the window of seq_length tokens, since a network in training has no KV cache.

    Args:
        prompts (list of str): The instructions to answer.
        tokenizer (str): The tokenizer of the training data: a folder or file, as for ``mindlora data``.
        template (str): The prompt template of the training data, as for ``mindlora data alpaca``. Default: "alpaca".
        max_tokens (int): Maximum number of tokens in an answer. Default: 64.

    Raises:
        ConfigError: There is no prompt, one is too long for the model, or max_tokens is out of range.
        DataError: The template is wrong.
        TokenizerError: The tokenizer cannot be loaded.
    """

    def __init__(self, prompts: List[str], tokenizer: str, template: str = "alpaca", max_tokens: int = 64):
        super().__init__()
        if not isinstance(prompts, list) or not prompts or not all(isinstance(text, str) for text in prompts):
            raise ConfigError(f"prompts is {prompts!r}, but it must be a list of texts.")
        check_number(max_tokens, "max_tokens", COUNT)
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.tokenizer = tokenizers.load_tokenizer(tokenizer)
        self.special = tokenizers.special_ids(self.tokenizer)
        self.template = prompt_template(template)
        self.continuations: Optional[Continuations] = None
        self.answered = False

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Answers before the first step of a run that is not resumed."""
        # Not when training begins: a resumed run may not know its step by then.
        params = run_context.original_args()
        if not self.answered and params.cur_step_num == 0:
            self._answer(params)
        self.answered = True

    def on_train_end(self, run_context: RunContext) -> None:
        """Answers after the last step."""
        self._answer(run_context.original_args())

    def _answer(self, params):
        """Puts the answers into ``training_answers`` of MindSpore's callback parameters, and into the log."""
        network = evaluated_model(params.train_network)
        length = network.config.seq_length
        rows = [self._encode(prompt) for prompt in self.prompts]
        for prompt, row in zip(self.prompts, rows):
            if len(row) >= length:
                raise ConfigError(
                    f"SampleAnswers: the prompt {prompt!r} has {len(row)} tokens with its template, but seq_length is "
                    f"{length}, which leaves no room for an answer. Shorten it."
                )
        if self.continuations is None:
            special = self.special
            self.continuations = Continuations(network, length, special.pad, special.eos, self.max_tokens)
        token_lists = self.continuations.greedy(rows)
        answers = [self.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in token_lists]
        for prompt, answer in zip(self.prompts, answers):
            logger.info("step %d: %s -> %s", params.cur_step_num, prompt, answer)
        pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(self.prompts, answers)]
        params["training_answers"] = [
            *(params.get("training_answers") or []),
            {"step": params.cur_step_num, "answers": pairs},
        ]
        params.train_network.set_train(True)

    def _encode(self, prompt):
        record = {"instruction": prompt, "input": ""}
        start = [] if self.special.bos is None else [self.special.bos]
        return start + tokenizers.encode(self.tokenizer, self.template.prompt(record))


class _LastLogits(CompiledOnce):
    """The logits at one position of each row: tokens [rows, N] and flat positions [rows] -> [rows, vocabulary]."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = self.network(tokens)[0]
        return ops.gather(logits.reshape((-1, logits.shape[-1])), positions, 0)


class Continuations:
    """Continues prompts with a network in training. Keep the object for further calls: its graph is compiled once.

    Each token takes a pass over the complete window, since such a network has no KV cache: use this for a few short
    texts.

    Args:
        network (Cell): MindFormers' causal language model, which, called with tokens [rows, seq_length] in evaluation
            mode, returns (logits [rows, seq_length, vocabulary], ...). It is left in its mode.
        seq_length (int): The window. Each prompt has fewer tokens.
        pad (int): The token that pads the window.
        eos (int): The token that ends a text; -1 for none.
        max_tokens (int): Maximum number of tokens after a prompt.
    """

    def __init__(self, network: nn.Cell, seq_length: int, pad: int, eos: int, max_tokens: int):
        self.network = network
        self.cell = _LastLogits(network)
        self.seq_length = seq_length
        self.pad = pad
        self.eos = eos
        self.max_tokens = max_tokens

    def greedy(self, prompts: Sequence[Sequence[int]]) -> List[List[int]]:
        """Returns the continuation of each prompt, without eos, choosing the most likely token each time."""
        rows = self(prompts, lambda logits: logits.argmax(-1))
        answers = [row[len(prompt) :] for row, prompt in zip(rows, prompts)]
        return [answer[:-1] if answer[-1] == self.eos else answer for answer in answers]

    def __call__(
        self, prompts: Sequence[Sequence[int]], choose: Callable[[np.ndarray], np.ndarray], size: int = 0
    ) -> List[List[int]]:
        """Returns each prompt with its continuation, up to eos, max_tokens or the end of the window.

        Args:
            prompts: Tokens of each.
            choose: Returns a token for each row of logits [rows, vocabulary].
            size: Rows of a batch, filled up with rows of padding, so that one graph serves several batches. Default:
                the number of prompts, or more where devices divide them.
        """
        was_training = self.network.training
        self.cell.set_train(False)
        rows = [list(prompt) for prompt in prompts]
        ends = [min(self.seq_length, len(row) + self.max_tokens) for row in rows]
        running = set(range(len(rows)))
        size = max(size, len(rows))
        size += missing_rows(size, parts_of_batch(self.network))
        while running:
            window = np.full((size, self.seq_length), self.pad, np.int32)
            positions = np.arange(size, dtype=np.int32) * self.seq_length
            for index, row in enumerate(rows):
                window[index, : len(row)] = row
                positions[index] += len(row) - 1
            chosen = choose(self.cell(Tensor(window), Tensor(positions)).asnumpy()[: len(rows)])
            for index in sorted(running):
                rows[index].append(int(chosen[index]))
                if rows[index][-1] == self.eos or len(rows[index]) == ends[index]:
                    running.remove(index)
        self.cell.set_train(was_training)
        return rows
