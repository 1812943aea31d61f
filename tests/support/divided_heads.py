"""Trains small models whose head is divided between two processes of a semi-automatic parallel run, or in one process.

Started with a folder and the names of MODELS; each is trained for some steps, and rank 0 writes losses and weights to
NAME.npz there.
"""

import os
import sys

import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from tests.support import semi_automatic, tiny_runs

STEPS, ROWS, PIECE = 4, 4, 5


def llama(devices, data=1, **keys):
    """A tiny Llama with adapters, and what of it trains."""
    from mindformers.models.build_model import build_network
    from mindformers.tools.register import MindFormerConfig

    config = MindFormerConfig(tiny_runs.LORA_YAML)
    model = config.model.model_config
    model.update({**tiny_runs.MODEL, "pad_token_id": tiny_runs.PAD})
    pet = {name: keys.pop(name) for name in ("modules_to_save",) if name in keys}
    model.pet_config.update({"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ".*wq|.*w2", **pet})
    if devices > 1:
        from mindformers.modules.transformer import TransformerOpParallelConfig

        emb = keys.pop("vocab_emb_dp", False)
        model.parallel_config = TransformerOpParallelConfig(data_parallel=data, model_parallel=devices // data, vocab_emb_dp=emb)
    network = build_network(config.model)
    if devices > 1:
        # CPUs have no ReduceScatter, which the rows of a divided table need.
        next(c for _, c in network.cells_and_names() if type(c).__name__ == "LlamaEmbedding").gather.shard(((1, 1), (data, 1)))
    return filled(network)


def filled(network):
    for number, parameter in enumerate(network.get_parameters()):
        rng = np.random.default_rng(number)
        if "norm" not in parameter.name and "Float" in str(parameter.dtype):
            parameter.set_data(Tensor(rng.normal(size=parameter.shape, scale=0.2).astype(np.float32), parameter.dtype))
    return network


MODELS = {
    "frozen": lambda devices: llama(devices),
    "trained": lambda devices: llama(devices, modules_to_save=["lm_head"]),
    "whole": lambda devices: llama(devices, vocab_emb_dp=True),
    "data": lambda devices: llama(devices, data=devices),
}


def batch(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(4, tiny_runs.VOCABULARY, (ROWS, tiny_runs.SEQUENCE + 1)).astype(np.int32)
    labels = np.where(rng.random(ids.shape) < np.linspace(0.2, 0.9, ROWS)[:, None], ids, tiny_runs.IGNORED).astype(np.int32)
    labels[1, -1] = ids[1, -1] = tiny_runs.VOCABULARY - 1
    return Tensor(ids), Tensor(labels)


def train(network):
    from mindlora.training.step.train_step import LoraTrainOneStepCell

    optimizer = nn.SGD(network.trainable_params(), 0.05)
    step = LoraTrainOneStepCell(network, optimizer, loss_in_pieces=PIECE)
    step.set_train()
    losses = [float(step(*batch(number))[0].asnumpy()) for number in range(STEPS)]
    return losses, {p.name: p.asnumpy() for p in network.trainable_params()}


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    devices = int(os.environ.get("RANK_SIZE", "1"))
    if devices > 1:
        semi_automatic.start()
    from mindlora.training.launch import hooks  # noqa: F401
    from mindlora.training.model import pet as pm
    if devices > 1:
        # MindSpore divides none of mindlora's operators for CPUs.
        pm.use_cpu_cells = lambda network: None

    for name in names:
        losses, weights = train(MODELS[name](devices))
        rank = get_rank() if devices > 1 else 0
        print(name, losses, {n: w.shape for n, w in weights.items()}, flush=True)
        np.savez(os.path.join(folder, f"{name}-{rank}-{devices}.npz"), losses=losses, **weights)
