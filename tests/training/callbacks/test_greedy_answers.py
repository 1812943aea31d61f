"""Continuations, greedily: the likeliest token each time, from networks whose next token is known."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindlora.training.callbacks.sample_answers import Continuations

VOCABULARY, LENGTH, PAD, EOS = 12, 8, 0, 11


class CountsUp(nn.Cell):
    """Its likeliest token is the one before it plus 1; padding must not matter. In training it has no logits."""

    def construct(self, tokens):
        if self.training:
            return tokens
        return ops.one_hot(tokens + 1, VOCABULARY, Tensor(2.0, ms.float32), Tensor(-1.0, ms.float32)), tokens


def test_each_row_goes_on_until_its_own_end(mode):
    network = CountsUp().set_train(True)
    found = Continuations(network, LENGTH, PAD, EOS, max_tokens=5).greedy([[1, 2], [7], [1], [3, 4, 5, 6]])
    assert found == [
        [3, 4, 5, 6, 7],  # max_tokens
        [8, 9, 10],  # eos, which is left out
        [2, 3, 4, 5, 6],
        [7, 8, 9, 10],  # the end of the window
    ]
    assert network.training


def test_an_answer_may_be_empty():
    assert Continuations(CountsUp(), LENGTH, PAD, EOS, max_tokens=3).greedy([[EOS - 1]]) == [[]]
