"""What a run on MindSpore's Ascend backend reports: operators on the CPU, memory, launches."""

from tests.support.ascend_backend import run_program

BEGIN = """
import numpy as np, mindspore as ms
from mindspore import Tensor, nn, ops
ms.set_context(mode=0, jit_config={"jit_level": "O0"})
x = Tensor(np.arange(9).reshape(3, 3).astype(np.float32))
class Net(nn.Cell):
"""
LEFT_ON_CPU = (
    BEGIN
    + """
    def __init__(self):
        super().__init__()
        self.add = ops.Add().set_device("CPU")
    def construct(self, a):
        print("a", a)
        return self.add(ops.matmul(a, a), a)
print(Net()(x).shape)
"""
)
PRODUCT = (
    BEGIN
    + """
    def construct(self, a):
        return ops.matmul(a, a) + a
y = Net()(x).asnumpy()
print("right" if (y == x.asnumpy() @ x.asnumpy() + x.asnumpy()).all() else "wrong", abs(y).max() > 0)
"""
)


def test_operators_that_are_left_on_the_cpu_are_named(tmp_path):
    run = run_program(LEFT_ON_CPU, folder=tmp_path)
    assert run.returncode == 0, run.output[-2000:]
    assert run.on_cpu == ("Add",)


def test_a_dry_run_computes_nothing_and_counts_memory(tmp_path):
    run = run_program(PRODUCT, folder=tmp_path)
    assert run.returncode == 0 and "wrong False" in run.output, run.output[-2000:]
    assert run.peak_bytes > 0 and run.on_cpu == () and run.launches == []


def test_launched_operators_compute(tmp_path):
    run = run_program(PRODUCT, folder=tmp_path, launches=True)
    assert run.returncode == 0 and "right True" in run.output, run.output[-2000:]
    assert [(launch.name, launch.computed) for launch in run.launches] == [("aclnnMatmul", True), ("aclnnAdd", True)]
    assert run.launches[0].tensors == ("0[3,3]",) * 3


def test_an_error_of_the_program_is_its_exit_code_and_output(tmp_path):
    run = run_program("raise SystemExit('this is why')", folder=tmp_path)
    assert (run.returncode, "this is why" in run.output) == (1, True)
