"""merge_checkpoint: an adapter folded into a base checkpoint, block by block and verified, without a network."""

import dataclasses
import functools
import time
from typing import Callable, Dict, List, Tuple, Optional

import numpy as np

from mindlora.adapters import files as adapter_files
from mindlora.adapters import joined_pairs
from mindlora.adapters.adapter import Adapter, factors, is_finite, row_gains
from mindlora.base.reader import WORLDS, BaseCheckpoint, examples
from mindlora.base.writer import OutputTensor, Shard, check_checkpoint_output, write
from mindlora.errors import MergeError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.models import names
from mindlora.numerics.dtypes import FLOATS, ROUNDING, dtype_name, from_float32, rounded, to_float32

# Signs are random, so errors of a float32 sum of n products grow as sqrt(n); this many of their deviations is never.
_SLACK = 16 * 2.0**-24
_HEAD = "lm_head.weight"
# How the table of an embedding is called.
_TABLES = ("embedding_weight", "embedding_table")


@dataclasses.dataclass(frozen=True)
class MergeCheckpointReport:
    """What merge_checkpoint did; str() says it to people.

    Attributes:
        base, adapter, output (str): The base, the adapter and the merged checkpoint.
        files (tuple of str): The files written that hold tensors.
        merged (int): Number of tensors that an adapter was added to.
        replaced (int): Number of tensors that were trained whole and took the base's place.
        unchanged (int): Number of tensors copied as they are.
        bytes (int): Size of all tensors.
        tensor (str): The tensor whose result on a random probe changed most by rounding.
        difference (float): By how much, in the largest element.
        bound (float): By how much rounding can change that element.
        seconds (float): How long it took.
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
        return "\n".join(lines)


def merge_checkpoint(
    base: str,
    adapter: str,
    output: str,
    lora_alpha: Optional[float] = None,
    kv_heads: Optional[int] = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    progress: Optional[Callable[[int, int], None]] = None,
) -> MergeCheckpointReport:
    """Writes the base with the adapter in it, under the base's own names: W' = round(W + scale B A), with DoRA
    round(m / ||W + scale B A|| (W + scale B A)) for each row.

    The sum is taken in float32 and rounded once to the dtype that W is stored in. Each merged tensor is verified on a
    random probe x: max |x W'^T - (x W^T + scale (x A^T) B^T)| is no more than that rounding explains. Tensors that
    the adapter does not name are copied as they are, and modules that were trained whole take the base's place. What
    separates the two in form is bridged: an adapter of wq, wk, wv on a base with w_qkv, and the reverse.

    A folder of safetensors passes through as a stream and its configuration and tokenizer are copied along; a .ckpt on
    either side is in memory whole. Blocks are merged by several threads; where NumPy's products use several of their
    own, as without OPENBLAS_NUM_THREADS=1, these are in each other's way.

    Args:
        base (str): A folder of safetensors, with or without index, or a .safetensors or .ckpt file.
        adapter (str): Any form that adapter_files.read knows.
        output (str): A folder, which gets the base's division into files, or a .safetensors or .ckpt file.
        lora_alpha (float): What the adapter was trained with, where it does not say. Default: None.
        kv_heads (int): Number of key-value heads, for w_qkv. Default: None, which takes it from the config.json beside
            the base.
        allow_pickle (bool): Whether an adapter_model.bin may be read. Default: False.
        overwrite (bool): Whether to replace what stands at ``output``. Default: False.
        progress (callable): Takes the bytes of each block that is written, and of all blocks. Default: None.

    Returns:
        MergeCheckpointReport.

    Raises:
        AdapterError: The adapter cannot be read, holds NaN or infinity, does not say its scale, names what the base
            lacks (UnexpectedTensorsError) or has other shapes (ShapeMismatchError).
        CheckpointError: The base cannot be read or ``output`` stands in the way.
        MergeError: A tensor cannot be merged into, or rounding does not explain what became of it.
    """
    started = time.perf_counter()
    check_checkpoint_output(output, [base, adapter], overwrite)
    content = adapter_files.read(adapter, allow_pickle)
    if lora_alpha is not None:
        content.set_alpha(lora_alpha)
    content.check_finite(str(adapter))
    with BaseCheckpoint(base) as source:
        merging = _Merging(source, content, str(adapter), kv_heads)
        shards = [
            Shard([merging.tensor(name) for name in file.tensors], file.metadata) for file in source.files.values()
        ]
        files = write(output, shards, source.world, source.companions(), progress)
    count = len(content.paths)
    # An adapted module whose own weight the adapter holds besides is merged, and counted once.
    replaced = len(content.saved_modules) - sum(
        merging.weight_name(path) in content.saved_modules for path in content.paths
    )
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
        sum(tensor.nbytes for tensor in tensors),
        tensor,
        difference,
        bound,
        time.perf_counter() - started,
    )


class _Merging:
    """Which tensor of the base gets which pair of the adapter, and what the probes have shown so far."""

    def __init__(self, base: BaseCheckpoint, adapter: Adapter, source: str, kv_heads: int):
        self.base, self.adapter, self.source = base, adapter, source
        # Under MindFormers' names, as the adapter has them -> the base's own.
        self._own = {_under_mindformers(name, base.world): name for name in base.tensors}
        self._match_joined(kv_heads or base.config.get("num_key_value_heads") or base.config.get("num_attention_heads"))
        self._check_names()
        self._pairs = {self._own[self.weight_name(path)]: path for path in adapter.paths}
        self._wholes = {self._own[name]: array for name, array in adapter.saved_modules.items()}
        self._check_dtypes()
        for name, path in self._pairs.items():
            self._check_pair(name, path)
        for name, array in self._wholes.items():
            self._check_whole(name, array)
        self._shown: Dict[str, List[Tuple[float, float]]] = {name: [] for name in self._pairs}

    def weight_name(self, path: str) -> str:
        """Returns the name of the weight at a path of the adapter, under MindFormers' names."""
        named = (f"{path}.{leaf}" for leaf in _TABLES if path in self.adapter.embeddings)
        return next((name for name in named if name in self._own), f"{path}.weight")

    def tensor(self, name: str) -> OutputTensor:
        """Returns what is written for a tensor of the base."""
        info = self.base.tensors[name]
        rows = functools.partial(self.base.read_rows, name)
        if name in self._wholes:
            rows = functools.partial(self._replaced, name)
        if name in self._pairs:
            # Onto the adapter's own weight of the module, where it holds one, as PEFT does for output heads.
            rows = functools.partial(self._merged, name, rows)
        return OutputTensor(name, info.dtype, info.shape, rows)

    def worst(self) -> Tuple[str, Tuple[float, float]]:
        """Returns the tensor whose probe differs most, and (difference, bound)."""
        shown = {name: max(pairs) for name, pairs in self._shown.items() if pairs}
        return max(shown.items(), key=lambda item: item[1], default=("", (0.0, 0.0)))

    def _merged(self, name, own_rows, begin, end):
        path, dtype = self._pairs[name], self.base.tensors[name].dtype
        left, right = factors(*self.adapter.pair(path), path in self.adapter.embeddings)
        left, weight = left[begin:end] * np.float32(self.adapter.scale(path)), to_float32(own_rows(begin, end))
        magnitude = self.adapter.parts(path).get("magnitude")
        if magnitude is not None:
            magnitude = to_float32(magnitude[begin:end])
        rows, difference, bound = fold(weight.reshape(len(weight), -1), left, right, dtype, magnitude)
        rows = rows.reshape(weight.shape)
        # NaN is worse than any number, and so is infinity, which makes the bound infinite too.
        with np.errstate(invalid="ignore"):
            worst = int(np.argmax(np.nan_to_num(difference / bound, nan=np.inf)))
        if not (np.isfinite(difference[worst]) and difference[worst] <= bound[worst]):
            raise MergeError(
                f"{name}, row {begin + worst}: the result on a random probe is {difference[worst]:.3g} "
                f"off, where rounding to {dtype_name(dtype)} explains {bound[worst]:.3g}. The sum is too "
                "large for the dtype, or the base holds NaN or infinity. Nothing was written."
            )
        # list.append is one step, whichever thread does it.
        self._shown[name].append((float(difference[worst]), float(bound[worst])))
        return rows

    def _replaced(self, name, begin, end):
        array, dtype = self._wholes[name], self.base.tensors[name].dtype
        # A copy, since what is merged onto it is added in place.
        part = array[begin:end].copy() if array.shape else array
        with np.errstate(over="ignore"):
            rows = part if part.dtype == dtype else from_float32(to_float32(part), dtype)
        if not is_finite(rows):
            raise MergeError(
                f"{name} of {self.source} is too large for {dtype_name(dtype)}, in which the base stores "
                "it. Nothing was written."
            )
        return rows

    def _match_joined(self, kv_heads):
        """Joins or splits the adapter's pairs so that they are of the base's cells."""
        paths = set(self.adapter.paths)
        for name in list(self._own):
            path = name.rpartition(".")[0]
            if name.endswith(".weight") and path not in paths and paths.intersection(names.joined_parts(path)):
                _need_heads(path, kv_heads)
                joined_pairs.join_pairs(self.adapter, path, self._shape(name)[0], kv_heads)
        for path in paths:
            parts = [f"{part}.weight" for part in names.joined_parts(path)]
            if parts and f"{path}.weight" not in self._own and all(part in self._own for part in parts):
                _need_heads(path, kv_heads)
                head_dim = self._shape(parts[1])[0] // kv_heads if len(parts) == 3 else None
                joined_pairs.split_pairs(self.adapter, path, kv_heads, head_dim)

    def _check_names(self):
        wanted = [self.weight_name(path) for path in self.adapter.paths] + list(self.adapter.saved_modules)
        tied = self.base.config.get("tie_word_embeddings") is True
        embeddings = [path for path in self.adapter.paths if path in self.adapter.embeddings]
        if embeddings and tied:
            raise MergeError(
                f"{self.source} changes {', '.join(embeddings)}, and {self.base.path} has tied "
                "embeddings, so that the output head would change too. Save the base with lm_head.weight "
                "and tie_word_embeddings: false first."
            )
        if _HEAD in wanted and (tied or _HEAD not in self._own):
            raise MergeError(
                f"{self.source} changes lm_head, and {self.base.path} has no output head of its own: its "
                "embeddings are tied, so a change of the head would change the input embedding too. Save "
                "the base with lm_head.weight and tie_word_embeddings: false first."
            )
        absent = [name for name in wanted if name not in self._own]
        if absent:
            raise UnexpectedTensorsError(
                f"{self.source} is for {examples(absent)} (MindFormers' names), which {self.base.path} does not hold. "
                f"It has {WORLDS[self.base.world]} names: {examples(self.base.tensors)}."
            )

    def _check_pair(self, name, path):
        self.adapter.scale(path)
        self.adapter.narrow(path, self.base.tensors[name].shape[-1])
        needed = self.adapter.weight_shape(path)
        if self.base.tensors[name].shape != needed:
            raise ShapeMismatchError(
                f"{name} is {list(self.base.tensors[name].shape)} in the base, and the adapter "
                f"{self.source} is for {list(needed)}. It belongs to another model."
            )
        factors(*(self.adapter.tensors[path, half] for half in "AB"))

    def _check_whole(self, name, array):
        if array.shape != self.base.tensors[name].shape:
            raise ShapeMismatchError(
                f"{name} is {list(self.base.tensors[name].shape)} in the base and "
                f"{list(array.shape)} in {self.source}. It belongs to another model."
            )

    def _check_dtypes(self):
        wrong = [
            f"{name} ({dtype_name(self.base.tensors[name].dtype)})"
            for name in (*self._pairs, *self._wholes)
            if self.base.tensors[name].dtype not in FLOATS
        ]
        if wrong:
            raise MergeError(
                f"{self.base.path} stores {examples(wrong)}: an adapter cannot be added to quantized "
                "weights. Merge into the original checkpoint and quantize the result."
            )

    def _shape(self, name):
        return self.base.tensors[self._own[name]].shape


