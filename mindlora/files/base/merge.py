"""merge_checkpoint: folds an adapter into a base checkpoint, block by block and verified, without a network."""

import dataclasses
import functools
import os
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.core.errors import LoraError, MergeError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.formats import gguf_file
from mindlora.core.numerics.dtypes import FLOATS, dtype_name, from_float32, to_float32
from mindlora.core.numerics.folding import fold_and_probe, worst_of
from mindlora.core.numerics.pair_shapes import EMBEDDING, Shape, factors
from mindlora.core.text import examples
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import tied_embeddings
from mindlora.files.adapters.adapter import Adapter, is_finite
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.fingerprint import ON_BASE_MISMATCH
from mindlora.files.adapters.matching import CellShape, arrange, rename_for
from mindlora.files.base import llama_cpp, writer
from mindlora.files.base.quantized.decode import CONFIG_NOTE
from mindlora.files.base.reader import CONFIG, WORLDS, BaseCheckpoint
from mindlora.files.base.tokenizer_files import GENERATION, stopping_at_turn_end, tokenizer_files
from mindlora.files.base.trained_base import check_trained_base
from mindlora.files.base.writer import PYNATIVE, OutputTensor, Shard, check_checkpoint_output, is_file_name, write
from mindlora.models import names
from mindlora.models.architectures.architecture import LEGACY, MCORE

# Names of an embedding's table.
_TABLES = ("embedding_weight", "embedding_table")


@dataclasses.dataclass(frozen=True)
class MergeCheckpointReport:
    """The result of merge_checkpoint; str() gives it as text.

    Attributes:
        files (tuple of str): The written files that hold tensors.
        merged (int): Number of tensors that an adapter was added to.
        replaced (int): Number of tensors that saved modules (modules_to_save) replaced.
        unchanged (int): Number of tensors copied as they are.
        bytes (int): Size of all tensors, or of the GGUF file.
        tensor (str): The tensor whose result on a random probe differs most from the exact one.
        difference (float): The difference in its largest element.
        bound (float): How much rounding can change that element.
        notes (tuple of str): Parts of the base that were left out.
    """

    base: str
    adapter: str
    output: str
    files: Tuple[str, ...]
    merged: int
    replaced: int
    unchanged: int
    bytes: int
    tensor: str
    difference: float
    bound: float
    notes: Tuple[str, ...]
    seconds: float

    def __str__(self):
        lines = [
            f"{self.output}: {self.bytes / 1e9:.2f} GB; tensors merged: {self.merged}, replaced: {self.replaced}, "
            f"unchanged: {self.unchanged}, files: {len(self.files)}; {self.seconds:.1f} s."
        ]
        if self.merged:
            lines.append(
                f"Largest difference of a tensor's result on a random probe: {self.difference:.3g}, at "
                f"{self.tensor}; rounding explains up to {self.bound:.3g}."
            )
        return "\n".join([*lines, *self.notes])


