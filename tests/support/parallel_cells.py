"""Cells of MindFormers' mcore models by themselves, for the tests of what carries an adapter there."""

import contextlib

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tests.support.networks import normal

IN, OUT, RANK, ALPHA = 6, 10, 3, 4.5
SCALE = ALPHA / RANK
KINDS = ("ColumnParallelLinear", "RowParallelLinear", "LinearNoTP", "SequenceParallelLinear")
# Keys of a cell -> whether the cell adds its bias, or returns it.
BIASES = {"no bias": {"bias": False}, "adds": {"bias": True}, "returns": {"bias": True, "skip_bias_add": True}}


def layers():
    """Returns the module of the cells."""
    from mindformers.parallel_core.training_graph.tensor_parallel import layers as found

    return found


def transformer_config(**keys):
    """Returns the configuration that a cell asks for its sharding and its dtypes."""
    from mindformers.parallel_core.transformer_config import TransformerConfig

    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8, **keys}
    return TransformerConfig(**{"compute_dtype": "float32", "params_dtype": "float32", **config})


def parallel_cell(kind="ColumnParallelLinear", config=None, **keys):
    """Returns a linear cell of random weight and bias."""
    cell = getattr(layers(), kind)(
        IN,
        OUT,
        config=config or transformer_config(),
        init_method=lambda shape: Tensor(normal(*shape, seed=1)),
        bias_init=lambda shape: Tensor(normal(*shape, seed=2)),
        **{"bias": False, **keys},
    )
    return cell


class Outputs(nn.Cell):
    """Calls cells on x [sequence, batch, in] and returns their y; a bias that one returns is added by the caller."""

    def __init__(self, *cells):
        super().__init__(auto_prefix=False)
        self.cells_in_turn = nn.CellList(list(cells))

    def construct(self, x):
        outputs = ()
        for cell in self.cells_in_turn:
            y, bias = cell(x)
            outputs += (y if bias is None else ops.add(y, bias),)
        return outputs


def inputs(seed=5, tokens=4, batch=2):
    """Returns x, float32 [sequence, batch, in]."""
    return normal(tokens, batch, IN, seed=seed)


def linear(x, cell):
    """Returns x W^T + bias in NumPy."""
    y = x.astype(np.float64) @ cell.weight.asnumpy().T
    return y if cell.bias is None else y + cell.bias.asnumpy()


# Sharding -------------------------------------------------------------------------------------------------------


def layouts(operator):
    """Returns how an operator's inputs are sharded: for each, the number of parts along each axis."""
    found = []
    for layout in operator.attrs["in_layout"]:
        sizes = layout["device_matrix"]
        axes = [axis if isinstance(axis, tuple) else (axis,) for axis in layout["tensor_map"]]
        found.append(tuple(int(np.prod([1 if a == -1 else sizes[len(sizes) - 1 - a] for a in axis])) for axis in axes))
    return found


@contextlib.contextmanager
def eight_devices(monkeypatch, data=2, context=2, model=2):
    """Two data-parallel groups, two parts of the sequence, two of each weight, or as said, in name; yields a config."""
    from mindformers.parallel_core.training_graph import device_matrix

    config = transformer_config(
        data_parallel_size=data, context_parallel_size=context, tensor_model_parallel_size=model, num_attention_heads=2
    )
    for name in ("_layout", "_layout_type", "_config"):
        monkeypatch.setattr(device_matrix.layout, name, None)
    device_matrix.layout.init_layout(config)
    monkeypatch.setattr(layers(), "ModelCommProcessGroups", FakeGroups)
    monkeypatch.setattr(layers(), "get_rank", lambda: 0)
    monkeypatch.setattr(layers(), "get_tp_group_name", lambda rank, parts: "hccl_world_group")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, global_rank=0)
    try:
        yield config
    finally:
        ms.reset_auto_parallel_context()


class FakeGroups:
    """Stands for the process groups that MindFormers makes in a run."""

    @classmethod
    def use_parallel_state_groups(cls, required_groups):
        groups = cls()
        groups.tp = type("Group", (), {"group": "hccl_world_group"})
        return groups
