"""quantize_checkpoint: the linear weights of a Llama's or Qwen2's base checkpoint to 4-bit NormalFloat, as a stream."""

import contextlib
import dataclasses
import json
import math
import time
from typing import Callable, Iterator, List, Optional, Tuple

import numpy as np

from mindlora.adapters import files as adapter_files
from mindlora.adapters.fingerprint import mark_of, picked, sampled
from mindlora.base.convert import in_mindformers_names
from mindlora.base.loftq import LoftqInitializer, check_loftq_output
from mindlora.base.reader import BaseCheckpoint, examples
from mindlora.base.writer import OutputTensor, check_checkpoint_output
from mindlora.common import atomic
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import CheckpointError, ConfigError
from mindlora.formats.safetensors_file import TensorFile, write
from mindlora.models import names
from mindlora.models.targets import select_quantized
from mindlora.numerics.dtypes import FLOATS, dtype_name, to_float32
from mindlora.numerics.nf4 import BLOCK, GROUP, TENSOR_NAMES, layout, quantize

_WEIGHT = ".weight"
# So many numbers are read at a time.
_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """What quantize_checkpoint did; str() says it to people.

    Attributes:
        source, output (str): The two checkpoints.
        quantized (tuple of str): Paths of the cells whose weights are 4-bit now.
        bytes_before, bytes (int): Size of all tensors, before and now.
        notes (tuple of str): What was left out, and what was decided about tied embeddings.
        seconds (float): How long it took.
        adapter (str): Folder of LoftQ's adapter, or None.
        started (tuple of str): Paths of the cells for which it makes up for what quantizing lost.
    """

    source: str
    output: str
    quantized: Tuple[str, ...]
    bytes_before: int
    bytes: int
    notes: Tuple[str, ...]
    seconds: float
    adapter: Optional[str] = None
    started: Tuple[str, ...] = ()

    def __str__(self):
        loftq = [
            f"{self.adapter}: LoftQ's adapter for {len(self.started)} of them, {listed(self.started)}. Name "
            "it as pet_config.adapter_path, with the rank, alpha and target_modules that it was made with."
        ]
        return "\n".join(
            [
                f"{self.output}: {self.bytes / 1e9:.2f} GB of {self.bytes_before / 1e9:.2f} GB; weights in NF4: "
                f"{len(self.quantized)}, {listed(self.quantized)}; {self.seconds:.1f} s.",
                "Load it with pet_config.quantize_base: nf4 and load_ckpt_format: safetensors.",
                *(loftq if self.adapter else ()),
                *self.notes,
            ]
        )