def merge_checkpoint(
    base: str,
    adapter: str,
    output: str,
    lora_alpha: Optional[float] = None,
    kv_heads: Optional[int] = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    progress: Optional[Callable[[int, int], None]] = None,
    outtype: str = gguf_file.F16,
    on_base_mismatch: str = "error",
) -> MergeCheckpointReport:
    """Writes the base with the adapter merged, under the base's own names: W' = round(W + scale B A), with DoRA
    round(m / ||W + scale B A|| (W + scale B A)) for each row.

    Where the base has one table for embedding and output head, and the adapter changes one of the two or both in
    different ways, they are written as two (tie_word_embeddings: False), since the adapter was trained for
    two. Where both change alike (PEFT's ensure_weight_tying), they stay one.

    The sum is formed in float32 and rounded once, to the stored dtype of W. Each merged tensor is checked on a
    random probe (see mindlora.core.numerics.folding.fold_and_probe). Saved modules replace the base's tensors, and all
    other tensors are copied as they are. The adapter's pairs are joined or split as the base requires: an adapter of
    wq, wk and wv goes onto a base with w_qkv, and the reverse.

    A folder of safetensors passes through as a stream, and its configuration and tokenizer are copied along. A base in
    a .ckpt is held in memory as a whole. Several threads merge blocks, so NumPy's products should use one thread each:
    set OPENBLAS_NUM_THREADS=1.

    Args:
        base (str): A folder of safetensors, with or without index, or a .safetensors or .ckpt file.
        adapter (str): An adapter in any form that adapter_files.read takes.
        output (str): A folder, divided into files like the base, or a .safetensors or .ckpt file; or a .gguf
            file for llama.cpp, with the tokenizer in it, if the base is a folder from Hugging Face.
        lora_alpha (float): The adapter's lora_alpha, if its files do not state it. Default: None.
        kv_heads (int): Number of key-value heads, for w_qkv. Default: None, which takes it from the config.json beside
            the base.
        allow_pickle (bool): Whether an adapter_model.bin may be read. Default: False.
        overwrite (bool): Whether to replace an existing ``output``. Default: False.
        progress (callable): Takes the size of each written block and the total size, in bytes. Default: None.
        outtype (str): How a .gguf file stores weights: "f32", "f16" or "q8_0" (8 bits and a scale for each 32
            elements). Default: "f16".
        on_base_mismatch (str): The reaction to an adapter that was trained on another base: "error", "warn" (a
            note of the report) or "ignore". Default: "error".

    Returns:
        MergeCheckpointReport.

    Raises:
        AdapterError: The adapter cannot be read, holds NaN or infinity, has no lora_alpha, is for tensors that the base
            lacks (UnexpectedTensorsError) or has other shapes (ShapeMismatchError).
        BaseMismatchError: The adapter was trained on another base, with on_base_mismatch "error".
        CheckpointError: The base cannot be read or cannot become a GGUF file, or ``output`` exists.
        InstallationError: ``output`` is a .gguf file, and the package gguf is not installed.
        MergeError: A tensor cannot be merged into, or its result differs by more than rounding explains.
    """
    started = time.perf_counter()
    if on_base_mismatch not in ON_BASE_MISMATCH:
        raise LoraError(f"on_base_mismatch is {on_base_mismatch!r}: it must be 'warn', 'error' or 'ignore'.")
    check_checkpoint_output(output, [base, adapter], overwrite)
    is_gguf = str(output).endswith(gguf_file.ENDING)
    content = _read_adapter(adapter, lora_alpha, allow_pickle)
    with BaseCheckpoint(base) as source:
        if is_gguf:
            llama_cpp.check(source.folder, source.world, source.config, outtype)
        merging = _Merging(source, content, str(adapter), kv_heads, on_base_mismatch)
        shards = merging.shards
        changed = {**source.config, **merging.changed_config}
        config = changed if source.config and (merging.changed_config or source.decoded) else None
        tokenizer = tokenizer_files(str(adapter), source.folder, source.companions(), merging.tokens)
        if source.is_pynative:
            shards = writer.shards_in_trainers_form(shards, source.expert_heights)
        stopping: List[str] = []
        if is_gguf:
            files = [_write_gguf(output, source, tokenizer.folder, shards, config or source.config, outtype, progress)]
        else:
            written = PYNATIVE if source.is_step else source.world
            contents = {CONFIG: config} if config else {}
            if not is_file_name(output):
                generation, stopping = stopping_at_turn_end(tokenizer.companions, merging.tokens)
                contents.update({GENERATION: generation} if generation else {})
                merging.notes.extend([CONFIG_NOTE] if source.decoded and config else [])
            files = write(output, shards, written, tokenizer.companions, contents, progress)
    count = len(content.paths)
    # An adapted module whose own weight is in the adapter too counts as merged, once.
    tables = {merging.weight_name(path, True) for path in content.token_rows}.union(content.saved_modules)
    replaced = len(tables) - sum(merging.weight_name(path) in tables for path in content.paths)
    tensor, (difference, bound) = merging.worst()
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    return MergeCheckpointReport(
        str(base),
        str(adapter),
        str(output),
        tuple(files),
        count,
        replaced,
        len(tensors) - count - replaced,
        os.path.getsize(output) if is_gguf else sum(tensor.nbytes for tensor in tensors),
        tensor,
        difference,
        bound,
        (*source.left_out, *merging.notes, *tokenizer.notes, *stopping),
        time.perf_counter() - started,
    )


