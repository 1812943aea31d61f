"""Trains small Llamas whose head is divided between the two processes of a semi-automatic parallel run, or in one.

Started with a folder and the names of MODELS. Each is trained for some steps, and a rank writes its losses and weights
to NAME-RANK.npz there. One process trains in PyNative, which compiles nothing.
"""

import os
import sys

import mindspore as ms
import numpy as np
from mindformers.models.build_model import build_network
from mindformers.modules.transformer import TransformerOpParallelConfig
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.model import pet
from mindlora.training.model.loss_in_pieces import losses_of_head
from mindlora.training.model.network import with_loss
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.support import semi_automatic, tiny_runs

# A piece does not divide the tokens.
STEPS, ROWS, PIECE = 4, 4, 40
TRAINED = {"modules_to_save": ["lm_head"]}
# What of the model is divided, and keys of pet_config. Only one model has an adapter in front of its last cell too.
MODELS = {
    "a frozen head": ({"vocab_emb_dp": False}, {"target_modules": ".*wq|.*w2"}),
    "a head that trains": ({"vocab_emb_dp": False}, TRAINED),
    "LoRA on the head": ({"vocab_emb_dp": False}, {"target_modules": ".*w2|.*lm_head"}),
    "a whole head": ({"vocab_emb_dp": True}, {}),
    "a whole head that trains": ({"vocab_emb_dp": True}, TRAINED),
}


def llama(devices, divided, adapter):
    """Returns a tiny Llama with adapters, the same at each call, whose layers too are divided among devices."""
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    model = config.model.model_config
    model.update({**tiny_runs.MODEL, "pad_token_id": tiny_runs.PAD})
    model.parallel_config = TransformerOpParallelConfig(model_parallel=devices, **divided)
    settings = {"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ".*w2", **adapter}
    model.pet_config.update(settings)
    network = build_network(config.model)
    for number, parameter in enumerate(network.get_parameters()):
        if "norm" not in parameter.name and "Float" in str(parameter.dtype):
            values = np.random.default_rng(number).normal(size=parameter.shape, scale=0.2).astype(np.float32)
            parameter.set_data(Tensor(values, parameter.dtype))
    if devices > 1:
        # CPUs have no ReduceScatter, which the rows of a divided table need.
        with_loss(network).model.tok_embeddings.gather.shard(((1, 1), (1, 1)))
    return network


def batch(seed):
    """Returns rows that differ in how many labels count; the first and the last token of the vocabulary are labels."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(4, tiny_runs.VOCABULARY, (ROWS, tiny_runs.SEQUENCE + 1)).astype(np.int32)
    counted = rng.random(ids.shape) < np.linspace(0.2, 0.9, ROWS)[:, None]
    labels = np.where(counted, ids, tiny_runs.IGNORED).astype(np.int32)
    labels[1, -2:] = 0, tiny_runs.VOCABULARY - 1
    return Tensor(ids), Tensor(labels)


def train(network):
    """Returns the losses of the steps, and by name what they trained."""
    step = LoraTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.05), loss_in_pieces=PIECE)
    assert losses_of_head(step) is not None
    step.set_train()
    losses = [float(step(*batch(number))[0].asnumpy()) for number in range(STEPS)]
    return losses, {parameter.name: parameter.asnumpy() for parameter in network.trainable_params()}


# In the tests


def assert_same(alone, divided, name, begun=0):
    """Asserts that two ranks, from step ``begun`` on, have trained what one process has, by their files in two folders.

    Returns by name what was trained, of one process, and the names of what the ranks have parts of.
    """
    expected = np.load(alone / f"{name}-0.npz")
    ranks = [np.load(divided / f"{name}-{rank}.npz") for rank in range(2)]
    losses, trained = expected["losses"][begun:], {key: expected[key] for key in expected.files if key != "losses"}
    assert len(set(losses)) == len(losses) > 1
    for rank in ranks:
        assert rank.files == expected.files
        np.testing.assert_allclose(rank["losses"], losses, rtol=1e-6)
    for key, whole in trained.items():
        found = _joined([rank[key] for rank in ranks], whole)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6 * np.abs(whole).max(), err_msg=key)
    return trained, {key for key, whole in trained.items() if ranks[0][key].shape != whole.shape}


def _joined(parts, whole):
    axis = next((axis for axis, size in enumerate(whole.shape) if parts[0].shape[axis] != size), None)
    if axis is None:
        np.testing.assert_array_equal(parts[0], parts[1])
        return parts[0]
    return np.concatenate(parts, axis)


# In a rank


def main(folder, *names):
    devices, rank = int(os.environ.get("MS_WORKER_NUM", "1")), 0
    if devices == 1:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    else:
        semi_automatic.start()
        assert get_group_size() == devices
        rank = get_rank()
        # MindSpore divides none of mindlora's operators for CPUs: MindFormers' own cells train.
        pet.use_cpu_cells = lambda network: None
    for name in names:
        losses, weights = train(llama(devices, *MODELS[name]))
        np.savez(os.path.join(folder, f"{name}-{rank}.npz"), losses=losses, **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