def quantize_checkpoint(
    source: str,
    output: str,
    exclude=None,
    overwrite: bool = False,
    progress: Optional[Callable[[int, int], None]] = None,
    adapter: Optional[str] = None,
    config: LoraConfig = None,
) -> QuantizeReport:
    """Writes a base checkpoint under MindFormers' names whose linear weights are 4-bit, in one atomic step.

    What is quantized are the weights that quantize_base would quantize in a network, to the same bytes. Everything else
    keeps its bytes and its dtype, but for an optimizer's state, which is left out. Of safetensors
    a million numbers are in memory at a time; a .ckpt is read whole.

    With ``adapter`` and ``config`` LoftQ is carried out: the weights that target_modules selects and an adapter for
    them are chosen by turns, so that together they are near the weights in float (see mindlora.numerics.initializers.loftq), and a
    folder of PEFT's holds the adapter, which pet_config.adapter_path then names. One weight in float, its decomposition
    and the adapter are then in memory. On an error neither of the two is written.

    Args:
        source (str): A folder of safetensors, with or without index, or a .safetensors or .ckpt file, under Hugging
            Face's or MindFormers' names.
        output (str): A .safetensors file.
        exclude (str or list of str): Cells to leave as they are, besides lm_head: the quantize_exclude of the run that
            will load it. Default: None.
        overwrite (bool): Whether to replace what stands at ``output``. Default: False.
        progress (callable): Takes the bytes of each piece that is written, and of all. Default: None.
        adapter (str): Folder for LoftQ's adapter. Default: None, no LoftQ.
        config (LoraConfig): What the adapter is, with lora_init "loftq" or "loftq_iter_N". Default: None.

    Returns:
        QuantizeReport.

    Raises:
        CheckpointError: The source cannot be read, holds a name that is not known or is quantized already, or
            ``output`` or ``adapter`` stands in the way or does not do.
        ConfigError: One of ``adapter`` and ``config`` is missing, or lora_rank is larger than a side of a weight.
        TargetError: ``exclude`` matches nothing, or leaves nothing to quantize.
        QuantizationError: A weight holds NaN or infinity.
        TruncatedAdapterError, AdapterFormatError: A file of the source is damaged.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    started = time.perf_counter()
    if not str(output).endswith(".safetensors"):
        raise CheckpointError(
            f"The output {output} is no .safetensors file, the one form of a quantized base: let its name end so."
        )
    check_checkpoint_output(output, [source], overwrite)
    if (adapter is None) != (config is None):
        raise ConfigError(
            "quantize_checkpoint takes adapter and config together: the folder of LoftQ's adapter, and what it is."
        )
    if adapter is not None:
        check_loftq_output(adapter, source, output, overwrite)
    with BaseCheckpoint(source) as base:
        if quantized_paths(base.tensors):
            raise CheckpointError(
                f"{source} is quantized already, at {examples(quantized_paths(base.tensors))}. Give "
                "the checkpoint in float."
            )
        tensors, notes = in_mindformers_names(base)
        # What an optimizer keeps of a parameter is called as the parameter, after a word of its own.
        states = [tensor for tensor in tensors if tensor.name.partition(".")[2] in base.tensors]
        tensors = [tensor for tensor in tensors if tensor not in states]
        if states:
            notes = [*notes, f"Left out, the state of an optimizer: {examples(tensor.name for tensor in states)}."]
        linear = _linear_paths(tensor.name for tensor in tensors)
        chosen = select_quantized(linear, exclude)
        _check_floats(source, tensors, chosen)
        start = config and LoftqInitializer(
            {_path(tensor.name): tensor for tensor in tensors if _path(tensor.name) in linear}, chosen, config
        )
        written = [entry for tensor in tensors for entry in _entries(tensor, chosen)]
        total = sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for _, dtype, shape in written)
        # Both come to their places when both are whole.
        with (
            atomic.replace_folder(adapter) if start else contextlib.nullcontext() as folder,
            atomic.replace_file(output) as path,
        ):
            write(
                path,
                written,
                _told(_contents(tensors, chosen, start), progress, total),
                {"format": "ms", "mindlora": json.dumps({"quantize_base": "nf4"})},
            )
            if start:
                adapter_files.write(start.adapter(), folder)
    return QuantizeReport(
        str(source),
        str(output),
        tuple(chosen),
        sum(tensor.nbytes for tensor in tensors),
        total,
        tuple(notes),
        time.perf_counter() - started,
        adapter and str(adapter),
        tuple(start.paths) if start else (),
    )


def quantized_paths(tensor_names) -> List[str]:
    """Returns the paths of the cells whose weights are 4-bit, by the names of a checkpoint's tensors."""
    suffix = "." + TENSOR_NAMES["absmax"]
    return [name[: -len(suffix)] for name in tensor_names if name.endswith(suffix)]


