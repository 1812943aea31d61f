"""Sharded runs on disk: strategy files as MindSpore's own messages, and a checkpoint for each rank."""

import dataclasses
import os

import numpy as np

RANK, HIDDEN, VOCABULARY = 8, 16, 32
ALPHA = 12.0


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Data-, model- and pipeline-parallel sizes, and into how many parts the optimizer's slices are cut."""

    dp: int = 1
    mp: int = 1
    pp: int = 1
    opt: int = 0

    @property
    def devices(self):
        return self.dp * self.mp

    @property
    def ranks(self):
        return self.devices * self.pp

    def __str__(self):
        return f"dp{self.dp} mp{self.mp} pp{self.pp} opt{self.opt}"


SCHEMES = (
    Scheme(mp=2),
    Scheme(dp=2, opt=2),
    Scheme(pp=2),
    Scheme(dp=2, mp=2, opt=2),
    Scheme(mp=2, pp=2),
    Scheme(dp=2, mp=2, pp=2, opt=2),
    Scheme(dp=4, mp=2, opt=2),
    Scheme(dp=4, mp=2, opt=4),
    Scheme(mp=8),
)


def cell(layer, name, part):
    return f"model.layers.{layer}.attention.{name}.mindpet_delta_lora_{part}"


def tensors(scheme, seed=0, dtype=np.float32):
    """Returns the adapter's whole tensors: two layers, wq split by rows, wo by columns, and lm_head trained in full."""
    rng = np.random.default_rng(seed)
    shapes = {"lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(2):
        for name in ("wq", "wo"):
            shapes[cell(layer, name, "a")] = (RANK, HIDDEN)
            shapes[cell(layer, name, "b")] = (HIDDEN + 8 * layer, RANK)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def stage_of(scheme, name):
    return scheme.pp - 1 if name.startswith("lm_head") or ".1." in name else 0


def layout(scheme, name):
    """Returns (dev_matrix, tensor_map, opt_shard_step, opt_shard_size) as a run of MindFormers' Linear has them."""
    rows = name.startswith("lm_head") or "wq" in name and name.endswith("_b")
    columns = "wo" in name and name.endswith("_a")
    tensor_map = [0 if rows else -1, 0 if columns else -1]
    cut = 0 in tensor_map and scheme.mp > 1
    return [scheme.dp, scheme.mp], tensor_map, (scheme.mp if cut else 1) if scheme.opt else 0, scheme.opt


def write_strategy(folder, scheme, names, wanted=None):
    """Writes one strategy file for each rank, as MindFormers does, with MindSpore's message. Returns the folder."""
    from mindspore.train import node_strategy_pb2 as messages

    os.makedirs(folder, exist_ok=True)
    for rank in range(scheme.ranks):
        stage = rank // scheme.devices
        strategy = messages.ParallelStrategyMap(current_stage=1)
        item = strategy.parallel_strategy_item.add(node_name="MatMul-1")
        item.parallel_strategys.stage = stage
        item.parallel_strategys.parallel_strategy.add(dim=[scheme.dp, scheme.mp])
        for name in names:
            if stage_of(scheme, name) != stage:
                continue
            dev_matrix, tensor_map, step, size = layout(scheme, name)
            parts = strategy.parallel_layout_item.add(param_name=name).parallel_layouts
            parts.dev_matrix.add(dim=dev_matrix)
            parts.tensor_map.add(dim=tensor_map)
            parts.param_split_shape.add()
            parts.indices_offset.add()
            parts.field, parts.opt_weight_shard_step, parts.opt_weight_shard_size = 0, step, size
        with open(os.path.join(folder, f"ckpt_strategy_rank_{rank}.ckpt"), "wb") as file:
            file.write(strategy.SerializeToString())
    return str(folder)


def slice_by_hand(scheme, name, array, rank):
    """Returns what a rank holds, from the sizes alone: neither mindlora nor MindSpore has a part in it."""
    local = rank % scheme.devices
    data, model = divmod(local, scheme.mp)
    _, tensor_map, _, opt = layout(scheme, name)
    for axis, mapped in enumerate(tensor_map):
        if mapped == 0:
            array = np.split(array, scheme.mp, axis)[model]
    if opt:
        # The ranks that hold the same slice are those of one model-parallel index, or all of them.
        order = data if 0 in tensor_map and scheme.mp > 1 else local
        array = np.split(array, opt)[order % opt]
    return array.copy()


def write_ranks(folder, scheme, whole, form="ckpt", at="1_4", kind="-trainable_params", more=None, steps=None):
    """Writes rank_N/llama_rank_N-trainable_params-1_4.ckpt for each rank with MindSpore. Returns the folder."""
    import mindspore as ms

    for rank in range(scheme.ranks):
        own = {name: array for name, array in whole.items() if stage_of(scheme, name) == rank // scheme.devices}
        data = [
            {"name": name, "data": ms.Tensor(slice_by_hand(scheme, name, array, rank))} for name, array in own.items()
        ]
        data += [{"name": name, "data": ms.Tensor(array)} for name, array in (more or {}).items()]
        os.makedirs(os.path.join(folder, f"rank_{rank}"), exist_ok=True)
        path = os.path.join(folder, f"rank_{rank}", f"llama_rank_{rank}{kind}-{at}.{form}")
        appended = {"epoch_num": 1, "step_num": steps[rank]} if steps else None
        ms.save_checkpoint(data, path, format=form, append_dict=appended)
    return str(folder)


def write_run(folder, scheme, **keys):
    """Writes strategy files and checkpoints of a run; returns (folder of the ranks, folder of strategies, tensors)."""
    whole = tensors(scheme)
    strategy = write_strategy(os.path.join(folder, "strategy"), scheme, whole)
    return write_ranks(os.path.join(folder, "checkpoint_trainable"), scheme, whole, **keys), strategy, whole
