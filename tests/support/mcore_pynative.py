"""MindFormers' mcore models in PyNative: what graph mode alone runs of them, in operators that a CPU has.

A graph of a tiny model takes seconds to compile, and its operators milliseconds to run. Compiled or not, the results
are the same bits, so the models that a test compares with need no graph. Graph mode calls none of what is replaced.
"""

import contextlib
from unittest import mock

from mindformers.parallel_core.training_graph.transformer.mlp import MLPInterleaved
from mindformers.parallel_core.training_graph.transformer.moe.shared_experts import SharedExpertMLPInterleaved
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import OneHotExt, ZerosLikeExt
from mindspore.ops.operations.debug_ops import Morph

from tests.conftest import in_mode


def _unfold(self, *inputs):
    # Graph mode replaces a Morph by its function before it differentiates.
    return self.__morph_fn__(*inputs)


def _one_hot(self, indices, count, on, off):
    on, off = (value if isinstance(value, Tensor) else Tensor(value, indices.dtype) for value in (on, off))
    return ops.one_hot(indices, count, on, off, self.axis)


def _zeros_like(self, x, dtype=None):
    return ops.zeros_like(x, dtype=dtype)


def _shared_experts(self, hidden_states):
    # MLPInterleaved returns three values, which graph mode lets MindFormers unpack into two.
    assert not self.use_shared_expert_gate
    return MLPInterleaved.construct(self, hidden_states)[:2]


REPLACED = (
    (Morph, "__call__", _unfold),
    (OneHotExt, "__call__", _one_hot),
    (ZerosLikeExt, "__call__", _zeros_like),
    (SharedExpertMLPInterleaved, "construct", _shared_experts),
)


@contextlib.contextmanager
def pynative_operators():
    """Lets PyNative compute mcore models while it lasts, in a process that may compile graphs meanwhile too."""
    with contextlib.ExitStack() as stack:
        for owner, name, function in REPLACED:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextlib.contextmanager
def mcore_in_pynative():
    """Runs what it holds in PyNative, in which mcore models work while it lasts."""
    with in_mode(1), pynative_operators():
        yield