def fold(
    weight: np.ndarray, b: np.ndarray, a: np.ndarray, dtype: np.dtype, magnitude: np.ndarray = None
) -> Tuple[np.ndarray, ...]:
    """Returns round(W + B A) for some rows of W, and how far its results on a random probe are from W's and B A's.

    With a magnitude, each row of W + B A is brought to that size before it is rounded.

    Args:
        weight (array): Rows of W, float32 [rows, in]; its memory is used up.
        b (array): The same rows of B times the scale, float32 [rows, r].
        a (array): A, float32 [r, in].
        dtype (dtype): What to round to.
        magnitude (array): DoRA's, of the same rows, float32 [rows]. Default: None.

    Returns:
        tuple of the rows in ``dtype``, |x W'^T - (x W^T + (x A^T) B^T)| for each row, and what it may be at most.
    """
    probe = _signs(weight.shape[1])
    # What is too large for the dtype becomes infinite, which the difference shows.
    with np.errstate(over="ignore", invalid="ignore"):
        expected = weight @ probe + b @ (a @ probe)
        weight += b @ a
        if magnitude is not None:
            gains = row_gains(weight, magnitude)
            weight, expected, b = weight * gains, expected * gains[:, 0], b * gains
        rows, stored = rounded(weight, dtype)
        difference = np.abs(stored @ probe - expected).astype(np.float64)
        # x is of signs, so the sums of |x| |W'| and |x| |A| are those of |W'| and |A|.
        size = (np.abs(stored) @ np.abs(probe)).astype(np.float64)
        added = (np.abs(b) @ np.abs(a).sum(axis=1)).astype(np.float64)
    # float64 holds the sum, which is float32, as it is.
    share, least = ROUNDING.get(dtype_name(dtype), (0.0, 2.0**-150))
    return rows, difference, (share + _SLACK) * size + 2 * _SLACK * added + least * weight.shape[1]


@functools.lru_cache(maxsize=8)
def _signs(count) -> np.ndarray:
    return np.where(np.random.default_rng(count).integers(0, 2, count) == 1, np.float32(1), np.float32(-1))


def _under_mindformers(name, world) -> str:
    if world == "mindformers":
        return name
    path, _, leaf = name.rpartition(".")
    return names.parameter_to_mindformers(name) or f"{names.to_mindformers(path)}.{leaf}"


def _need_heads(path, kv_heads):
    if path.endswith("w_qkv") and not kv_heads:
        raise MergeError(
            f"{path} keeps its rows by key-value head, and how many there are is not known. Give "
            "--kv-heads: n_kv_heads of the model."
        )
