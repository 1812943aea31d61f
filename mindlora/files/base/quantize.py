"""quantize_checkpoint: linear and expert weights of a base checkpoint in 4-bit NormalFloat, as a stream."""

import contextlib
import dataclasses
import json
import math
import os
import time
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.formats.safetensors_file import TensorFile, write
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import FLOATS, dtype_name, to_float32
from mindlora.core.numerics.nf4 import (
    BLOCK,
    GROUP,
    TENSOR_NAMES,
    Nf4Array,
    dequantize,
    layout,
    quantize,
    repacked,
    repacked_layout,
    tensor_name,
)
from mindlora.core.text import examples, listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, split_all
from mindlora.files.adapters.fingerprint import fingerprint_from, sampled_elements, sampled_paths
from mindlora.files.adapters.sharding.run_settings import heads_of
from mindlora.files.base.convert import in_mindformers_names
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.writer import OutputTensor, check_checkpoint_output
from mindlora.models import names
from mindlora.models.architectures.joined_rows import HeadSizes
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import select_quantized, select_targets

# LoftQ for a checkpoint: quantizing also builds an adapter that compensates for the error, cell by cell.


class LoftqInitializer:
    """Builds an adapter while a checkpoint is quantized, with one float weight in memory at a time.

    ``weights`` is path -> weight of each linear cell, under MindFormers' names, ``quantized`` the paths whose weights
    become 4-bit, of which LoftQ initializes those that target_modules selects (``paths``). Other cells that it selects
    get a plain initial pair: A is He-uniform, B is zero. A joined cell gets one pair, which PEFT's form holds as pairs
    of its parts; ``heads`` are the sizes that separate its rows.

    Raises LoraError if ``config`` is not LoftQ's, or selects nothing, too small a weight, or a joined cell whose
    rows cannot be separated.

    Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023.
    """

    def __init__(self, weights: Dict[str, OutputTensor], quantized: List[str], config: LoraConfig, heads: Heads):
        if not initializers.is_loftq(config.lora_init):
            raise ConfigError(
                f"lora_init is {config.lora_init!r}, which quantize_checkpoint does not support. "
                "Set lora_init to 'loftq' or 'loftq_iter_N'."
            )
        if not config.variant.is_plain:
            raise ConfigError(
                f"{config.variant.field} is True, and quantize_checkpoint makes the adapters of plain LoRA alone. "
                f"Leave it out, or quantize a network with apply_lora, which takes it with {config.lora_init!r}."
            )
        self._weights = weights
        self._config = config
        self._selected = select_targets(
            list(weights), config.target_modules, config.exclude_modules, layers=config.layers_to_transform
        )
        self.paths = [path for path in self._selected if path in quantized]
        self._heads, self._in_file = heads, names.canonical(self._selected, among=weights)
        sizes = HeadSizes(heads.heads, heads.kv_heads, heads.head_dim, heads.q_rank)
        unknown = [
            path
            for path, name in self._in_file.items()
            if names.joined_parts(name) and names.joined_cell(name).layout.sizes(weights[path].shape[0], sizes) is None
        ]
        if unknown:
            raise CheckpointError(
                f"{listed(sorted(unknown))} are joined cells, whose rows only the model's config.json tells apart, and "
                "an adapter in PEFT's form has a pair for each part. Quantize Hugging Face's folder."
            )
        for path in self.paths:
            initializers.check_rank(config.for_cell(path).lora_rank, weights[path], "loftq")
        self._sampled = sampled_paths(self._selected)
        self._pairs: Dict[str, Dict[str, np.ndarray]] = {}
        self._samples: Dict[str, np.ndarray] = {}

    def quantize(self, path: str, name: str) -> Nf4Array:
        """Returns the 4-bit weight of the cell at ``path`` and stores its A and B; errors call the weight ``name``."""
        config = self._config.for_cell(path)
        weight = _in_float(self._weights[path])
        array, a, b = initializers.loftq(
            weight,
            config.lora_rank,
            lambda rest: quantize(rest, name),
            dequantize,
            initializers.loftq_iterations(str(config.lora_init)),
            config.scale,
        )
        self._keep(path, a, b, array.codes)
        return array

    def adapter(self) -> Adapter:
        """Returns the adapter, once ``quantize`` has been called for all paths."""
        rng = np.random.default_rng(0)
        for path in self._selected:
            if path not in self.paths:
                rank = self._config.for_cell(path).lora_rank
                rows, columns = self._weights[path].shape
                a = rng.uniform(-1, 1, (rank, columns)).astype(np.float32) / np.float32(np.sqrt(columns))
                weight = _in_float(self._weights[path]) if path in self._sampled else None
                self._keep(path, a, np.zeros((rows, rank), np.float32), weight)
        fingerprint = fingerprint_from({path: self._weights[path].shape for path in self._selected}, self._samples)
        in_file = self._in_file
        adapter = Adapter(
            {(in_file[path], part): array for path in self._selected for part, array in self._pairs[path].items()},
            {in_file[path]: float(self._config.for_cell(path).lora_alpha) for path in self._selected},
            self._config.use_rslora,
            self._config.lora_dropout,
            fingerprint={**fingerprint, "quantization": "loftq"},
            dialect="loftq",
        )
        split_all(adapter, self._heads)
        return adapter

    def _keep(self, path, a, b, weight):
        self._pairs[path] = {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b)}
        if path in self._sampled:
            self._samples[path] = sampled_elements(weight)


