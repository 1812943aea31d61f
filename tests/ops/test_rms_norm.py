"""rms_norm and its gradients against the reference: dtypes, instruction sets, modes, dynamic shapes, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.core.errors import BackendError
from mindlora.ops.rms_norm import RmsNorm
from tests.support.finite_differences import finite_differences
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values

EPS = 1e-2  # large enough to show where it is left out


def case(shape, dtype="float32"):
    """x and weight."""
    return normal(*shape, seed=1, dtype=dtype), normal(shape[-1], seed=2, dtype=dtype)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm, self.eps = RmsNorm(), Tensor([EPS], ms.float32)

    def construct(self, x, weight):
        return self.norm(x, weight, self.eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference(isa, reference, dtype):
    for shape in ((0, 16), (1, 1), (3, 40), (2, 3, 67), (300, 512)):
        x, weight = case(shape, dtype)
        inputs = [(x, dtype), (weight, dtype), (np.float32([EPS]), "float32")]
        y = call("RmsNorm", inputs, x.shape, dtype)
        assert_near(y, reference.rms_norm(x, weight, EPS), dtype, 8)


def test_a_row_has_the_same_bits_among_any_others(isa):
    x, weight = case((70, 130))
    together, alone = (
        call("RmsNorm", [(rows, "float32"), (weight, "float32"), (np.float32([EPS]), "float32")], rows.shape, "float32")
        for rows in (x, x[41:42])
    )
    assert together[41].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_of_the_gradients_are_the_reference(isa, reference, dtype):
    for shape in ((0, 16), (1, 1), (3, 40), (2, 3, 67), (300, 512)):
        x, weight = case(shape, dtype)
        dy = normal(*shape, seed=3, dtype=dtype)
        inputs = [(dy, dtype), (x, dtype), (weight, dtype), (np.float32([EPS]), "float32")]
        dx, dweight = reference.rms_norm_grad(dy, x, weight, EPS)
        assert_near(call("RmsNormGrad", inputs, x.shape, dtype), dx, dtype, 8)
        assert_near(call("RmsNormWeightGrad", inputs, weight.shape, dtype), dweight, dtype, 8 * len(x))


def test_the_reference_of_the_gradients_is_that_of_finite_differences(reference):
    x, weight = (array.astype(np.float64) for array in case((3, 7)))
    dy = normal(3, 7, seed=3)
    for gradient, array in zip(reference.rms_norm_grad(dy, x, weight, EPS), (x, weight)):
        expected = finite_differences(lambda: (reference.rms_norm(x, weight, EPS) * dy).sum(), array)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


def test_the_cell_gives_both_gradients(mode, reference):
    x, weight = case((2, 5, 24))
    dy = normal(2, 5, 24, seed=3)
    gradients = ops.GradOperation(get_all=True, sens_param=True)(Net())(Tensor(x), Tensor(weight), Tensor(dy))
    for gradient, expected in zip(gradients, reference.rms_norm_grad(dy, x, weight, EPS)):
        assert_near(values(gradient), expected, "float32", 80)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cell_takes_rows_along_any_axes(mode, reference, dtype):
    x, weight = case((2, 5, 24), dtype)
    y = Net()(tensor(x, dtype), tensor(weight, dtype))
    assert y.dtype == getattr(ms, dtype)
    assert_near(values(y), reference.rms_norm(x, weight, EPS), dtype, 8)


def test_dynamic_shapes(mode, reference):
    net = Net()
    net.set_inputs(Tensor(shape=[None, None, 48], dtype=ms.float32), Tensor(shape=[48], dtype=ms.float32))
    for rows in ((1, 5), (7, 1), (1, 33)):
        x, weight = case((*rows, 48))
        assert_near(values(net(Tensor(x), Tensor(weight))), reference.rms_norm(x, weight, EPS), "float32", 8)


def test_a_weight_of_another_size_is_refused(library, graph_mode):
    with refused_by_kernel("mindlora rms_norm: H is 16 in one input and 15 in another[.]"):
        Net()(Tensor(np.zeros((4, 16), np.float32)), Tensor(np.zeros(15, np.float32))).asnumpy()


def test_another_dtype_of_the_weight_is_refused(library, mode):
    with pytest.raises(BackendError) as error:
        Net()(Tensor(np.zeros((4, 16), np.float32)), Tensor(np.zeros(16, np.float16)))
    assert str(error.value) == "rms_norm (cpu): weight is Float16 and x is Float32: cast them to one dtype."
