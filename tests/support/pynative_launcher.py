"""What MindFormers' run_mindformer.py --mode 1 does, on a CPU with the stand-ins of pynative_cpu.

It takes --config and --register_path. A YAML can name more callbacks: FillWeights, RecordLosses, RecordLogits,
AttendInFloat32, SendSignal, SpoilStep and LeaveOut.
"""

import argparse
import json
import os
import signal
import sys
import types

from tests.support import pynative_cpu


def register_callbacks():
    """Makes the callbacks known to MindFormers."""
    import numpy as np
    from mindformers.pynative.callback import TrainerCallback
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
    from mindformers.tools.utils import get_real_rank
    from mindspore import Tensor
    from mindspore.common import dtype as mstype

    from tests.support.mcore_networks import filled

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class FillWeights(TrainerCallback):
        """Begins with random weights, which depend on their names alone: A and B too, unless the base is asked for."""

        def __init__(self, base=False):
            self.base = base

        def on_train_begin(self, args, state, model=None, **kwargs):
            adapter = [parameter for parameter in model[0].get_parameters() if self.base and "lora" in parameter.name]
            before = [parameter.asnumpy().copy() for parameter in adapter]
            filled(model[0], seed=0)
            for parameter, values in zip(adapter, before):
                parameter.set_data(Tensor(values))

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class RecordLosses(TrainerCallback):
        """Writes the loss of each step, and all trainable values at the end, if asked for the frozen ones too.

        The name of the directory may have {rank} in it.
        """

        def __init__(self, directory, frozen=False):
            self.directory, self.frozen, self.losses = directory.format(rank=get_real_rank()), frozen, []

        def on_step_end(self, args, state, loss=None, **kwargs):
            self.losses.append(float(np.ravel(loss.asnumpy() if hasattr(loss, "asnumpy") else loss)[0]))

        def on_train_end(self, args, state, model=None, **kwargs):
            os.makedirs(self.directory, exist_ok=True)
            with open(os.path.join(self.directory, "losses.json"), "w", encoding="utf-8") as file:
                json.dump(self.losses, file)
            arrays = {parameter.name: parameter.asnumpy() for parameter in model[0].get_parameters()}
            trained = {parameter.name for parameter in model[0].trainable_params()}
            np.savez(os.path.join(self.directory, "trained.npz"), **{name: arrays[name] for name in trained})
            if self.frozen:
                frozen = {name: array for name, array in arrays.items() if name not in trained}
                np.savez(os.path.join(self.directory, "frozen.npz"), **frozen)

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class RecordLogits(TrainerCallback):
        """Writes the logits of the trained model for token ids, with attention in float32.

        MindFormers casts its inputs to float16 where it calls a fused kernel.
        """

        def __init__(self, ids, path):
            self.ids, self.path = ids, path

        def on_train_end(self, args, state, model=None, **kwargs):
            model[0].set_train(False)
            for _, cell in model[0].cells_and_names():
                if hasattr(cell, "core_attention"):
                    cell.use_flash_attention = False
                    # The stand-in repeats keys and values itself.
                    cell._repeat_kv = lambda tensor, times: tensor
            ids = Tensor(np.array(self.ids, np.int32))
            np.save(self.path, model[0](input_ids=ids, labels=ids).asnumpy())

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class AttendInFloat32(TrainerCallback):
        """Lets attention take float32, which MindFormers casts to float16 for a fused kernel, in this process."""

        def on_train_begin(self, args, state, **kwargs):
            from mindformers.pynative.transformers import attention

            names = {name: getattr(mstype, name) for name in ("float16", "float32", "bfloat16", "uint8")}
            attention.mstype = types.SimpleNamespace(**{**names, "float16": mstype.float32})

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class LeaveOut(TrainerCallback):
        """Makes the model compute without the adapter of one cell, which trains all the same."""

        def __init__(self, cell):
            self.cell = cell

        def on_train_begin(self, args, state, model=None, **kwargs):
            cell = dict(model[0].cells_and_names())[self.cell]
            cell.construct = cell.linear

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class SendSignal(TrainerCallback):
        """Sends SIGTERM to the process of a rank while a step is going on."""

        def __init__(self, step, rank=0):
            self.step, self.rank = step, rank

        def on_step_begin(self, args, state, **kwargs):
            if state.global_step + 1 == self.step and get_real_rank() == self.rank:
                os.kill(os.getpid(), signal.SIGTERM)

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class SpoilStep(TrainerCallback):
        """Makes the loss of some steps NaN, on one rank if one is named; writes whether they changed what trains."""

        def __init__(self, steps, path, rank=None):
            here = rank in (None, get_real_rank())
            self.steps, self.path, self.changed = steps if here else [], path.format(rank=get_real_rank()), []

        def on_step_begin(self, args, state, model=None, **kwargs):
            if state.global_step + 1 in self.steps:
                self.before = [parameter.asnumpy().copy() for parameter in model[0].trainable_params()]
                self.norm = next(p for p in model[0].get_parameters() if p.name.endswith("final_layernorm.weight"))
                self.value = self.norm.asnumpy().copy()
                self.norm.set_data(Tensor(self.value * np.nan))

        def on_step_end(self, args, state, model=None, **kwargs):
            if state.global_step in self.steps:
                self.norm.set_data(Tensor(self.value))
                after = [parameter.asnumpy() for parameter in model[0].trainable_params()]
                self.changed.append(not all(np.array_equal(a, b) for a, b in zip(self.before, after)))

        def on_train_end(self, args, state, **kwargs):
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump(self.changed, file)


def main(argv=None):
    """Trains as the YAML says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--register_path")
    args = parser.parse_args(argv)
    pynative_cpu.install()
    register_callbacks()
    if args.register_path:
        os.environ["REGISTER_PATH"] = args.register_path
        sys.path.append(args.register_path)
    from mindformers.pynative.trainer import Trainer

    Trainer(args.config).train()


if __name__ == "__main__":
    main()
