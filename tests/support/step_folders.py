"""The folders in which MindFormers 2's PyNative trainer saves: of one rank, and of several with metadata.json."""

import itertools
import json

import numpy as np

from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.formats.step_folder import RUN

MANIFEST = "mindformers_adapter_config.json"
ONE_RANK = "checkpoint-model-0000000-0000001.safetensors"


def write_step(folder, tensors, **lora_config):
    """Writes the folder of a step of one rank, with a manifest if there is a lora_config; returns its path."""
    folder.mkdir(parents=True)
    write_arrays(str(folder / ONE_RANK), tensors)
    (folder / "checkpoint-opt-0000000-0000001.safetensors").write_bytes(b"the optimizer's state, which is not read")
    (folder / "common.json").write_text(json.dumps({"global_step": 10}))
    if lora_config:
        (folder / MANIFEST).write_text(json.dumps({"lora_config": lora_config}))
    return str(folder)


def write_run(folder, lora_config, **pet_config):
    """Writes into the folder of a step what mindlora writes there while it trains."""
    content = {"base_fingerprint": None, "callbacks": {}, "lora_config": lora_config, "pet_config": pet_config or None}
    (folder / RUN).write_text(json.dumps(content))


def write_ranks(folder, tensors, cuts, ranks, **lora_config):
    """Writes the folder of a step of several ranks; returns its path.

    Args:
        tensors (dict): Key -> whole array.
        cuts (dict): Key -> number of parts along each axis; every part of a tensor is on one rank, after the other.
            A tensor without an entry is whole on all ranks.
        ranks (int): Number of ranks.
    """
    folder.mkdir(parents=True)
    files = [{} for _ in range(ranks)]
    entries, storage = {}, {}
    for key, array in tensors.items():
        counts = cuts.get(key, (1,) * array.ndim)
        chunks = []
        for rank, place in enumerate(itertools.product(*map(range, counts))):
            # What MindFormers calls an offset is the number of the part.
            number = (rank,)
            sizes = [size // count for size, count in zip(array.shape, counts)]
            offset = tuple(number * size for number, size in zip(place, sizes))
            part = array[tuple(slice(begin, begin + size) for begin, size in zip(offset, sizes))]
            holders = [rank] if key in cuts else list(range(ranks))
            for holder in holders:
                files[holder][key] = np.ascontiguousarray(part)
            chunks.append({"global_offset": number, "local_shape": sizes})
            storage[str((key, number))] = [{"file_name": rank_file(holder, ranks)} for holder in holders]
        entries[key] = {"global_shape": array.shape, "axis_fragmentations": counts, "chunk": chunks}
    chunk = {"global_offset": [0], "local_shape": [2]}
    entries["adam_m.x"] = {"global_shape": [2], "axis_fragmentations": [1], "chunk": [chunk]}
    storage[str(("adam_m.x", (0,)))] = [{"file_name": rank_file(0, ranks, "opt")}]
    for rank, arrays in enumerate(files):
        write_arrays(str(folder / rank_file(rank, ranks)), arrays)
    (folder / "metadata.json").write_text(json.dumps({"state_dict_metadata": entries, "storage_data": storage}))
    if lora_config:
        (folder / MANIFEST).write_text(json.dumps({"lora_config": lora_config}))
    return str(folder)


def rank_file(rank, ranks, kind="model"):
    """Returns the name of the file of one rank."""
    return f"checkpoint-{kind}-{rank:07d}-{ranks:07d}.safetensors"
