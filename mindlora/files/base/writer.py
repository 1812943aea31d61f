"""Writes a base model's checkpoint block by block: each output tensor is a function that computes a range of rows.

A few threads each take the next block, compute it and write it to its offset in the file, so that reading, computing
and writing overlap and only a few blocks are in memory.
"""

import concurrent.futures
import contextlib
import os
import shutil
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import CheckpointError
from mindlora.core.formats import ckpt_file, step_folder
from mindlora.core.formats.gguf_file import ENDING
from mindlora.core.formats.safetensors_file import layout
from mindlora.core.json_files import write_json
from mindlora.files.base.mcore_view import BIAS, MCORE_BIAS, with_end
from mindlora.files.base.reader import INDEX

# MindFormers 2's PyNative trainer: mcore's names, except those of mcore_view, in the folder of a step.
PYNATIVE = "pynative"
# Bytes of a block, which fits into a core's cache together with its sources.
_BLOCK = 2**20


class OutputTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
        rows (callable): (begin, end) -> array of these rows in ``dtype``; several threads call it at once.
        unit (int): ``rows`` is called for multiples of this many rows.
    """

    name: str
    dtype: np.dtype
    shape: Tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]
    unit: int = 1

    @property
    def row_count(self) -> int:
        """Number of rows; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shard(NamedTuple):
    """A file to be written: its tensors, and the strings for its header."""

    tensors: List[OutputTensor]
    metadata: Dict[str, str]


def check_checkpoint_output(output: str, sources: List[str], overwrite: bool) -> None:
    """Raises CheckpointError if writing to ``output`` would destroy a source, or other files without permission."""
    path = os.path.realpath(output)
    for source in map(os.path.realpath, sources):
        if os.path.commonpath([path, source]) in (path, source) and os.path.exists(source):
            raise CheckpointError(
                f"The output {output} is, contains or is inside the input {source}. Give another output."
            )
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CheckpointError(f"{output} exists. Give another output, or --overwrite to replace it.")
    if os.path.isdir(path) == (is_file_name(output) or output.endswith(ENDING)):
        existing, written = ("folder", "file") if os.path.isdir(path) else ("file", "folder")
        raise CheckpointError(f"{output} is a {existing}, but the output must be a {written}. Give another output.")
    # Replacing a folder removes all files in it.
    if os.path.isdir(path) and os.listdir(path) and not any(name.endswith(".safetensors") for name in os.listdir(path)):
        raise CheckpointError(f"{output} holds no checkpoint, so --overwrite does not replace it. Give another output.")


def write(
    output: str,
    shards: List[Shard],
    world: str,
    companions: Sequence[str] = (),
    contents: Optional[Mapping[str, dict]] = None,
    progress: Optional[Callable[[int, int], None]] = None,
) -> List[str]:
    """Writes a checkpoint in the form that the name of ``output`` selects; an error leaves existing files unchanged.

    A folder gets a file for each shard, copies of ``companions``, and the JSON files that ``contents`` names; a single
    file holds all shards. ``world`` is "hf", "mindformers", "mcore", or "pynative" for the folder of a step of
    MindFormers 2's PyNative trainer; ``progress`` takes the size of each written block and the total size, in bytes.
    Returns the written files that hold tensors.
    """
    shards = [shard for shard in shards if shard.tensors]
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)

    def tick(nbytes: int) -> None:
        if progress:
            progress(nbytes, total)

    if is_file_name(output):
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
        for name, content in (contents or {}).items():
            write_json(os.path.join(folder, name), content)
        return _write_folder(folder, shards, world, tick)


def _write_folder(folder, shards, world, tick) -> List[str]:
    count = len(shards)
    files = [
        f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        for number in range(1, count + 1)
    ]
    if world == PYNATIVE:
        # The trainer would take a model.safetensors, or a folder with an index, for Hugging Face's.
        files = [step_folder.file_name(number, count) for number in range(count)]
        write_json(os.path.join(folder, step_folder.COMMON), step_folder.NEW_RUN)
    for file, shard in zip(files, shards):
        _write_shard(os.path.join(folder, file), shard, world, tick)
    if count > 1 and world != PYNATIVE:
        weight_map = {tensor.name: file for file, shard in zip(files, shards) for tensor in shard.tensors}
        size = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
        write_json(os.path.join(folder, INDEX), {"metadata": {"total_size": size}, "weight_map": weight_map})
        if world != "hf":
            # MindSpore looks for the index under this name.
            write_json(os.path.join(folder, "param_name_map.json"), weight_map)
    return files


