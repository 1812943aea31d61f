"""One rank of the tests of sharded runs: a network that holds this rank's slices, trained by MindSpore's own loop.

Started by msrun with the folder to write to and the names of scenarios. MindSpore cuts no network on a CPU, so the
slices and the layouts that MindSpore would record are made here; all that LoraCheckpoint does with them is real.
"""

import os
import sys
import types

import numpy as np

RANKS, STEPS = 2, 3
RANK, IN, OUT, ALPHA = 4, 8, 6, 12.0
LOSSES = {0: [5, 5, 5], 1: [3, 1, 2]}
HELD_OUT = {0: {1: 9.0, 2: 1.0, 3: 1.0}, 1: {1: 0.25, 2: 0.75, 3: 0.5}}
CELLS = [f"model.layers.{layer}.attention.{name}" for layer in range(2) for name in ("wq", "wo")]


def name_of(cell, part):
    return f"{cell}.mindpet_delta_lora_{part.lower()}"


def whole_tensors(seed=0):
    """Returns the adapter's tensors; some elements are -0.0, which a sum of floats would lose."""
    rng = np.random.default_rng(seed)
    shapes = {name_of(cell, part): shape for cell in CELLS for part, shape in (("A", (RANK, IN)), ("B", (OUT, RANK)))}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = rng.normal(size=(10, IN)).astype(np.float32)
    for array in tensors.values():
        array.reshape(-1)[::5] = -0.0
        # Two numbers of 16 bits that together are -0.0 in 32.
        array.reshape(-1)[2:4] = 0.0, -0.0
    return tensors


def axis_of(scenario, name):
    """Returns the axis along which two ranks cut a tensor, or None."""
    if scenario == "optimizer":
        return 0
    if scenario == "stages":
        return None
    return 1 if name.endswith("wo.mindpet_delta_lora_a") else 0 if "wq" in name and name.endswith("_b") else None


def stage_of(name):
    return 0 if ".0." in name else 1


def layout(scenario, name, shape, group):
    """Returns what MindSpore records: device matrix, tensor map, slice, field, evenness, optimizer's group, whole."""
    axis = axis_of(scenario, name)
    if scenario == "optimizer":
        return [2, 1], [-1, -1], shape, 0, True, group, []
    if scenario == "stages":
        return [1], [-1, -1], shape, 0, True, "", []
    return [1, 2], [0 if axis == own else -1 for own in range(2)], shape, 0, True, "", []


def slice_of(scenario, name, array, rank):
    axis = axis_of(scenario, name)
    return array if axis is None else np.split(array, RANKS, axis)[rank]


def build(scenario, rank):
    """Returns a train step around a network with this rank's slices."""
    import mindspore as ms
    from mindspore import nn

    from mindlora import LoraConfig, apply_lora, freeze_base
    from mindlora.network.tree import mark_saved_module
    from tests.support.scripted_runs import ScriptedStep

    class Attention(nn.Cell):
        def __init__(self):
            super().__init__()
            self.wq, self.wo = nn.Dense(IN, OUT), nn.Dense(IN, OUT)

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

    class Layers(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([Layer(), Layer()])

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.model, self.lm_head = Layers(), nn.Dense(IN, 10, has_bias=False)
            self.config = types.SimpleNamespace()

    dtype = "bfloat16" if scenario == "summed" else "float32"
    model = Model()
    settings = {"target_modules": ".*wq|.*wo", "param_init_type": dtype}
    apply_lora(model, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, **settings))
    freeze_base(model)
    mark_saved_module(model.lm_head.weight)
    step, group, layouts = ScriptedStep(model), "hccl_world_group", {}
    parameters = {p.name: p for p in model.get_parameters()}
    for name, array in whole_tensors(seed=7 if scenario == "start" else 0).items():
        own = np.ascontiguousarray(slice_of(scenario, name, array, rank))
        if scenario != "stages" or stage_of(name) == rank:
            parameters[name].set_data(ms.Tensor(own, parameters[name].dtype), slice_shape=True)
            layouts[name] = layout(scenario, name, list(own.shape), group)
    step.parameter_layout_dict = {} if scenario == "unrecorded" else layouts
    return step


def run(scenario, folder, rank):
    import mindspore as ms
    from mindspore import ops

    from mindlora.core.errors import BackendError
    from mindlora.training.callbacks.registry import AdapterSlices, LoraCheckpoint
    from mindlora.training.resume import collectives, sharded_adapter
    from tests.support.scripted_runs import Report, StopAt

    ms.set_auto_parallel_context(pipeline_stages=2 if scenario == "stages" else 1)
    step = build(scenario, rank)
    sharded_adapter._GATHERED_WHOLES = 0 if scenario == "summed" else 4
    real = collectives._run
    if scenario == "forbidden":

        def refuse(name, operator, content):
            raise BackendError(f"{name} of {content.dtype} cannot run on this device or in this mode: none")

        collectives._run = refuse
    saved = os.path.join(folder, scenario, f"of_rank_{rank}" if scenario not in ("forbidden", "unrecorded") else "all")
    settings = {"save_steps": 2, "keep_last": 1 if scenario == "unrecorded" else 3}
    if scenario == "optimizer":
        settings = {"save_steps": 3, "best_metric": "held_out_loss"}

    class Together(ms.Callback):
        """Keeps the ranks in step, as the gradients of a real train step do."""

        def on_train_step_begin(self, run_context):
            ops.AllReduce()(ms.Tensor([1.0])).asnumpy()

    callbacks = [Together(), LoraCheckpoint(directory=saved, **settings), StopAt(STEPS)]
    if scenario == "optimizer":
        callbacks.insert(0, Report("held_out_loss", HELD_OUT[rank]))
    if scenario == "start":
        callbacks.insert(0, AdapterSlices(os.path.join(folder, "scattered")))
    dataset = ms.dataset.NumpySlicesDataset(np.asarray(LOSSES[rank], np.float32), shuffle=False).batch(1)
    ms.Model(step).train(1, dataset, callbacks, dataset_sink_mode=False)
    collectives._run = real
    print("finished", scenario, flush=True)


def main():
    import mindspore as ms
    from mindspore.communication import get_rank, init

    ms.set_context(device_target="CPU", mode=1)
    init()
    os.environ.setdefault("LOG_MF_PATH", os.path.join(sys.argv[1], "log_mf"))
    for scenario in sys.argv[2:]:
        run(scenario, sys.argv[1], get_rank())


if __name__ == "__main__":
    main()
