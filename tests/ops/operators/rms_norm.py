"""rms_norm and the kernels of its gradients: what is tested of them."""

import numpy as np

from mindlora.ops.rms_norm import RmsNorm
from tests.ops.contract import Operator, normals

EPS = 1e-2  # large enough to show where it is left out


def inputs(dtype, *shape):
    return {**normals(dtype, x=shape, weight=shape[-1:]), "eps": (np.float32([EPS]), "float32")}


def inputs_of_gradient(dtype, *shape):
    return {**normals(dtype, dy=shape), **inputs(dtype, *shape)}


SIZES = ((0, 16), (1, 1), (3, 40), (2, 3, 67), (300, 512))
RMS_NORM = Operator(
    name="rms_norm",
    inputs=inputs,
    terms=lambda *shape: 8,
    function="RmsNorm",
    sizes=SIZES,
    threaded=(300, 512),
    rows=("x",),
    cell=RmsNorm,
    cell_sizes=((1, 5, 48), (7, 1, 48), (1, 33, 48)),
    gradients=("x", "weight"),
    gradient_sizes=((3, 7), (2, 5, 24)),
    gradient_terms=80,
    refused_size=(4, 16),
    alike=(("x", "weight"),),
    refused_shapes=(({"weight": (15,)}, "H is 16 in one input and 15 in another."),),
    refused_by_kernel=(("x", "int32", "weight is float32: it must be int32."),),
)
GRADIENT = Operator(
    name="rms_norm_grad",
    op="rms_norm",
    inputs=inputs_of_gradient,
    expected=lambda reference, *arrays: reference.rms_norm_grad(*arrays)[0],
    terms=lambda *shape: 8,
    function="RmsNormGrad",
    sizes=SIZES,
    threaded=(300, 512),
    refused_size=(4, 16),
    refused_shapes=(({"dy": (3, 16)}, "the number of rows is 3 in one input and 4 in another."),),
)
WEIGHT_GRADIENT = Operator(
    name="rms_norm_weight_grad",
    op="rms_norm",
    inputs=inputs_of_gradient,
    expected=lambda reference, *arrays: reference.rms_norm_grad(*arrays)[1],
    terms=lambda *shape: 8 * shape[0],
    function="RmsNormWeightGrad",
    sizes=SIZES,
    threaded=(300, 512),
    refused_size=(4, 16),
    refused_by_kernel=(("x", "float16", "x is float16: it must be float32."),),
)
FORMS = (RMS_NORM, GRADIENT, WEIGHT_GRADIENT)
