"""Writing a base model's checkpoint block by block: each output tensor is a function of the rows that are wanted.

A few threads each take the next block, compute it and put it in its place in the file, so that reading, computing and
the disk overlap and no more than a few blocks are in memory.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
from typing import Callable, Dict, List, NamedTuple, Tuple, Optional

import numpy as np

from mindlora.base.reader import INDEX
from mindlora.common import atomic
from mindlora.errors import CheckpointError
from mindlora.formats import ckpt_file
from mindlora.formats.safetensors_file import layout

# A block and what it is computed from then fit a core's cache.
_BLOCK = 2**20


class OutputTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
        name (str): Its name.
        dtype (numpy.dtype): Of its elements.
        shape (tuple of int): Its shape.
        rows (callable): (begin, end) -> array of those rows in ``dtype``; several threads call it at once.
        unit (int): Rows come in multiples of it. Default: 1.
    """

    name: str
    dtype: np.dtype
    shape: Tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]
    unit: int = 1

    @property
    def count(self) -> int:
        """Number of rows; a scalar is one."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shard(NamedTuple):
    """A file to be written.

    Attributes:
        tensors (list of OutputTensor): What it holds.
        metadata (dict): The file's own texts.
    """

    tensors: List[OutputTensor]
    metadata: Dict[str, str]


def check_checkpoint_output(output: str, sources: List[str], overwrite: bool) -> None:
    """Raises CheckpointError where writing to ``output`` would destroy what is read, or what nobody gave up."""
    place = os.path.realpath(output)
    for source in map(os.path.realpath, sources):
        if os.path.commonpath([place, source]) in (place, source) and os.path.exists(source):
            raise CheckpointError(
                f"The output {output} is, holds or lies in {source}, which is read. Write to another place."
            )
    if not os.path.lexists(place):
        return
    if not overwrite:
        raise CheckpointError(f"{output} exists. Give another output, or --overwrite to replace it.")
    if os.path.isdir(place) == _is_file_name(output):
        raise CheckpointError(
            f"{output} exists and is a {'folder' if os.path.isdir(place) else 'file'}; what would be "
            "written is not. Give another output."
        )
    # Replacing a folder removes all that is in it.
    if (
        os.path.isdir(place)
        and os.listdir(place)
        and not any(name.endswith(".safetensors") for name in os.listdir(place))
    ):
        raise CheckpointError(f"{output} holds no checkpoint, so --overwrite does not replace it. Give another output.")


def write(
    output: str,
    shards: List[Shard],
    world: str,
    companions: List[str] = (),
    progress: Optional[Callable[[int, int], None]] = None,
) -> List[str]:
    """Writes a checkpoint in the form that the name of ``output`` asks for; an error leaves what was there before.

    Args:
        output (str): A folder, or a file that ends in .safetensors or .ckpt (which takes the whole in memory).
        shards (list of Shard): What the files of a folder hold; a single file holds them all.
        world (str): "hf" or "mindformers".
        companions (list of str): Files to copy into a folder. Default: ().
        progress (callable): Takes the bytes of each block that is written, and of all blocks. Default: None.

    Returns:
        list of str, the files that hold tensors.
    """
    shards = [shard for shard in shards if shard.tensors]
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    tick = (lambda nbytes: progress(nbytes, total)) if progress else (lambda nbytes: None)
    if _is_file_name(output):
        whole = Shard(
            [tensor for shard in shards for tensor in shard.tensors],
            {key: text for shard in shards for key, text in shard.metadata.items()},
        )
        with atomic.replace_file(output) as written:
            if output.endswith(".ckpt"):
                _write_ckpt(written, whole, tick)
            else:
                _write_shard(written, whole, world, tick)
        return [output]
    with atomic.replace_folder(output) as folder:
        for path in companions:
            shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
        return _write_folder(folder, shards, world, tick)


def _write_folder(folder, shards, world, tick) -> List[str]:
    count = len(shards)
    files = [
        f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        for number in range(1, count + 1)
    ]
    for file, shard in zip(files, shards):
        _write_shard(os.path.join(folder, file), shard, world, tick)
    if count > 1:
        weight_map = {tensor.name: file for file, shard in zip(files, shards) for tensor in shard.tensors}
        size = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
        _write_json(os.path.join(folder, INDEX), {"metadata": {"total_size": size}, "weight_map": weight_map})
        if world == "mindformers":
            # By this name MindSpore looks for the index.
            _write_json(os.path.join(folder, "param_name_map.json"), weight_map)
    return files


def _write_shard(path, shard, world, tick):
    # transformers refuses a file that does not say of which framework it is.
    metadata = {**shard.metadata, "format": "pt" if world == "hf" else "ms"}
    _keep_freed_memory()
    text, places, _ = layout([tensor[:3] for tensor in shard.tensors], metadata)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        _write_at(handle, text, 0)
        threads = min(4, os.cpu_count() or 1)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(threads))
        # At the first error, map cancels the blocks that nobody has begun.
        for nbytes in pool.map(lambda block: _write_block(handle, *block), list(_blocks(shard.tensors, places))):
            tick(nbytes)


def _keep_freed_memory():
    # glibc gives what blocks leave behind back to the system, which has to clear it for the next one: half of the time
    # of a merge. Once an array of this size was freed, it keeps what is smaller (mallopt(3), M_MMAP_THRESHOLD).
    np.empty(2**25 - 2**16, np.uint8)


def _write_ckpt(path, shard, tick):
    def arrays():
        for tensor in shard.tensors:
            yield tensor.name, tensor.rows(0, tensor.count)
            tick(tensor.nbytes)

    ckpt_file.write_arrays(path, arrays())


def _blocks(tensors, places):
    """Yields (tensor, place in the file, begin, end) for all rows."""
    for tensor, place in zip(tensors, places):
        row = tensor.nbytes // max(tensor.count, 1)
        step = max(_BLOCK // max(row * tensor.unit, 1), 1) * tensor.unit
        for begin in range(0, tensor.count, step):
            yield tensor, place + begin * row, begin, min(begin + step, tensor.count)


def _write_block(handle, tensor, place, begin, end) -> int:
    rows = np.ascontiguousarray(tensor.rows(begin, end))
    if rows.dtype != tensor.dtype or rows.size * max(tensor.count, 1) != (
        (end - begin) * int(np.prod(tensor.shape, dtype=np.int64))
    ):
        raise AssertionError(f"{tensor.name} [{begin}:{end}] came as {rows.dtype} {rows.shape}.")
    _write_at(handle, memoryview(rows.reshape(-1).view(np.uint8)), place)
    if hasattr(os, "posix_fadvise"):
        # Sends the block on to the disk now, while the next ones are computed, and not all of them at the end.
        os.posix_fadvise(handle, place, rows.nbytes, os.POSIX_FADV_DONTNEED)
    return rows.nbytes


def _write_at(handle, content, place):
    content = memoryview(content)
    done = 0
    while done < len(content):
        done += os.pwrite(handle, content[done:], place + done)


def _write_json(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)


def _is_file_name(output) -> bool:
    return str(output).endswith((".safetensors", ".ckpt"))