def check_loftq_output(folder: str, source: str, output: str, overwrite: bool) -> None:
    """Raises CheckpointError, AdapterError or LoraError if the adapter cannot be written to ``folder``."""
    adapter_files.check_adapter_output(folder, "peft")
    check_checkpoint_output(folder, [source], overwrite)
    paths = [os.path.realpath(path) for path in (folder, output)]
    if os.path.commonpath(paths) in paths:
        raise CheckpointError(
            f"The adapter's folder {folder} and the quantized base {output} are one inside the other, so writing "
            "one would remove the other. Write one of them elsewhere."
        )


def _in_float(tensor: OutputTensor) -> np.ndarray:
    return to_float32(tensor.rows(0, tensor.row_count))


_WEIGHT = ".weight"
# The number of elements read at a time.
_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """The result of quantize_checkpoint; str() gives it as text.

    Attributes:
        quantized (tuple of str): Paths of the cells whose weights are now 4-bit.
        bytes_before, bytes (int): Size of all tensors before and after.
        notes (tuple of str): Tensors that were left out, and the decision about tied embeddings.
        adapter (str): Folder of LoftQ's adapter, or None.
        started (tuple of str): Paths of the cells whose pairs LoftQ initialized.
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

    def __str__(self) -> str:
        loftq = [
            f"{self.adapter}: LoftQ's adapter for {len(self.started)} of them, {listed(self.started)}. Give "
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
    exclude: Optional[Union[str, List[str]]] = None,
    overwrite: bool = False,
    progress: Optional[Callable[[int, int], None]] = None,
    adapter: Optional[str] = None,
    config: Optional[LoraConfig] = None,
) -> QuantizeReport:
    """Writes a base checkpoint with linear weights and routed experts in 4 bits, under MindFormers' names, atomically.

    The weights are those that quantize_base quantizes in a network, and they get the same bytes. All other tensors keep
    their bytes and their dtype; the state of an optimizer is left out. Safetensors are read a million numbers at a
    time; a .ckpt is read into memory as a whole.

    Weights of a source in a quantized form are decoded to float32; those in NF4, in blocks of 64 numbers of a row, keep
    their values (nf4.repacked).

    With ``adapter`` and ``config``, LoftQ builds an adapter too: for each weight that target_modules selects, it
    determines the 4-bit weight and the pair in turn, so that both together are near the weight in float (see
    mindlora.core.numerics.initializers.loftq). The adapter is written as a PEFT folder for pet_config.adapter_path.
    LoftQ keeps one float weight, its decomposition and the adapter in memory. After an error, neither output is
    written.

    Args:
        source (str): A folder of safetensors, with or without index, or a .safetensors or .ckpt file, under Hugging
            Face's or MindFormers' names.
        output (str): A .safetensors file.
        exclude (str or list of str): Cells to leave as they are, besides the output head: the quantize_exclude of the
            run that will load the result. Default: None.
        overwrite (bool): Whether to replace an existing ``output``. Default: False.
        progress (callable): Takes the size of each written piece and the total size, in bytes. Default: None.
        adapter (str): Folder for LoftQ's adapter. Default: None, no LoftQ.
        config (LoraConfig): Configuration of the adapter, with lora_init "loftq" or "loftq_iter_N". Default: None.

    Returns:
        QuantizeReport.

    Raises:
        CheckpointError: The source cannot be read, holds an unknown name or is quantized already, or
            ``output`` or ``adapter`` cannot be written.
        ConfigError: One of ``adapter`` and ``config`` is missing, ``config`` asks for a variant of LoRA, or lora_rank
            is larger than a side of a weight.
        TargetError: ``exclude`` matches nothing, or leaves nothing to quantize.
        QuantizationError: A weight holds NaN or infinity.
        TruncatedAdapterError, AdapterFormatError: A file of the source is damaged.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    started = time.perf_counter()
    _check_output(source, output, overwrite, adapter, config)
    with BaseCheckpoint(source, decode_to=np.dtype(np.float32)) as base:
        tensors, notes = _parameters(base, source)
        chosen = select_quantized(_paths(tensor.name for tensor in tensors), exclude)
        _check_floats(source, tensors, chosen)
        weights = {_path(tensor.name): tensor for tensor in tensors if names.is_linear(_path(tensor.name))}
        heads = heads_of(base.config, Heads())
        loftq = LoftqInitializer(weights, chosen, config, heads) if config is not None else None
        kept = _kept(base, tensors, chosen, loftq)
        notes += _notes_on_kept(base, kept, chosen)
        entries = [entry for tensor in tensors for entry in _entries(tensor, chosen, kept)]
        total = sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for _, dtype, shape in entries)
        # Both outputs are complete before either replaces an existing one.
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(atomic.replace_folder(adapter)) if adapter is not None else ""
            path = stack.enter_context(atomic.replace_file(output))
            contents = _reported(_contents(tensors, chosen, kept, loftq), progress, total)
            write(path, entries, contents, {"format": "ms", "mindlora": json.dumps({"quantize_base": "nf4"})})
            if loftq is not None:
                adapter_files.write(loftq.adapter(), folder)
    return QuantizeReport(
        str(source),
        str(output),
        tuple(chosen),
        sum(tensor.nbytes for tensor in tensors),
        total,
        tuple(notes),
        time.perf_counter() - started,
        None if adapter is None else str(adapter),
        () if loftq is None else tuple(loftq.paths),
    )


