"""Adapter: the tensors of an adapter and its settings, in NumPy, independent of networks and files."""

import dataclasses
import math
import sys
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import numpy as np

from mindlora.core.errors import (
    AdapterFormatError,
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.fields import Range
from mindlora.core.numerics import pair_shapes
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.pair_shapes import Pair, PairLayout, Problem
from mindlora.core.text import collapse_numbers, listed
from mindlora.models.variants import registry
from mindlora.models.variants.registry import PARTS, SHARED, STORED
from mindlora.models.variants.variant import PartKey, Variant

# The range of lora_alpha; a whole number may be too large for a float.
ALPHA = Range("a number above 0", lambda value: 0 < value <= sys.float_info.max)
# The advice for a fault of pairs, by the error that it raises.
_ADVICE = {
    AdapterFormatError: "Merge the adapter into its base with the program that trained it.",
    RankMismatchError: "Use the configuration that was saved with the tensors.",
    ShapeMismatchError: "Save the adapter again with the program that trained it.",
}


@dataclasses.dataclass
class Adapter:
    """LoRA tensors by cell and part; the weight W of the cell at a path changes by scale B A.

    With DoRA (Liu et al., 2024) each row of W + scale B A is then rescaled to the norm that the magnitude m gives it.
    With VeRA (Kopiczko et al., 2024) W changes by diag(lambda_b) B diag(lambda_d) A, where A and B are the first
    columns and rows of a projection that all cells share.

    Attributes:
        tensors (dict): (path under MindFormers' names, part) -> array: "A" [r, in] and "B" [out, r], with DoRA also
            "magnitude" [out], each in its stored dtype (numerics.dtypes.BFLOAT16 for bfloat16).
            For a convolution, A is [r, in, kh, kw] and B [out, r / groups, 1, 1]; for the stacked
            weights of experts, A is [experts, r, in] and B [experts, out, r]. With VeRA also
            "lambda_d" [r] and "lambda_b" [out]; A is as wide as the widest cell until ``narrow``.
        embeddings (set of str): The paths whose weight is an embedding table [in, out], to which the transpose of
            scale B A is added.
        alphas (dict): path -> lora_alpha; empty if the file does not state it. With VeRA it is r, for a scale of 1.
        use_rslora (bool): Whether the scale is lora_alpha / sqrt(r) and not lora_alpha / r (Kalajdzievski, 2023).
        dropout (float): lora_dropout of the training, for further training.
        saved_modules (dict): Parameter name under MindFormers' names -> array, for modules that were trained in full
            (modules_to_save) and replace the base's.
        selection (dict): PEFT's fields that select the adapted modules (target_modules, layers_to_transform, ...) as in
            the file; empty if it has none.
        base_model (str): Name or path of the base model on Hugging Face, or None.
        fingerprint (dict): Fingerprint of the base that it was trained on, or None.
        initialization (str): lora_init, if the pairs are [A; A0] and [B, -B0], from the trained pair and the initial
            pair (A0, B0) (see mindlora.network.initialize); None otherwise.
        dialect (str): The form of the file from which it was read, for messages.
        allocation (dict): For an adapter that AdaLoRA trained: "rank", the sum of its cells' ranks; "target", that sum
            at the end of the run; and "left_out", the paths of cells without a rank. None for any other.
        projection_key (int): Seed that VeRA's A and B were drawn from; 0 if it is not known.
        peft_fields (dict): The fields of PEFT's configuration that change nothing here, as in the file:
            task_type, modules_to_save, revision, ...; empty for an adapter that was not PEFT's.
        initializer (str): "pissa", "olora" or "kasa", if A and B are for the base that it changed (see
            mindlora.files.adapters.initial_pairs); None otherwise.
        token_rows (dict): Path of an embedding -> (indices [n], rows [n, dim]) that replace rows of its table.
        invocation_tokens (tuple of int): The tokens from whose last place in a prompt on it acts (Greenewald et al.,
            aLoRA, 2025); empty if it acts on all.
        bare_prefix (str): The prefix of cells' names that the file of a bare model omits (AutoModel's
            layers.0...): "model."; "" for other files.
    """

    tensors: Dict[PartKey, np.ndarray]
    alphas: Dict[str, float] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    dropout: float = 0.0
    saved_modules: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    selection: Dict[str, object] = dataclasses.field(default_factory=dict)
    base_model: Optional[str] = None
    fingerprint: Optional[dict] = None
    initialization: Optional[str] = None
    dialect: str = ""
    embeddings: Set[str] = dataclasses.field(default_factory=set)
    projection_key: int = 0
    allocation: Optional[dict] = None
    peft_fields: Dict[str, Any] = dataclasses.field(default_factory=dict)
    initializer: Optional[str] = None
    token_rows: Dict[str, Tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    invocation_tokens: Tuple[int, ...] = ()
    bare_prefix: str = ""

    @property
    def paths(self) -> List[str]:
        """Paths of the adapted cells, in the order of the file."""
        return list(dict.fromkeys(path for path, _ in self.tensors))

    @property
    def variant(self) -> Variant:
        """The variant of all its pairs; check_pairs ensures that there is one."""
        return registry.of_parts(part for _, part in self.tensors)

    def parts(self, path: str) -> Dict[str, np.ndarray]:
        """Returns part -> array of the cell at ``path``."""
        return {part: self.tensors[path, part] for part in PARTS if (path, part) in self.tensors}

    def layout(self, path: str) -> PairLayout:
        """Returns the layout of the pair at ``path``."""
        return pair_shapes.layout_of(self.tensors[path, "A"].shape, path in self.embeddings)

    def rank(self, path: str) -> int:
        """Returns the rank r of the pair at ``path``."""
        return self.layout(path).rank(self.tensors[path, "A"].shape)

    @property
    def ranks(self) -> Tuple[int, ...]:
        """The distinct ranks of its pairs, in ascending order."""
        return tuple(sorted({self.rank(path) for path in self.paths}))

    def scale(self, path: str) -> float:
        """Returns lora_alpha / r of the pair at ``path``, or lora_alpha / sqrt(r) with use_rslora.

        Raises:
            ScaleMismatchError: The file does not state lora_alpha.
        """
        if path not in self.alphas:
            raise ScaleMismatchError(
                f"The adapter ({self.dialect}) does not state lora_alpha, so the scale of {path} is "
                "not known. Give the lora_alpha that it was trained with."
            )
        return self.alphas[path] / self.alpha_growth(self.rank(path))

    def alpha_growth(self, rank_growth: float) -> float:
        """Returns the factor on lora_alpha that keeps the scale of a pair whose rank grows by ``rank_growth``."""
        return math.sqrt(rank_growth) if self.use_rslora else rank_growth

    @property
    def base_tables(self) -> List[str]:
        """The saved modules that hold the base's own weights of adapted cells, which PEFT saves for embeddings and
        heads without naming them in modules_to_save."""
        adapted = set(self.paths)
        return [name for name in self.saved_modules if name.rpartition(".")[0] in adapted]

    @property
    def trained_modules(self) -> List[str]:
        """The saved modules that replace the base's: those without a pair."""
        tables = set(self.base_tables)
        return [name for name in self.saved_modules if name not in tables]

    def remove(self, path: str) -> None:
        """Removes the pair at ``path``."""
        self.alphas.pop(path, None)
        for part in self.parts(path):
            del self.tensors[path, part]

    def pair(self, path: str) -> Pair:
        """Returns A and B in float32, where scale B A is added to the weight; VeRA's vectors are multiplied in."""
        parts = {part: to_float32(array) for part, array in self.parts(path).items()}
        return registry.of_parts(parts).low_rank_pair(parts)

    def row_norms(self, path: str) -> Optional[np.ndarray]:
        """Returns the norms [out] that the rows of W + scale B A get (DoRA's magnitude), or None if there are none."""
        parts = self.parts(path)
        return parts.get(registry.of_parts(parts).row_norms)

    def narrow(self, path: str, in_channels: Optional[int]) -> None:
        """Cuts an A that all cells share to the columns of the cell at ``path``; None keeps all columns."""
        variant = registry.of_parts(self.parts(path))
        if not variant.own_pair and in_channels is not None:
            self.tensors[path, "A"] = variant.columns_of(self.tensors[path, "A"], in_channels)

    def stored_tensors(self) -> Dict[PartKey, np.ndarray]:
        """Returns the tensors as a file holds them: without a shared A and B for each cell.

        Shared matrices are stored once, at their largest size, under the keys SHARED.
        """
        variant = self.variant
        stored = {key: array for key, array in self.tensors.items() if key[1] in variant.own_parts}
        for half in variant.shared_parts:
            stored[SHARED[half]] = max((self.tensors[path, half] for path in self.paths), key=lambda array: array.size)
        return stored

    def complete_pairs(self, source: str) -> None:
        """Gives each cell its A and B from those that a file holds once: the inverse of stored_tensors.

        Raises MissingTensorsError if VeRA's vectors lack A or B, ShapeMismatchError if B lacks rows of a cell.
        """
        tensors = {half: self.tensors.pop(key) for half, key in SHARED.items() if key in self.tensors}
        variant = self.variant
        if variant.own_pair:
            return
        (by_row,) = variant.row_parts
        cells = [path for path, part in self.tensors if part == by_row]
        if not variant.shared_parts:
            for path in cells:
                self.tensors[path, "A"], self.tensors[path, "B"] = variant.pair_of_parts(self.parts(path))
                self.alphas[path] = float(self.rank(path))
            return
        lost = [half for half in variant.shared_parts if half not in tensors]
        if lost:
            raise MissingTensorsError(
                f"{source} holds {variant.name}'s vectors but lacks {' and '.join(lost)} of the shared "
                "projection. Save the adapter with it (save_projection: true)."
            )
        for path in cells:
            rows = len(self.tensors[path, by_row])
            if rows > len(tensors["B"]):
                raise ShapeMismatchError(
                    f"{source}: {by_row} of {path} has {rows} elements, but the shared B is "
                    f"{list(tensors['B'].shape)}: it has too few rows. Save the adapter again, with its own projection."
                )
            self.tensors[path, "A"] = tensors["A"]
            self.tensors[path, "B"] = tensors["B"][:rows]
            self.alphas[path] = float(len(tensors["A"]))

    def delta(self, path: str) -> np.ndarray:
        """Returns scale B A as it is added to the weight of the cell at ``path``: float32, in the weight's shape.

        Raises:
            ShapeMismatchError: The cell is a convolution with groups.
            ScaleMismatchError: The file does not state lora_alpha.
        """
        left, right = pair_shapes.factors(*self.pair(path), path in self.embeddings)
        return ((left * np.float32(self.scale(path))) @ right).reshape(self.weight_shape(path))

    def weight_shape(self, path: str) -> Tuple[int, ...]:
        """Returns the shape of the weight that the pair at ``path`` is for."""
        return self.layout(path).weight_shape(*(self.tensors[path, half].shape for half in "AB"))

    def set_alpha(self, alpha: float) -> None:
        """Sets lora_alpha of every pair; raises ScaleMismatchError if the file states it, or if it is not above 0."""
        if alpha not in ALPHA:
            raise ScaleMismatchError(f"lora_alpha is {alpha!r}; it must be a number above 0.")
        if self.alphas:
            raise ScaleMismatchError(
                f"lora_alpha is {alpha:g}, but the adapter has its own: "
                f"{', '.join(f'{value:g}' for value in sorted(set(self.alphas.values())))}. Leave it out."
            )
        self.alphas = {path: float(alpha) for path in self.paths}

    def check_pairs(self, source: str, declared: Optional[Dict[str, int]] = None) -> None:
        """Checks that each A has its B and that their shapes agree, also with ``declared``, path -> rank.

        Raises:
            MissingTensorsError: Half of a pair is missing, or some cells have a magnitude and others do not.
            UnexpectedTensorsError: There are parts of more than one kind of adapter.
            ShapeMismatchError: A tensor is not a matrix, is empty, or A and B have no rank in common.
            RankMismatchError: The rank is not the declared one.
        """
        lone = [(path, part) for path, part in self.tensors if not {(path, "A"), (path, "B")} <= self.tensors.keys()]
        if lone:
            raise MissingTensorsError(
                f"{source} lacks half of {len(lone)} pairs: it holds {listed_parts(lone)} without its other half. "
                "Copy or save the adapter again."
            )
        self._check_variant(source)
        names_by_problem: Dict[Problem, List[str]] = {}
        for path in self.paths:
            a, b = (self.tensors[path, half].shape for half in "AB")
            problem = self._shape_problem(path, (declared or {}).get(path))
            if problem:
                names_by_problem.setdefault(problem, []).append(f"{path} (A {list(a)}, B {list(b)})")
        for (error, problem_text), cells in names_by_problem.items():
            advice = _ADVICE[error]
            raise error(f"{source}: {problem_text}, at {listed(cells)}. {advice}")

    def _check_variant(self, source: str) -> None:
        """Checks that all cells have the parts of one variant."""
        paths = self.paths
        parts = {part for _, part in self.tensors}
        variants = [variant for variant in STORED if variant.has_any(parts)]
        for part in [part.name for variant in variants for part in variant.parts]:
            lacking = [(path, "") for path in paths if (path, part) not in self.tensors]
            if lacking:
                raise MissingTensorsError(
                    f"{source} has a {part} at some cells but none at {listed_parts(lacking)}. Copy or save the "
                    "adapter again."
                )
        if len(variants) > 1:
            raise UnexpectedTensorsError(
                f"{source} holds {' and '.join(variant.tensors for variant in variants)}: an adapter must be of one "
                "kind."
            )

    def _shape_problem(self, path: str, declared: Optional[int]) -> Optional[Problem]:
        parts = {part: array.shape for part, array in self.parts(path).items()}
        problem = pair_shapes.shape_problem(parts["A"], parts["B"], declared)
        variant = registry.of_parts(parts)
        if not problem and not variant.is_plain and self.layout(path) is pair_shapes.CONVOLUTION:
            return AdapterFormatError, f"{variant.name} on a convolution is not supported"
        for part in variant.parts:
            if not problem and parts[part.name] != part.shape(parts["A"][0], parts["B"][0]):
                shape = list(parts[part.name])
                problem = ShapeMismatchError, f"the {part.name} is {shape} and must be [{part.size}]"
        return problem

    def check_finite(self, source: str) -> None:
        """Raises NotFiniteError if a tensor holds NaN or infinity."""
        bad = [name_of(key) for key, array in self.tensors.items() if not is_finite(array)]
        bad += [name for name, array in self.saved_modules.items() if not is_finite(array)]
        bad += [f"rows of {path}" for path, (_, rows) in self.token_rows.items() if not is_finite(rows)]
        if bad:
            raise NotFiniteError(
                f"{source} holds tensors with NaN or infinity: {listed(bad)}. Use a checkpoint from before training "
                "diverged."
            )


def is_finite(array: np.ndarray) -> bool:
    """Returns whether no element is NaN or infinite; True for integers."""
    array = to_float32(array)
    # If an element is NaN or infinite, so is the sum: one pass without a mask as large as the array. Large finite
    # elements can overflow it too, so then a second pass decides.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def name_of(key: PartKey) -> str:
    """Returns a part of a cell as text, for messages."""
    return f"{key[0]} {key[1]}".strip()


def listed_parts(keys: Iterable[PartKey]) -> str:
    """Returns parts of cells as text, with layer numbers combined."""
    return ", ".join(collapse_numbers([name_of(key) for key in keys]))