def check_fits(path: str, exclude) -> None:
    """Raises CheckpointError unless the .safetensors file at ``path`` is what a run with quantize_base loads.

    Args:
        path (str): A .safetensors file under MindFormers' names; only its header is read.
        exclude (str or list of str): quantize_exclude of the run.
    """
    with TensorFile(path) as file:
        found = quantized_paths(file.tensors)
        if not found:
            raise CheckpointError(
                f"{path} is not quantized, and quantize_base is nf4. Write a quantized one, once: "
                f"mindlora quantize-base {path} base-nf4.safetensors"
            )
        wanted = select_quantized(_linear_paths(file.tensors), exclude)
    differ = sorted(set(found) ^ set(wanted))
    if differ:
        raise CheckpointError(
            f"{path} was quantized with another quantize_exclude: it and this run differ at "
            f"{examples(differ)}. Set quantize_exclude as it was, or quantize the base anew with "
            "--exclude."
        )


def values_mark(path: str, paths) -> Optional[str]:
    """Returns the "values" of base_fingerprint (see mindlora.adapters.fingerprint) of cells by their 4-bit weights in a file.

    Args:
        path (str): A .safetensors file that quantize_checkpoint wrote.
        paths (list of str): The adapted cells.

    Returns:
        str, or None where one of them is not quantized in the file.
    """
    with TensorFile(path) as file:
        if set(paths) - set(quantized_paths(file.tensors)):
            return None
        return mark_of({}, {cell: picked(file.read(f"{cell}.{TENSOR_NAMES['codes']}")) for cell in sampled(paths)})[
            "values"
        ]


def _linear_paths(tensor_names) -> List[str]:
    """Returns the paths of the linear cells whose weights are among the names; all under MindFormers' names."""
    return [path for path in map(_path, tensor_names) if path and names.is_linear(path)]


def _path(name) -> str:
    """Returns the path of the cell whose weight ``name`` is, or "" for any other parameter."""
    return name[: -len(_WEIGHT)] if name.endswith(_WEIGHT) else ""


def _check_floats(source, tensors, chosen):
    for tensor in tensors:
        if _path(tensor.name) in chosen and (tensor.dtype not in FLOATS or len(tensor.shape) != 2):
            raise CheckpointError(
                f"{source}: {tensor.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, which "
                "is no matrix of float32, float16 or bfloat16. Give the checkpoint in float."
            )


def _entries(tensor, chosen) -> list:
    """Returns (name, dtype, shape) of what is written in the place of ``tensor``."""
    if _path(tensor.name) not in chosen:
        return [tensor[:3]]
    return [
        (f"{_path(tensor.name)}.{TENSOR_NAMES[field]}", dtype, shape)
        for field, (shape, dtype) in layout(*tensor.shape).items()
    ]


def _contents(tensors: List[OutputTensor], chosen, start) -> Iterator[np.ndarray]:
    """Yields the pieces of all tensors, in the order of their entries."""
    for tensor in tensors:
        if _path(tensor.name) not in chosen:
            yield from (tensor.rows(*rows) for rows in _pieces(tensor, tensor.unit))
            continue
        if start and _path(tensor.name) in start.paths:
            array = start.quantize(_path(tensor.name), tensor.name)
            yield from (getattr(array, field) for field in TENSOR_NAMES)
            continue
        # Whole groups of blocks, so that a piece is quantized as it would be within the whole.
        blocks = -(-tensor.shape[1] // BLOCK)
        small = {field: [] for field in ("absmax", "scales", "offsets")}
        for begin, end in _pieces(tensor, math.lcm(tensor.unit, GROUP // math.gcd(blocks, GROUP))):
            array = quantize(to_float32(tensor.rows(begin, end)), f"{tensor.name}, from row {begin} on,")
            yield array.codes
            for field, parts in small.items():
                parts.append(getattr(array, field))
        for parts in small.values():
            yield from parts


def _pieces(tensor, unit) -> Iterator[Tuple[int, int]]:
    columns = math.prod(tensor.shape[1:])
    step = max(_AT_ONCE // max(columns * unit, 1), 1) * unit
    return ((begin, min(begin + step, tensor.count)) for begin in range(0, tensor.count, step))


def _told(pieces, progress, total) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece
        if progress:
            progress(piece.nbytes, total)