def quantized_paths(tensor_names: Iterable[str]) -> List[str]:
    """Returns the paths of the cells whose weights are 4-bit, given the names of a checkpoint's tensors."""
    suffix = tensor_name("", "absmax")
    return list(filter(None, (_path(name[: -len(suffix)]) for name in tensor_names if name.endswith(suffix))))


def check_quantized_base(path: str, exclude: Optional[Union[str, List[str]]]) -> None:
    """Raises CheckpointError unless a run with quantize_base can load the .safetensors file under MindFormers' names.

    ``exclude`` is the run's quantize_exclude. Only the file's header is read.
    """
    with TensorFile(path, float8=True) as file:
        quantized = quantized_paths(file.tensors)
        if not quantized:
            raise CheckpointError(
                f"{path} is not quantized, but quantize_base is nf4. Quantize it once: "
                f"mindlora base quantize {path} base-nf4.safetensors"
            )
        selected = select_quantized(_paths(file.tensors), exclude)
    differ = sorted(set(quantized) ^ set(selected))
    if differ:
        raise CheckpointError(
            f"{path} was quantized with another quantize_exclude: the file and this run differ at "
            f"{examples(differ)}. Set quantize_exclude as it was, or quantize the base again with --exclude."
        )


def _check_output(
    source: str, output: str, overwrite: bool, adapter: Optional[str], config: Optional[LoraConfig]
) -> None:
    if not str(output).endswith(".safetensors"):
        raise CheckpointError(
            f"The output {output} does not end in .safetensors, the only form of a quantized base. Give another output."
        )
    check_checkpoint_output(output, [source], overwrite)
    if (adapter is None) != (config is None):
        raise ConfigError(
            "quantize_checkpoint takes adapter and config together: the folder of LoftQ's adapter and its "
            "configuration. Give both, or neither."
        )
    if adapter is not None:
        check_loftq_output(adapter, source, output, overwrite)


def _parameters(base: BaseCheckpoint, source: str) -> Tuple[List[OutputTensor], List[str]]:
    """Returns the parameters in ``base`` under MindFormers' names, without an optimizer's state, and notes."""
    if quantized_paths(base.tensors):
        raise CheckpointError(
            f"{source} is quantized already, at {examples(quantized_paths(base.tensors))}. Give "
            "the checkpoint in float."
        )
    return in_mindformers_names(base)


