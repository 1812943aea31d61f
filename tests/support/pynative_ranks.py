"""Writes the folder of a step of eight ranks; MindFormers' own code says what each holds, and writes metadata.json.

A program, since it replaces operators (pynative_cpu): python -m tests.support.pynative_ranks FOLDER writes the folder,
and FOLDER.npz with the whole tensors.
"""

import os
import sys

import numpy as np

from mindlora.core.formats.safetensors_file import write_arrays
from tests.support import pynative_cpu
from tests.support.step_folders import rank_file

RANKS = 8
LAYER = "decoder.layers.0."
# Shape, and the axes of a mesh of 2 x 4 ranks that each axis of the tensor is divided by.
TENSORS = {
    "self_attention.linear_qkv.lora_a": ((2, 8), ("None", "None")),
    "self_attention.linear_qkv.lora_b": ((24, 2), ("tp", "None")),
    "self_attention.linear_proj.lora_a": ((2, 16), ("None", "tp")),
    "self_attention.linear_proj.lora_b": ((16, 2), (("dp", "tp"), "None")),
    "mlp.linear_fc1.lora_a": ((2, 8), ("dp", "tp")),
    "mlp.linear_fc1.lora_b": ((16, 2), (("tp", "dp"), "None")),
    "mlp.experts.weight1_lora_a": ((4, 8, 2), ("tp", "dp", "None")),
    "mlp.experts.weight1_lora_b": ((4, 2, 8), ("dp", "None", "tp")),
}


def main(folder):
    pynative_cpu.install()
    import mindspore as ms
    from mindformers.checkpoint.metadata import save_metadata
    from mindformers.checkpoint.reshard import infer_slice_area_by_rank
    from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata
    from mindspore.parallel import Layout

    mesh = Layout((2, 4), ("dp", "tp"), list(range(RANKS)))
    rng = np.random.default_rng(0)
    layouts = {LAYER + name: (mesh(*axes), ms.float32, shape) for name, (shape, axes) in TENSORS.items()}
    whole = {key: rng.normal(size=shape).astype(np.float32) for key, (_, _, shape) in layouts.items()}
    metadata, files = {}, []
    os.makedirs(folder)
    for rank in range(RANKS):
        metadata[rank] = get_sharded_tensor_from_strategy_metadata(layouts, rank)
        held = {}
        for key, (layout, _, shape) in layouts.items():
            mapped = layout.to_dict()
            area = infer_slice_area_by_rank(mapped["device_matrix"], mapped["tensor_map"], rank, shape)
            held[key] = np.ascontiguousarray(whole[key][tuple(slice(*ends) for ends in area)])
            files.append((rank_file(rank, RANKS), rank, [rank], (key, metadata[rank][key].global_offset)))
        write_arrays(os.path.join(folder, rank_file(rank, RANKS)), held)
    save_metadata(metadata, files, os.path.join(folder, "metadata.json"))
    np.savez(f"{folder}.npz", **whole)


if __name__ == "__main__":
    main(sys.argv[1])
