"""LoRADense on the fused operators: which path it takes, and that each path computes the equation."""

import dataclasses

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense
from mindlora.core.errors import BackendError
from tests.support.lora_dense import CONFIG, EACH_CELL, IN, IN_GRAPH_MODE, OUT, Each, adapted, oracle
from tests.support.networks import assert_close, normal


# Each two of path, dtype and training together.
@EACH_CELL
@pytest.mark.parametrize(
    "path, dtype, training",
    [
        ("cpu", "float32", False),
        ("cpu", "float16", True),
        ("composed", "float32", True),
        ("composed", "float16", False),
    ],
)
def test_few_and_many_tokens_on_each_path(mode, plain, monkeypatch, library, path, dtype, training):
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    cell, activation = plain
    lora = adapted(cell, dataclasses.replace(CONFIG, compute_dtype=dtype)).set_train(training)
    assert lora.choice.path == path
    inputs = [normal(tokens, IN) for tokens in (1, 64, 65)]
    for x, y in zip(inputs, Each(lora)(*map(Tensor, inputs))):
        assert_close(y, oracle(lora, x, activation), dtype=dtype)


@IN_GRAPH_MODE
def test_any_number_of_tokens_in_one_graph(mode, monkeypatch, library):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    lora = adapted(nn.Dense(IN, OUT))
    lora.set_inputs(Tensor(shape=(None, IN), dtype=ms.float32))
    for tokens in (3, 1, 20):
        x = normal(tokens, IN)
        assert_close(lora(Tensor(x)), oracle(lora, x))


@IN_GRAPH_MODE
def test_what_fused_operators_cannot_take_is_composed_and_forced_is_refused(mode, monkeypatch, library):
    many, sharded = nn.Dense(300, 300), nn.Dense(IN, OUT)
    sharded.matmul.in_strategy = ((1, 1), (2, 1))
    cells = [
        (many, LoraConfig(lora_rank=257, lora_alpha=1), "rank is 257, and the fused operators take 1 to 256"),
        (sharded, CONFIG, "the cell has a shard strategy"),
    ]
    for cell, config, reason in cells:
        monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
        lora = LoRADense.from_dense(cell, config)
        assert lora.choice.path == "composed" and reason in lora.choice.reason
        monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
        with pytest.raises(BackendError, match=f"MINDLORA_BACKEND is cpu, but {reason}"):
            LoRADense.from_dense(cell, config)