def _paths(tensor_names) -> List[str]:
    """Returns the paths of the linear cells and stacked experts whose weights are among the names; all MindFormers'."""
    return [path for path in map(_path, tensor_names) if names.is_linear(path) or names.is_expert_weight(path)]


def _path(name: str) -> str:
    """Returns the path of the cell that has the weight ``name``, or "" for any other parameter."""
    if names.is_expert_weight(name):
        return name
    return name[: -len(_WEIGHT)] if name.endswith(_WEIGHT) else ""


def _check_floats(source, tensors, chosen):
    for tensor in tensors:
        if _path(tensor.name) in chosen and (tensor.dtype not in FLOATS or len(tensor.shape) != 2):
            raise CheckpointError(
                f"{source}: {tensor.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, which "
                "is not a matrix of float32, float16 or bfloat16. Give the checkpoint in float."
            )


def _kept(
    base: BaseCheckpoint, tensors: List[OutputTensor], chosen: List[str], loftq: Optional[LoftqInitializer]
) -> Set[str]:
    """Returns the paths of the weights that keep their values bit for bit, since the source has them in NF4."""
    in_nf4 = base.decoded is not None and any(weight.nf4 for weight in base.decoded.weights.values())
    if not in_nf4 or loftq is not None:
        return set()
    kept = set()
    for tensor in tensors:
        pieces = (to_float32(tensor.rows(*rows)) for rows in _pieces(tensor, tensor.unit))
        if _path(tensor.name) in chosen and all(repacked(piece) is not None for piece in pieces):
            kept.add(_path(tensor.name))
    return kept


def _notes_on_kept(base: BaseCheckpoint, kept: Set[str], chosen: List[str]) -> List[str]:
    """Returns notes on a source in 4 or 8 bits: which weights keep their values, and which are rounded again."""
    notes = []
    anew = [path for path in chosen if path not in kept]
    if kept:
        notes.append(
            f"{len(kept)} weights keep the values of their NF4 bit by bit, in 5.13 bits for each number; operators of "
            "a CPU alone decode them. For an NPU, run mindlora base convert --to hf first, and quantize the result."
        )
    if base.decoded is not None and anew:
        notes.append(f"{len(anew)} weights are rounded to NF4 from what they decode to: {examples(anew)}.")
    return notes


def _entries(tensor, chosen, kept) -> list:
    """Returns (name, dtype, shape) of each tensor written in place of ``tensor``."""
    if _path(tensor.name) not in chosen:
        return [tensor[:3]]
    fields = repacked_layout(*tensor.shape) if _path(tensor.name) in kept else layout(*tensor.shape)
    return [(tensor_name(tensor.name, field), dtype, shape) for field, (shape, dtype) in fields.items()]


def _contents(
    tensors: List[OutputTensor], chosen: List[str], kept: Set[str], loftq: Optional[LoftqInitializer]
) -> Iterator[np.ndarray]:
    """Yields the pieces of all tensors, in the order of their entries."""
    for tensor in tensors:
        if _path(tensor.name) not in chosen:
            yield from (tensor.rows(*rows) for rows in _pieces(tensor, tensor.unit))
            continue
        if loftq is not None and _path(tensor.name) in loftq.paths:
            array = loftq.quantize(_path(tensor.name), tensor.name)
            yield from (getattr(array, field) for field in TENSOR_NAMES)
            continue
        # Whole groups of blocks, so that a piece gets the same bytes as within the whole weight.
        blocks = -(-tensor.shape[1] // BLOCK)
        small: Dict[str, List[np.ndarray]] = {field: [] for field in ("absmax", "scales", "offsets")}
        for begin, end in _pieces(tensor, math.lcm(tensor.unit, GROUP // math.gcd(blocks, GROUP))):
            rows = to_float32(tensor.rows(begin, end))
            same = repacked(rows) if _path(tensor.name) in kept else None
            array = quantize(rows, f"{tensor.name}, from row {begin} on,") if same is None else same
            yield array.codes
            for field, parts in small.items():
                parts.append(getattr(array, field))
        for parts in small.values():
            yield from parts


def _pieces(tensor, unit) -> Iterator[Tuple[int, int]]:
    columns = math.prod(tensor.shape[1:])
    step = max(_AT_ONCE // max(columns * unit, 1), 1) * unit
    return ((begin, min(begin + step, tensor.row_count)) for begin in range(0, tensor.row_count, step))


def _reported(pieces, progress, total) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece
        if progress:
            progress(piece.nbytes, total)