def _write_shard(path, shard, world, tick):
    # transformers refuses a file that does not name its framework.
    metadata = {**shard.metadata, "format": "pt" if world == "hf" else "ms"}
    _keep_freed_memory()
    header, offsets, _ = layout([tensor[:3] for tensor in shard.tensors], metadata)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        _write_at(handle, memoryview(header), 0)
        threads = min(4, os.cpu_count() or 1)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(threads))
        # At the first error, map cancels the blocks that no thread has begun.
        for nbytes in pool.map(lambda block: _write_block(handle, *block), list(_blocks(shard.tensors, offsets))):
            tick(nbytes)


def _keep_freed_memory():
    # glibc returns the memory of each block to the system, which clears it for the next block. That takes half the
    # time of a merge. Once an array of this size is freed, glibc keeps smaller ones (mallopt(3), M_MMAP_THRESHOLD).
    np.empty(2**25 - 2**16, np.uint8)


def _write_ckpt(path, shard, tick):
    def arrays() -> Iterator[Tuple[str, np.ndarray]]:
        for tensor in shard.tensors:
            yield tensor.name, tensor.rows(0, tensor.row_count)
            tick(tensor.nbytes)

    ckpt_file.write_arrays(path, arrays())


def _blocks(tensors: List[OutputTensor], offsets: List[int]) -> Iterator[Tuple[OutputTensor, int, int, int]]:
    """Yields (tensor, offset in the file, begin, end) of each block of rows."""
    for tensor, offset in zip(tensors, offsets):
        row = tensor.nbytes // max(tensor.row_count, 1)
        step = max(_BLOCK // max(row * tensor.unit, 1), 1) * tensor.unit
        for begin in range(0, tensor.row_count, step):
            yield tensor, offset + begin * row, begin, min(begin + step, tensor.row_count)


def _write_block(handle, tensor, offset, begin, end) -> int:
    rows = np.ascontiguousarray(tensor.rows(begin, end))
    if rows.dtype != tensor.dtype or rows.size * max(tensor.row_count, 1) != (
        (end - begin) * int(np.prod(tensor.shape, dtype=np.int64))
    ):
        raise AssertionError(f"{tensor.name} [{begin}:{end}] was computed as {rows.dtype} {rows.shape}.")
    _write_at(handle, memoryview(rows.reshape(-1).view(np.uint8)), offset)
    if hasattr(os, "posix_fadvise"):
        # Starts to write the block to the disk now, while the next ones are computed.
        os.posix_fadvise(handle, offset, rows.nbytes, os.POSIX_FADV_DONTNEED)
    return int(rows.nbytes)


def _write_at(handle: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(handle, content[done:], offset + done)


def is_file_name(output: str) -> bool:
    """Returns whether ``output`` is to be one file, and not a folder."""
    return str(output).endswith((".safetensors", ".ckpt"))


def shards_in_trainers_form(of_mcore: List[Shard], heights: Dict[str, int]) -> List[Shard]:
    """Returns shards of mcore's tensors in the trainer's form.

    Args:
        of_mcore (list of Shard): Their tensors.
        heights (dict): Name of an expert weight -> rows of each expert.
    """
    converted = []
    for shard in of_mcore:
        tensors = [_in_its_form(tensor, heights.get(tensor.name)) for tensor in shard.tensors]
        converted.append(shard._replace(tensors=tensors))
    return converted


def _in_its_form(tensor: OutputTensor, height: Optional[int]) -> OutputTensor:
    if height is None:
        return tensor._replace(name=with_end(tensor.name, MCORE_BIAS, BIAS))
    experts, width = tensor.shape[0] // height, tensor.shape[1]

    def stacked(begin: int, end: int) -> np.ndarray:
        return tensor.rows(begin * height, end * height).reshape(end - begin, height, width)

    return OutputTensor(tensor.name, tensor.dtype, (experts, height, width), stacked)