def _read_adapter(path: str, lora_alpha: Optional[float], allow_pickle: bool) -> Adapter:
    adapter = adapter_files.read(path, allow_pickle, extras=Extras(initial_pairs=True, token_rows=True))
    if lora_alpha is not None:
        adapter.set_alpha(lora_alpha)
    adapter.check_finite(str(path))
    return adapter


def _write_gguf(
    output: str,
    source: BaseCheckpoint,
    tokenizer: str,
    shards: List[Shard],
    config: Mapping[str, Any],
    outtype: str,
    progress: Optional[Callable[[int, int], None]],
) -> str:
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    total = sum(tensor.nbytes for tensor in tensors)

    def tick(nbytes: int) -> None:
        if progress:
            progress(nbytes, total)

    llama_cpp.write(output, source.folder, config, tensors, outtype, tick, tokenizer)
    return output


class _Merging:
    """Which tensor of the base gets which pair of the adapter, and the differences found on the probes so far."""

    def __init__(
        self, base: BaseCheckpoint, adapter: Adapter, source: str, kv_heads: Optional[int], on_base_mismatch: str
    ):
        self.base = base
        self.adapter = adapter
        self.source = source
        # The tensors to write, by the base's own names.
        self._tensors = dict(base.tensors)
        # MindFormers' name of a tensor, as in the adapter -> the base's own name.
        self._own = {_under_mindformers(name, base): name for name in base.tensors}
        adapter.saved_modules = {
            names.parameter_in_adapters(base_name): each for base_name, each in adapter.saved_modules.items()
        }
        heads = kv_heads or base.config.get("num_key_value_heads") or base.config.get("num_attention_heads")
        if base.world == MCORE:
            rename_for(adapter, base.architecture)
        # The base's own names for the embedding's table, and for the head that gets a copy of it.
        self._table = base.architecture.embedding_table(base.world)
        self._new_head: Optional[str] = None
        self._settle_head()
        self.notes = self._check_base(heads, on_base_mismatch)
        arrange(adapter, self._cell_shapes(heads), lambda path: to_float32(self._whole(f"{path}.weight")))
        self._check_names()
        self._pairs = {self._own[self.weight_name(path)]: path for path in adapter.paths}
        self._saved_modules = {self._own[name]: array for name, array in adapter.saved_modules.items()}
        self._rows = {
            self._own[self.weight_name(path, True)]: (path, rows) for path, rows in adapter.token_rows.items()
        }
        self._check_dtypes()
        shapes = {name: self._tensors[base_name].shape for name, base_name in self._own.items()}
        self._grown = {self._own[name]: shape for name, shape in _grown_tables(adapter, shapes, source).items()}
        for name, path in self._pairs.items():
            _check_not_transposed(path, name, shapes)
        for name, path in self._pairs.items():
            self._check_pair(name, path)
        for name, (path, (indices, rows)) in self._rows.items():
            self._check_rows(name, path, indices, rows)
        for name, array in self._saved_modules.items():
            self._check_saved_module(name, array)
        # A tensor's blocks follow one another, and all of them need its factors.
        self._factors = functools.lru_cache(maxsize=4)(self._factors_of)
        self._found: Dict[str, List[Tuple[float, float]]] = {name: [] for name in self._pairs}
        # The fields of config.json that change.
        self.changed_config: Dict[str, Any] = {}
        self._note_changes()

    def _note_changes(self):
        """Records changes of the model's configuration: a larger vocabulary, and an untied head."""
        for vocabulary, _ in list(self._grown.values())[:1]:
            self.changed_config["vocab_size"] = vocabulary
            self.notes.append(
                f"The vocabulary has {vocabulary} tokens with this adapter: build the model with vocab_size "
                f"{vocabulary}."
            )
        if self._new_head:
            self.changed_config["tie_word_embeddings"] = False
            self.notes.append(
                f"Embedding and output head, one table in the base, are two with this adapter: {self._new_head} is "
                "beside the embedding. Build the model with tie_word_embeddings: False."
            )

    @property
    def names_by_file(self) -> Dict[str, List[str]]:
        """Name of a file of the base -> the names of the tensors written in place of its own."""
        by_file = self.base.names_by_file
        for tensors in by_file.values():
            if self._new_head and self._table in tensors and self._new_head not in self.base.tensors:
                tensors.insert(tensors.index(self._table) + 1, self._new_head)
        return by_file

    @property
    def tokens(self) -> int:
        """The number of tokens in the merged model's embedding; 0 without one."""
        return self._shape_of(self._table)[0] if self._table in self._tensors else 0

    @property
    def shards(self) -> List[Shard]:
        """The files to write: one for each of the base's, with its tensors or their replacements."""
        shards = []
        for file, tensor_names in self.names_by_file.items():
            shards.append(Shard(list(map(self.tensor, tensor_names)), self.base.files[file].metadata))
        return shards

    def weight_name(self, path: str, embeds: bool = False) -> str:
        """Returns the name of the weight at a path of the adapter, under MindFormers' names."""
        if not embeds and self.adapter.layout(path).stacked:
            return path
        named = (f"{path}.{leaf}" for leaf in _TABLES if embeds or path in self.adapter.embeddings)
        return next((name for name in named if name in self._own), f"{path}.weight")

    def tensor(self, name: str) -> OutputTensor:
        """Returns the tensor written in place of the base's tensor ``name``."""
        info = self._tensors[name]
        rows = functools.partial(self._read_rows, name)
        if name in self._saved_modules:
            rows = functools.partial(self._replaced, name)
        if name in self._rows:
            rows = functools.partial(self._with_rows, name)
        if name in self._pairs:
            # Added to the saved module if the adapter also holds one of the same cell, as PEFT does for output heads.
            rows = functools.partial(self._merged, name, rows)
        return OutputTensor(name, info.dtype, self._shape_of(name), rows)

    def worst(self) -> Tuple[str, Tuple[float, float]]:
        """Returns the tensor with the largest difference on its probe, and (difference, bound)."""
        errors = {name: max(pairs) for name, pairs in self._found.items() if pairs}
        return max(errors.items(), key=lambda item: item[1], default=("", (0.0, 0.0)))

    def _read_rows(self, name, begin, end):
        return self.base.read_rows(self._table if name == self._new_head else name, begin, end)

    def _factors_of(self, path):
        """Returns the matrices whose products are added to a weight: one pair, or one for the rows of each expert."""
        left, right = factors(*self.adapter.pair(path), path in self.adapter.embeddings)
        left = left * np.float32(self.adapter.scale(path))
        return left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:])

    def _merged(self, name, own_rows, begin, end):
        path = self._pairs[name]
        dtype = self._tensors[name].dtype
        left, right = self._factors(path)
        magnitude = self.adapter.row_norms(path)
        weight = to_float32(own_rows(begin, end))
        parts = []
        height = left.shape[1]
        for index in range(begin // height, -(-end // height)):
            first = max(begin, index * height)
            last = min(end, (index + 1) * height)
            norms = None if magnitude is None else to_float32(magnitude[first:last])
            block = weight[first - begin : last - begin].reshape(last - first, -1)
            expert_weight = left[index, first - index * height : last - index * height]
            parts.append(fold_and_probe(block, expert_weight, right[index], dtype, norms))
        rows, difference, bound = (part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*parts))
        rows = rows.reshape(weight.shape)
        worst, explained = worst_of(difference, bound)
        if not explained:
            raise MergeError(
                f"{name}, row {begin + worst[0]}: the result on a random probe is {difference[worst]:.3g} "
                f"off, where rounding to {dtype_name(dtype)} explains {bound[worst]:.3g}. The sum is too "
                "large for the dtype, or the base holds NaN or infinity. Nothing was written: use a base in a wider "
                "dtype, or one without NaN."
            )
        # Several threads come here; list.append is atomic.
        self._found[name].append((float(difference[worst]), float(bound[worst])))
        return rows

    def _replaced(self, name, begin, end):
        array = self._saved_modules[name]
        dtype = self._tensors[name].dtype
        # A copy, because a pair is added to it in place.
        part = array[begin:end].copy() if array.shape else array
        with np.errstate(over="ignore"):
            rows = part if part.dtype == dtype else from_float32(to_float32(part), dtype)
        if not is_finite(rows):
            raise MergeError(
                f"{name} of {self.source} is too large for {dtype_name(dtype)}, the dtype that the base stores it in. "
                "Nothing was written. Convert the base to a dtype with more range first."
            )
        return rows

    def _with_rows(self, name, begin, end):
        """Returns rows of an embedding, some of them the adapter's (PEFT's trainable_token_indices)."""
        table = self._read_rows(name, begin, end)
        _, (indices, rows) = self._rows[name]
        inside = (indices >= begin) & (indices < end)
        table[indices[inside] - begin] = from_float32(to_float32(rows[inside]), table.dtype)
        return table

    def _whole(self, name: str) -> np.ndarray:
        """Returns a tensor of the base, by its name under MindFormers' names."""
        base_name = self._own[name]
        return self._read_rows(base_name, 0, self._tensors[base_name].shape[0])

    def _cell_shapes(self, kv_heads: Optional[int]) -> Dict[str, CellShape]:
        """Returns the properties of the base's cells for matching, by their paths under MindFormers' names."""
        shapes = {}
        for name, base_name in self._own.items():
            shape = self._tensors[base_name].shape
            experts = names.is_expert_weight(name)
            if experts or name.endswith(".weight"):
                path = name.removesuffix(".weight")
                shapes[path] = CellShape(shape[-1], shape[0], kv_heads, name=path, experts=experts)
        return shapes

    def _check_names(self):
        expected = [self.weight_name(path) for path in self.adapter.paths] + list(self.adapter.saved_modules)
        expected += [self.weight_name(path, True) for path in self.adapter.token_rows]
        absent = [name for name in expected if name not in self._own]
        if absent:
            raise UnexpectedTensorsError(
                f"{self.source} is for {examples(absent)} (MindFormers' names), which {self.base.path} does not hold. "
                f"It has {WORLDS[self.base.world]} names: {examples(self.base.tensors)}. Give the base that the "
                "adapter was trained on."
            )

    def _settle_head(self):
        """Gives the head of a base with tied embeddings its own table, if PEFT has two with this adapter."""
        head = self.base.architecture.head_weight(LEGACY)
        is_tied = self.base.config.get("tie_word_embeddings", head not in self._own)
        if not is_tied or self._table not in self.base.tensors:
            return
        tied_embeddings.complete_pairs(self.adapter)
        if not tied_embeddings.unties(self.adapter):
            tied_embeddings.drop_equal_head(self.adapter)
            return
        self._new_head = self.base.architecture.head_weight(self.base.world)
        self._own[head] = self._new_head
        self._tensors[self._new_head] = self.base.tensors[self._table]

    def _check_base(self, kv_heads: Optional[int], on_base_mismatch: str) -> List[str]:
        """Compares the base with the one of the adapter's training, as check_trained_base does."""
        weights = {}
        for name in self._own:
            path, _, leaf = name.rpartition(".")
            if names.is_expert_weight(name) or leaf in ("weight", *_TABLES):
                weights[name if names.is_expert_weight(name) else path] = name
        shapes = {path: self._tensors[self._own[name]].shape for path, name in weights.items()}
        read = {path: functools.partial(self._whole, name) for path, name in weights.items()}
        return check_trained_base(
            self.adapter, self.source, shapes, lambda path: read[path](), kv_heads, on_base_mismatch
        )

    def _check_pair(self, name, path):
        adapter = self.adapter
        adapter.scale(path)
        if adapter.layout(path) is EMBEDDING and adapter.row_norms(path) is not None:
            raise MergeError(
                f"{self.source} is a DoRA adapter of {path}, an embedding, whose magnitude is of the columns of "
                f"{name}, and only that of rows can be merged. Merge it with PEFT (merge_and_unload)."
            )
        shape = tuple(self._shape_of(name))
        needed = tuple(adapter.weight_shape(path))
        if shape != needed:
            raise ShapeMismatchError(
                f"{name} is {list(shape)} in the base, and the adapter {self.source} is for {list(needed)}. It belongs "
                "to another model: give the base that it was trained on."
            )
        factors(adapter.tensors[path, "A"], adapter.tensors[path, "B"])

    def _shape_of(self, name):
        """Returns the shape that a tensor of the base will have when written."""
        return self._grown.get(name, self._tensors[name].shape)

    def _check_rows(self, name, path, indices, rows):
        shape = self._tensors[name].shape
        if rows.shape[1:] != shape[1:] or indices.size and indices.max() >= shape[0]:
            raise ShapeMismatchError(
                f"{name} is {list(shape)} in the base, and {self.source} holds rows {', '.join(map(str, indices[:9]))} "
                f"of {path} as {list(rows.shape)}. Give the base that the adapter was trained on."
            )

    def _check_saved_module(self, name, array):
        if array.shape != self._shape_of(name):
            raise ShapeMismatchError(
                f"{name} is {list(self._tensors[name].shape)} in the base and {list(array.shape)} in "
                f"{self.source}. It belongs to another model: give the base that the adapter was trained on."
            )

    def _check_dtypes(self):
        wrong = [
            f"{name} ({dtype_name(self._tensors[name].dtype)})"
            for name in (*self._pairs, *self._saved_modules, *self._rows)
            if self._tensors[name].dtype not in FLOATS
        ]
        is_loftqs = (self.adapter.fingerprint or {}).get("quantization") == "loftq"
        if wrong:
            advice = "Merge into the original checkpoint and quantize the result."
            if is_loftqs:
                advice = (
                    f"{self.source} is LoftQ's, for such a base alone, and has no merged form: train it and serve it "
                    "on the quantized base."
                )
            raise MergeError(
                f"{self.base.path} stores {examples(wrong)}: an adapter cannot be added to quantized weights. {advice}"
            )


