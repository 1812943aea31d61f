"""Mistakes that the backend must refuse: each was made once, and no test on a CPU saw it."""

import pytest
import yaml

from tests.support.ascend_backend import run_program
from tests.support.ascend_backend.small_runs import QWEN3, Run, small_yaml

LAUNCH = """
import sys
import mindlora.plugin.launcher as launcher
sys.exit(launcher.main())
"""
# MindFormers keeps the model behind another name in the semi-automatic parallel modes.
DROPPED_BACKBONE = """
from mindlora.plugin.graph import network
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
    "a dropped backbone": (DROPPED_BACKBONE, Run(ranks=8), "contains no MindFormers model"),
    "a dropout sharded by a Layout": (DROPOUT_BY_LAYOUT, Run(QWEN3, ranks=8), "layout"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_run_on_several_devices_ends_it(tmp_path, mistake):
    mutation, run, message = MISTAKES[mistake]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_yaml(run, tmp_path)), encoding="utf-8")
    finished = run_program(mutation + LAUNCH, "--config", "run.yaml", folder=tmp_path, ranks=run.ranks)
    assert finished.returncode != 0
    assert message in finished.output, finished.output[-3000:]


# The arguments of the kernel in another order than its host side has them.
WRONG_ORDER = """
import numpy as np, mindspore as ms
from mindspore import Tensor, nn
ms.set_context(mode=0, jit_config={"jit_level": "O0"})
from mindlora.ops.ascend import AscendKernel
from mindlora.ops.operator_cell import LIBRARY
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.kernel = AscendKernel(KERNEL, LIBRARY, False)
    def construct(self, *inputs):
        return self.kernel(*inputs)
rng = np.random.default_rng(0)
y0, x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 48), (2, 64), (8, 64), (48, 8)))
y = Net()(*map(Tensor, (y0, x, *PAIR, np.float32(2)))).asnumpy()
print("right" if np.allclose(y, y0 + 2 * (x @ a.T) @ b.T, atol=1e-3) else "wrong")
"""


@pytest.mark.parametrize(
    "kernel, pair, right",
    [("LoraDelta", "(a, b)", True), ("LoraDelt", "(a, b)", False), ("LoraDelta", "(b, a)", False)],
)
def test_a_kernel_of_another_name_or_with_other_arguments_is_not_launched(tmp_path, kernel, pair, right):
    program = WRONG_ORDER.replace("KERNEL", repr(kernel)).replace("PAIR", pair)
    run = run_program(program, folder=tmp_path, launches=True)
    assert ("right" in run.output, run.returncode == 0) == (right, right), run.output[-2000:]
