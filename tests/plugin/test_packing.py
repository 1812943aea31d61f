"""Packed rows in a Llama and in a run: examples compute what they compute alone, and what cannot be is refused."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.data.conversion import Encoded
from mindlora.data.mindrecord import write_mindrecord
from mindlora.data.packing import Boundary, pack, packed_columns
from mindlora.errors import ConfigError
from tests.support import tiny_runs

BOS, EOS, PAD = 1, 2, 3
LENGTH = 32
BOUNDARIES = {"bos": Boundary(BOS, is_padding=False), "padding": Boundary(PAD, is_padding=True)}


def examples_of(boundary, count=11, longest=LENGTH + 1, seed=0):
    """Examples of odd and even lengths whose output, and in places the prompt, is learned."""
    rng = np.random.default_rng(seed)
    first = [] if boundary.is_padding else [boundary.token]
    rows = [np.r_[first, rng.integers(4, 60, length), EOS].astype(np.int32) for length in rng.integers(1, 15, count)]
    rows.append(np.r_[first, rng.integers(4, 60, longest - len(first))].astype(np.int32))
    return [Encoded(row, rng.random(len(row)) < 0.6) for row in rows]


def packed_rows(examples, boundary, seq_length=LENGTH):
    """The columns of the packed rows."""
    rows = pack(examples, boundary, seq_length)
    return list(packed_columns(rows, [row.columns(seq_length, PAD) for row in rows], boundary))


def single_rows(examples, seq_length=LENGTH):
    return [row.columns(seq_length, PAD) for row in examples]


def logits_of(network, rows, boundary, count):
    """Returns {tokens of an example: logits of its tokens}, computed in a batch of ``count`` rows; examples differ."""
    tokens = np.stack([row["input_ids"] for row in rows])
    # The model does not see the last token of a row.
    batch = np.resize(tokens[:, :-1], (count, LENGTH))
    logits, found = network(Tensor(batch))[0].asnumpy(), {}
    for row, values in zip(tokens, logits):
        starts = np.flatnonzero(row == boundary.token)
        for piece, part in zip(np.split(row, starts), np.split(values, starts)):
            example = piece[piece != PAD]
            if len(example):
                found[tuple(example)] = part[piece[: len(part)] != PAD]
    return found


@pytest.mark.parametrize("kind", BOUNDARIES)
def test_an_example_has_the_logits_that_it_has_alone(mode, make_llama, kind):
    from mindlora.plugin.packing import install_segment_mask, installed_boundary

    boundary = BOUNDARIES[kind]
    examples = examples_of(boundary)
    alone, packed = single_rows(examples), packed_rows(examples, boundary)
    assert len(packed) < len(alone) / 2
    network = make_llama(seq_length=LENGTH, pad_token_id=PAD)
    network.set_train(False)
    expected, leaked = (logits_of(network, rows, boundary, len(alone)) for rows in (alone, packed))
    assert installed_boundary(network) is None
    install_segment_mask(network, boundary.token)
    assert installed_boundary(network) == boundary.token
    network.compile_cache.clear()
    found, unpacked = (logits_of(network, rows, boundary, len(alone)) for rows in (packed, alone))
    assert found.keys() == expected.keys() and len(found) == len(examples)
    scale = max(np.abs(values).max() for values in expected.values())
    assert difference(found, expected) < 2e-6 * scale
    # Without the mask the examples see each other.
    assert difference(leaked, expected) > 0.05 * scale
    # What is not packed is as before.
    assert difference(unpacked, expected) < 2e-6 * scale


def difference(found, expected):
    # In a full row, the logits of the last token are missing.
    return max(np.abs(found[key] - expected[key][: len(found[key])]).max() for key in expected)
