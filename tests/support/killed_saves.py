"""Saves two adapters in turn from processes that are killed; after each kill one of the two must be there, complete.

    python killed_saves.py FOLDER {peft,ckpt,fallback} KILLS

fallback is peft on a file system that cannot exchange two folders in one step. Every tenth writer starts with nothing
at the path. Prints how many kills left a half-written adapter beside it.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora, save_lora
from mindlora.core import atomic
from mindlora.files.adapters.dialects import peft

RANK = 4


def network(version):
    """Returns a network whose adapter is made of one number: it is lora_alpha and every element of A and B."""
    cells = nn.SequentialCell([nn.Dense(64, 64) for _ in range(4)])
    apply_lora(cells, LoraConfig(lora_rank=RANK, lora_alpha=version, target_modules="all-linear"))
    for cell in cells:
        for parameter in cell.lora_parameters():
            parameter.set_data(Tensor(np.full(parameter.shape, version, np.float32)))
    return cells


def read(path, form):
    """Returns the versions of the tensors and of the description of the adapter at ``path``, or None."""
    if form == "fallback":
        atomic.finish_interrupted_swap(path)
    if not os.path.lexists(path):
        return None
    if form == "ckpt":
        content = ms.load_checkpoint(path)
        (alpha,) = set(json.loads(str(content.pop("mindlora")))["alphas"].values())
        content.pop("mindlora_begin")
        tensors = [tensor.asnumpy() for tensor in content.values()]
    else:
        assert sorted(os.listdir(path)) == [peft.CONFIG_FILE, peft.WEIGHTS_FILE]
        tensors = list(load_file(os.path.join(path, peft.WEIGHTS_FILE)).values())
        with open(os.path.join(path, peft.CONFIG_FILE), encoding="utf-8") as file:
            alpha = json.load(file)["lora_alpha"]
    assert len(tensors) == 8 and all(tensor.size == 64 * RANK for tensor in tensors)
    return {float(value) for tensor in tensors for value in np.unique(tensor)} | {float(alpha)}


def main(folder, form, kills):
    if form == "fallback":

        def unsupported(first, second):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        atomic._exchange = unsupported
    file_format = "ckpt" if form == "ckpt" else "peft"
    path = os.path.join(folder, "adapter.ckpt" if form == "ckpt" else "adapter")
    networks = [network(version) for version in (1, 2)]
    begin = time.perf_counter()
    save_lora(networks[0], path, file_format)
    one_save = time.perf_counter() - begin
    seen = set()
    for kill in range(kills):
        if kill % 10 == 9:
            os.unlink(path) if form == "ckpt" else shutil.rmtree(path)
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begins, b"x")
            turn = kill
            while True:
                save_lora(networks[turn % 2], path, file_format)
                turn += 1
        os.read(begun, 1)
        time.sleep(random.uniform(0, 4 * one_save))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the writer ended before it was killed"
        os.close(begun)
        os.close(begins)
        versions = read(path, form)
        if versions is None:
            assert kill % 10 == 9, "the adapter is gone"
            save_lora(networks[0], path, file_format)
        else:
            assert len(versions) == 1, f"half of one adapter and half of another: {versions}"
            seen |= versions
    assert seen == {1.0, 2.0}, f"only {seen} was ever seen"
    print(len([name for name in os.listdir(folder) if name.startswith(".adapter")]))


if __name__ == "__main__":
    random.seed(0)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
