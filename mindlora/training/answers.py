"""Greedy answers of a network in training, without a KV cache."""

from typing import List, Sequence

import numpy as np
from mindspore import Tensor, nn, ops


class _LastLogits(nn.Cell):
    """The logits at one position of each row: tokens [rows, N] and flat positions [rows] -> [rows, vocabulary]."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = self.network(tokens)[0]
        return ops.gather(logits.reshape((-1, logits.shape[-1])), positions, 0)


def greedy_answers(
    network: nn.Cell, prompts: Sequence[Sequence[int]], seq_length: int, pad: int, eos: int, max_tokens: int
) -> List[List[int]]:
    """Returns what a network continues each prompt with, choosing the likeliest token each time.

    The whole window runs for each token, since a network in training has no KV cache: this is for a few short answers.

    Args:
        network (nn.Cell): A MindFormers causal language model; called with tokens [rows, seq_length] in evaluation
            mode, it returns (logits [rows, seq_length, vocabulary], ...). It is left in the mode that it was in.
        prompts (list of list of int): Token ids, fewer than seq_length in each prompt.
        seq_length (int): Length of the window, in tokens.
        pad (int): Id of the padding.
        eos (int): Id of the token that ends an answer.
        max_tokens (int): Tokens in an answer at most.

    Returns:
        list of list of int: the new tokens for each prompt, without eos.
    """
    was_training = network.training
    cell = _LastLogits(network).set_train(False)
    rows = [list(prompt) for prompt in prompts]
    ends = [min(seq_length, len(row) + max_tokens) for row in rows]
    running = set(range(len(rows)))
    while running:
        window = np.full((len(rows), seq_length), pad, np.int32)
        for index, row in enumerate(rows):
            window[index, : len(row)] = row
        positions = np.array([index * seq_length + len(row) - 1 for index, row in enumerate(rows)], np.int32)
        chosen = cell(Tensor(window), Tensor(positions)).asnumpy().argmax(-1)
        for index in sorted(running):
            rows[index].append(int(chosen[index]))
            if rows[index][-1] == eos or len(rows[index]) == ends[index]:
                running.remove(index)
    cell.set_train(was_training)
    answers = [row[len(prompt) :] for row, prompt in zip(rows, prompts)]
    return [answer[:-1] if answer[-1] == eos else answer for answer in answers]