def _under_mindformers(name, base) -> str:
    if base.world == LEGACY:
        return name
    path, _, leaf = name.rpartition(".")
    # The record of the base first: two mcore models have a cell called linear_qkv.
    renamed = base.architecture.rename_parameter(name, base.world, LEGACY) or names.parameter_to_mindformers(name)
    if base.world == MCORE and names.to_mindformers(name) != name:
        return names.to_mindformers(name)  # A stacked weight of experts, which counts as a cell in adapters.
    if not renamed and names.parameter_in_adapters(name) != name:
        return names.parameter_in_adapters(name)
    return renamed or f"{names.to_mindformers(path)}.{leaf}"


def _grown_tables(adapter: Adapter, shapes: Mapping[str, Shape], source: str) -> Dict[str, Shape]:
    """Returns the saved embedding and head that have another number of tokens than the base's: name -> new shape.

    ``shapes`` are the base's, under MindFormers' names. Raises ShapeMismatchError if the file has only one of the two,
    or they differ in size.
    """
    saved = {name: array.shape for name, array in adapter.saved_modules.items()}
    grown = {
        name: shape
        for name, shape in saved.items()
        if tied_embeddings.is_of_vocabulary(name) and shape[:1] != shapes[name][:1] and shape[1:] == shapes[name][1:]
    }
    tables = [name for name in shapes if tied_embeddings.is_of_vocabulary(name) and len(shapes[name]) == 2]
    if grown and {saved.get(name, shapes[name])[0] for name in tables} != {next(iter(grown.values()))[0]}:
        name = next(iter(grown))
        tied_embeddings.check_vocabulary(name, saved[name], shapes[name], source)
    return grown


def _check_not_transposed(path: str, name: str, shapes: Mapping[str, Shape]) -> None:
    """Raises MergeError if the base stores its linear weights [in, out], as GPT-2's Conv1D does.

    A bias has one element for each output, which decides for weights that are not square. ``name`` is the base's name
    for the weight; ``shapes`` are under MindFormers' names.
    """
    if f"{path}.bias" in shapes and any(_is_transposed(other, shapes) for other in shapes):
        raise MergeError(
            f"{name} is stored transposed, [in, out], as GPT-2's Conv1D has it (fan_in_fan_out), and only weights "
            "[out, in] can be merged into. Merge with PEFT (merge_and_unload)."
        )


def _is_transposed(name: str, shapes: Mapping[str, Shape]) -> bool:
    path, _, leaf = name.rpartition(".")
    shape = shapes[name]
    bias = shapes.get(f"{path}.bias")
    return leaf == "weight" and len(shape) == 2 and shape[0] != shape[1] and bias == (shape[1],)
