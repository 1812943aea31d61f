"""Tensor.backward() in PyNative, as hyper_parallel gives it to MindFormers, and the gradients that it leaves."""

import contextlib

from mindspore._c_expression import run_backward
from mindspore.nn.cell import _pynative_executor


@contextlib.contextmanager
def recorded():
    """Records what runs, for a backward."""
    _pynative_executor.set_grad_flag(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(False)


def backward_gradients(function, inputs, sensitivity):
    """Returns the gradients of a function of Parameters after backward(sensitivity), in NumPy; None where none is."""
    for parameter in inputs:
        parameter._grad = None
    with recorded():
        run_backward((function(*inputs),), (sensitivity,), False, False, ())
    return [None if parameter._grad is None else parameter._grad.float().asnumpy() for parameter in inputs]
