"""Mistakes that the backend must refuse: each was made once, and no test on a CPU saw it."""

import pytest
import yaml

from tests.support.ascend_backend import on_request, run_program
from tests.support.ascend_backend.small_runs import QWEN3, Row, small_yaml

LAUNCH = """
import sys
import mindlora.training.launch.launcher as launcher
sys.exit(launcher.main())
"""
# MindFormers keeps the model behind another name in the semi-automatic parallel modes.
DROPPED_BACKBONE = """
from mindlora.training.model import network
network._WRAPPED = ("network",)
"""
# Dropout has two outputs, and MindSpore gives a Layout to one.
DROPOUT_BY_LAYOUT = """
from mindspore import Layout
from mindspore.ops import operations
shard = operations.Dropout.shard
layout = Layout((8, 1, 1), ("a", "b", "c"))
operations.Dropout.shard = lambda self, strategy: shard(self, (layout("b", "a", "c"),))
"""
MISTAKES = {
    "a dropped backbone": (DROPPED_BACKBONE, Row(ranks=8), "contains no MindFormers model"),
    "a dropout sharded by a Layout": (DROPOUT_BY_LAYOUT, Row(QWEN3, ranks=8), "layout"),
}


@on_request
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_run_on_several_devices_ends_it(tmp_path, mistake):
    mutation, row, message = MISTAKES[mistake]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_yaml(row, tmp_path)), encoding="utf-8")
    finished = run_program(mutation + LAUNCH, "--config", "run.yaml", folder=tmp_path, ranks=row.ranks)
    assert finished.returncode != 0
    assert message in finished.output, finished.output[-3000:]


# One kernel in a graph, after a statement that may spoil what MindSpore is told of it.
KERNEL = """
import numpy as np, mindspore as ms
from mindspore import Tensor, nn
ms.set_context(mode=0, jit_config={"jit_level": "O0"})
from mindlora.ops.ascend import SIGNATURES, AscendKernel
from mindlora.ops.operator_cell import LIBRARY
STATEMENT
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.kernel = AscendKernel("LoraDelta", LIBRARY, False)
    def construct(self, *inputs):
        return self.kernel(*inputs)
rng = np.random.default_rng(0)
y0, x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 48), (2, 64), (8, 64), (48, 8)))
y = Net()(*map(Tensor, (y0, x, *PAIR, np.float32(2)))).asnumpy()
print("right" if np.allclose(y, y0 + 2 * (x @ a.T) @ b.T, atol=1e-3) else "wrong")
"""


def call_kernel(folder, statement="", pair="(a, b)"):
    """Runs the kernel in a process of its own."""
    program = KERNEL.replace("STATEMENT", statement).replace("PAIR", pair)
    return run_program(program, folder=folder, launches=True)


def test_a_kernel_that_is_called_as_it_is_registered_computes(tmp_path):
    run = call_kernel(tmp_path)
    assert run.returncode == 0 and "right" in run.output.splitlines(), run.output[-2000:]
    assert [launch.name for launch in run.launches] == ["LoraDelta"]


@pytest.mark.parametrize(
    "mistake, message",
    [
        ({"statement": "SIGNATURES['LoraDelta'].popitem()"}, "input size: 7 is not equal to aclnn api input size 8"),
        ({"pair": "(b, a)"}, "lora_delta: K is 64 in one input and 8 in another"),
    ],
    ids=["an input fewer is registered", "A and B are exchanged"],
)
def test_a_kernel_that_is_not_called_as_its_package_has_it_is_not_launched(tmp_path, mistake, message):
    run = call_kernel(tmp_path, **mistake)
    assert run.returncode != 0 and message in run.output, run.output[-2000:]
    assert run.launches == []
