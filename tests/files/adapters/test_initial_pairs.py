"""Initial pairs of raw PiSSA and OLoRA adapters, computed again from a base that has their cells joined or apart."""

import numpy as np
import pytest

from mindlora.core.errors import LoraError
from mindlora.files.adapters import initial_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.joined_pairs import join_pairs
from mindlora.models.architectures.joined_rows import join_rows

Q, K, V, QKV = (f"model.layers.0.attention.{leaf}" for leaf in ("wq", "wk", "wv", "w_qkv"))
ROWS = {Q: 12, K: 6, V: 6}


def weights(rows, columns=10):
    random = np.random.default_rng(5)
    return {path: random.normal(size=(count, columns)).astype(np.float32) for path, count in rows.items()}


def raw(rows, initializer, ranks=(2, 3, 2), alphas=(2.0, 9.0, 4.0), columns=10):
    """An adapter whose cells differ in rank and scale."""
    random, tensors = np.random.default_rng(6), {}
    for (path, count), rank in zip(rows.items(), ranks):
        tensors[path, "A"] = random.normal(size=(rank, columns)).astype(np.float32)
        tensors[path, "B"] = random.normal(size=(count, rank)).astype(np.float32)
    return Adapter(tensors, dict(zip(rows, alphas)), initializer=initializer)


def base_of(found, kv_heads=3):
    return initial_pairs.Base(found.keys(), found.__getitem__, lambda path: (kv_heads, None))


def residual(initializer, weight, rank, scale):
    if initializer == "pissa":
        u, s, v = np.linalg.svd(weight, full_matrices=False)
        return (u[:, rank:] * s[rank:]) @ v[rank:]
    q, r = np.linalg.qr(weight)
    return weight - scale * q[:, :rank] @ r[:rank]


@pytest.mark.parametrize("initializer", ["pissa", "olora"])
def test_of_the_rows_of_a_joined_weight(initializer):
    """W_qkv + scale B A of the joined pair is W' + scale B A of each cell by itself."""
    apart, adapter = weights(ROWS), raw(ROWS, initializer)
    expected = join_rows(
        [residual(initializer, apart[p], adapter.rank(p), adapter.scale(p)) + adapter.delta(p) for p in ROWS], 3
    )
    joined = join_rows(list(apart.values()), 3)
    initial_pairs.complete(adapter, base_of({QKV: joined}))
    assert adapter.initializer is None
    join_pairs(adapter, QKV, len(joined), 3)
    np.testing.assert_allclose(joined + adapter.delta(QKV), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("initializer", ["pissa", "olora"])
def test_of_a_joined_cell_whose_parts_the_base_has_apart(initializer):
    """ChatGLM, which has joined cells in PEFT and may have them apart in MindFormers."""
    start = "transformer.encoder.layers.0.self_attention."
    apart = weights({f"{start}wq": 12, f"{start}wk": 6, f"{start}wv": 6})
    adapter = raw({f"{start}query_key_value": 24}, initializer)
    whole, (path,) = np.concatenate(list(apart.values())), adapter.paths
    expected = residual(initializer, whole, adapter.rank(path), adapter.scale(path)) + adapter.delta(path)
    initial_pairs.complete(adapter, base_of(apart))
    np.testing.assert_allclose(whole + adapter.delta(path), expected, rtol=0, atol=1e-5)


def test_a_single_expert_of_a_base_that_stacks_them_is_refused():
    adapter = raw({"model.layers.0.mlp.experts.3.gate_proj": 8}, "pissa")
    with pytest.raises(LoraError, match="those of the experts are stacked"):
        initial_pairs.complete(adapter, base_of({}))


def test_a_weight_with_a_value_that_is_not_finite_is_refused():
    broken, adapter = weights({Q: 12}), raw({Q: 12}, "pissa")
    broken[Q][3, 4] = np.nan
    with pytest.raises(LoraError, match="holds NaN or infinity, so the initial pairs"):
        initial_pairs.complete(adapter, base_of(broken))
