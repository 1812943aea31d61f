"""Stand-ins for the kernels that MindFormers' PyNative models and optimizer need and a CPU lacks, in plain operators.

``install()`` puts them into mindspore.mint, mindspore.ops and Tensor, for the rest of the process: MindFormers takes
them from there while it is imported and while it builds a model. They are for tests in one process on a CPU: they prove
neither an NPU's kernels nor sharding. one_device/hyper_parallel stands in for the package that shards.
"""

import os
import pickle
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import GlobalComm, get_rank, init

ONE_DEVICE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "one_device")


# What has no gradient is computed in NumPy, whose results have the same values on every machine.


def arange(start=0, end=None, step=1, *, dtype=None):
    values = np.arange(start, end, step) if end is not None else np.arange(0, start, step)
    return Tensor(values, dtype or (ms.int64 if values.dtype.kind == "i" else ms.float32))


def full(size, fill_value, *, dtype=None):
    return Tensor(np.full(size, fill_value), dtype or ms.float32)


def zeros_like(input, *, dtype=None):
    return mint.zeros(input.shape, dtype=dtype or input.dtype)


def ones_like(input, *, dtype=None):
    return mint.ones(input.shape, dtype=dtype or input.dtype)


def tril(input, diagonal=0):
    return Tensor(np.tril(input.asnumpy(), diagonal), input.dtype)


def histc(input, bins=100, min=0, max=0):
    counts, _ = np.histogram(input.asnumpy(), bins, (min, max))
    return Tensor(counts, input.dtype)


def cumsum(input, dim, dtype=None):
    return Tensor(np.cumsum(input.asnumpy(), dim), dtype or input.dtype)


# The others are differentiated.

_split = mint.split


def outer(input, vec2):
    return mint.mul(mint.unsqueeze(input, 1), mint.unsqueeze(vec2, 0))


def stack(tensors, dim=0):
    return mint.cat([mint.unsqueeze(tensor, dim) for tensor in tensors], dim)


def split(tensor, split_size_or_sections, dim=0):
    # Of views, backward() of MindSpore 2.10 takes wrong gradients on a CPU where what follows hands it views too.
    return tuple(piece * 1 for piece in _split(tensor, split_size_or_sections, dim))


def index_select(input, dim, index):
    return ops.gather(input, index, dim)


def scatter_add(input, dim, index, src):
    return ops.tensor_scatter_elements(input, index, src, dim, "add")


def addcmul(input, tensor1, tensor2, *, value=1):
    return input + value * tensor1 * tensor2


def topk(input, k, dim=-1, largest=True, sorted=True):
    order = np.argsort(-input.asnumpy(), dim, kind="stable").take(range(k), dim)
    indices = Tensor(order, ms.int64)
    return mint.gather(input, dim, indices), indices


def rms_norm(x, gamma, epsilon=1e-6):
    factor = mint.rsqrt(mint.mean(mint.square(x), -1, True) + epsilon)
    return x * factor * gamma, factor


def moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    order = np.argsort(indices.asnumpy().reshape(-1), kind="stable")
    permuted = ops.gather(tokens, Tensor(order // indices.shape[1], ms.int32), 0)
    return permuted, Tensor(np.argsort(order), ms.int32)


def moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    rows = ops.gather(permuted_tokens, sorted_indices, 0).reshape((*probs.shape, -1))
    return mint.sum(rows * mint.unsqueeze(probs, -1), 1)


class GroupedMatmul:
    """x_e W_e for the rows x_e of each group; the group list holds where each group ends."""

    def __init__(self, split_item, group_type):
        assert (split_item, group_type) == (3, 0)

    def __call__(self, x, weight, *arguments):
        begin, products = 0, []
        for expert, end in enumerate(arguments[-1].asnumpy().tolist()):
            if end > begin:
                products.append(mint.matmul(x[0][begin:end], weight[0][expert]))
            begin = end
        return [mint.cat(products, 0)]


class FlashAttentionScore:
    """softmax(scale q k^T, masked where the mask is not 0) v, computed in float32; input_layout BNSD and TND alone.

    With TND, tokens see those before them in the same sequence, and sequences end at actual_seq_qlen.
    """

    def __init__(self, head_num, scale_value=1.0, input_layout="BNSD", **_):
        assert input_layout in ("BNSD", "TND"), input_layout
        self.scale = scale_value
        self.in_one_row = input_layout == "TND"

    def __call__(self, query, key, value, attn_mask, actual_seq_qlen=None, **_):
        if not self.in_one_row:
            return self.attend(query, key, value, attn_mask)
        places = np.arange(query.shape[0])
        sequence = np.searchsorted(actual_seq_qlen.asnumpy(), places, side="right")
        hidden = (sequence[:, None] != sequence) | (places[:, None] < places)
        heads_first = (mint.unsqueeze(mint.transpose(tensor, 0, 1), 0) for tensor in (query, key, value))
        *others, output = self.attend(*heads_first, Tensor(hidden[None, None]))
        return *others, mint.transpose(output[0], 0, 1)

    def attend(self, query, key, value, attn_mask):
        dtype, times = query.dtype, query.shape[1] // key.shape[1]
        query, key, value = (ops.cast(tensor, ms.float32) for tensor in (query, key, value))
        key, value = (ops.repeat_elements(tensor, times, 1) for tensor in (key, value))
        scores = mint.matmul(query, mint.transpose(key, 2, 3)) * self.scale
        scores = scores + ops.cast(attn_mask, ms.float32) * -1e9
        output = mint.matmul(mint.nn.functional.softmax(scores, dim=-1), value)
        return None, None, None, ops.cast(output, dtype)


# Methods of Tensor that fill it in place.


def zero_(self):
    return self.copy_(mint.zeros(self.shape, dtype=self.dtype))


def fill_(self, value):
    return self.copy_(full(self.shape, value, dtype=self.dtype))


def normal_(self, mean=0, std=1, *, generator=None):
    return self.copy_(Tensor(np.random.normal(mean, std, self.shape), self.dtype))


def mul_(self, other):
    # MindSpore's own leaves the tensor as it is on a CPU, and so does copy_ where it is a transposed view.
    self.assign_value(self * other)
    return self


def scatter_(self, dim, index, src):
    values = self.asnumpy().copy()
    np.put_along_axis(values, index.asnumpy(), src, dim)
    return self.copy_(Tensor(values, self.dtype))


MINT = (
    arange,
    full,
    zeros_like,
    ones_like,
    tril,
    histc,
    cumsum,
    outer,
    stack,
    split,
    index_select,
    scatter_add,
    addcmul,
    topk,
)
OPS = (rms_norm, moe_token_permute, moe_token_unpermute)
IN_PLACE = (zero_, fill_, normal_, mul_, scatter_)


def init_process_group(*_, **__):
    """Connects the processes, as mint's function of this name does for HCCL alone, in the first run of a process."""
    if not GlobalComm.INITED:
        init()


def destroy_process_group(*_, **__):
    """Leaves the processes connected: a CPU's cannot connect again for the next run."""


def gather_object(obj, object_gather_list=None, dst=0, group=None):
    """Gives the objects of all ranks to one of them, as mint's function of this name does for HCCL alone."""
    from mindlora.training.resume.collectives import share

    texts = share(pickle.dumps(obj))
    if get_rank() == dst:
        object_gather_list[:] = map(pickle.loads, texts)


def on_cpu(to_empty):
    """The method that materializes a cell, on the CPU: MindFormers builds models without values, for an NPU."""

    def to_empty_on_cpu(cell, *, device=None, recurse=True):
        return to_empty(cell, device="CPU", recurse=recurse)

    return to_empty_on_cpu


def install() -> None:
    """Sets up this process for a run, with the operators replaced."""
    replace_operators()
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    # Else an error of a kernel comes late, in whatever runs then.
    ms.runtime.launch_blocking()


def replace_operators() -> None:
    """Replaces the operators, and makes ``import hyper_parallel`` find its stand-in; before MindFormers is imported."""
    if ONE_DEVICE not in sys.path:
        sys.path.insert(1, ONE_DEVICE)
    for owner, functions in ((mint, MINT), (ops, OPS), (Tensor, IN_PLACE)):
        for function in functions:
            setattr(owner, function.__name__, function)
    ops.operations.nn_ops.FlashAttentionScore = FlashAttentionScore
    ops.auto_generate.GroupedMatmul = GroupedMatmul
    mint.distributed.init_process_group = init_process_group
    mint.distributed.destroy_process_group = destroy_process_group
    mint.distributed.gather_object = gather_object
    # MindSpore before 2.10 has no such method, and tests that are skipped there import this module.
    nn.Cell.to_empty = on_cpu(nn.Cell.to_empty)
