"""Adapter: the tensors of a LoRA adapter and what is known of them, in NumPy, without a network or a file."""

import dataclasses
import math
import sys
from typing import Dict, List, Optional, Set, Tuple

import numpy as np

from mindlora.common.text import collapse_numbers, listed
from mindlora.errors import (
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
)
from mindlora.numerics.dtypes import to_float32

# A place is (path of the cell under MindFormers' names, part).
PartKey = Tuple[str, str]
PARTS = ("A", "B", "magnitude", "lambda_d", "lambda_b")
# VeRA's A and B in a file, where they stand once for all cells.
SHARED = {"A": ("", "shared A"), "B": ("", "shared B")}


@dataclasses.dataclass
class Adapter:
    """LoRA tensors by place; the weight W of the cell at a path changes by scale B A.

    With DoRA (Liu et al., 2024) each row of W + scale B A is then brought to the size that the magnitude m has for it.
    With VeRA (Kopiczko et al., 2024) W changes by diag(lambda_b) B diag(lambda_d) A, where A and B are the first
    columns and rows of what all cells have in common.

    Attributes:
        tensors (dict): (path under MindFormers' names, part) -> array: "A" [r, in] and "B" [out, r], with DoRA also
            "magnitude" [out], each in its stored dtype (tensor_file.BFLOAT16 for bfloat16).
            Where the cell is a convolution, A is [r, in, kh, kw] and B [out, r / groups, 1, 1]. With VeRA also
            "lambda_d" [r] and "lambda_b" [out]; A is as wide as the widest cell until ``narrow``.
        embeddings (set of str): The paths whose weight is a table [in, out] of embeddings, to which the transpose of
            scale B A is added.
        alphas (dict): path -> lora_alpha; empty where the file does not say. With VeRA r, so that the scale is 1.
        use_rslora (bool): Whether the scale is lora_alpha / sqrt(r) and not lora_alpha / r (Kalajdzievski, 2023).
        dropout (float): lora_dropout of the training, for whoever trains on.
        saved_modules (dict): Parameter name under MindFormers' names -> array, for modules that were trained whole
            (modules_to_save) and that take the place of the base's.
        selection (dict): PEFT's fields that select the adapted modules (target_modules, layers_to_transform, ...) as
            the file has them; empty where it has none.
        base_model (str): Name or path of the base model under Hugging Face, or None.
        fingerprint (dict): Mark of the base it was trained on, or None.
        initialization (str): lora_init of an adapter whose pairs are [A; A0] and [B, -B0], of what was trained and what that
            began with (see mindlora.initialize); None for any other.
        dialect (str): In whose form the file was, for messages.
        projection_key (int): What VeRA's A and B were drawn from; 0 where that is not known.
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

    @property
    def paths(self) -> List[str]:
        """Paths of the adapted cells, in the order of the file."""
        return list(dict.fromkeys(path for path, _ in self.tensors))

    @property
    def use_dora(self) -> bool:
        """Whether the cells have magnitudes; check_pairs sees to it that all or none have one."""
        return any(part == "magnitude" for _, part in self.tensors)

    @property
    def use_vera(self) -> bool:
        """Whether the cells have VeRA's vectors; check_pairs sees to it that all or none have them."""
        return any(part == "lambda_d" for _, part in self.tensors)

    def parts(self, path: str) -> Dict[str, np.ndarray]:
        """Returns part -> array of the cell at ``path``."""
        return {part: self.tensors[path, part] for part in PARTS if (path, part) in self.tensors}

    def rank(self, path: str) -> int:
        """Returns the rank r of the pair at ``path``."""
        return self.tensors[path, "A"].shape[0]

    def scale(self, path: str) -> float:
        """Returns lora_alpha / r of the pair at ``path``, or lora_alpha / sqrt(r) with use_rslora.

        Raises:
            ScaleMismatchError: The file does not say lora_alpha.
        """
        if path not in self.alphas:
            raise ScaleMismatchError(
                f"The adapter ({self.dialect}) does not say lora_alpha, so the scale of {path} is "
                "not known. Give the lora_alpha that it was trained with."
            )
        rank = self.rank(path)
        return self.alphas[path] / (math.sqrt(rank) if self.use_rslora else rank)

    def pair(self, path: str) -> Tuple[np.ndarray, np.ndarray]:
        """Returns A and B in float32, of which scale B A is what is added: with VeRA, with its vectors in them."""
        parts = {part: to_float32(array) for part, array in self.parts(path).items()}
        if "lambda_d" not in parts:
            return parts["A"], parts["B"]
        return parts["lambda_d"][:, None] * parts["A"], parts["lambda_b"][:, None] * parts["B"]

    def narrow(self, path: str, in_channels: Optional[int]) -> None:
        """Takes of VeRA's A the columns that are for the cell at ``path``; does nothing to a LoRA."""
        if (path, "lambda_d") in self.tensors:
            self.tensors[path, "A"] = self.tensors[path, "A"][:, :in_channels]

    def stored_tensors(self) -> Dict[PartKey, np.ndarray]:
        """Returns the tensors as they stand in a file: VeRA's A and B once, the widest, under SHARED."""
        if not self.use_vera:
            return dict(self.tensors)
        stored = {place: array for place, array in self.tensors.items() if place[1] not in SHARED}
        for part, place in SHARED.items():
            stored[place] = max((self.tensors[path, part] for path in self.paths), key=lambda array: array.size)
        return stored

    def take_shared_projection(self, source: str) -> None:
        """Gives each cell its part of VeRA's A and B, as they stood in a file: the reverse of stored_tensors.

        Raises:
            MissingTensorsError: There are vectors and no A or B.
            ShapeMismatchError: B has fewer rows than a cell has.
        """
        common = {part: self.tensors.pop(place, None) for part, place in SHARED.items()}
        if not self.use_vera:
            return
        lost = [part for part, array in common.items() if array is None]
        if lost:
            raise MissingTensorsError(
                f"{source} holds VeRA's vectors and lacks {' and '.join(lost)}, the matrices "
                "between them. Save it with them (save_projection: true)."
            )
        for path in [path for path, part in self.tensors if part == "lambda_b"]:
            rows = len(self.tensors[path, "lambda_b"])
            if rows > len(common["B"]):
                raise ShapeMismatchError(
                    f"{source}: lambda_b of {path} has {rows} elements, and B, which all cells "
                    f"have in common, is {list(common['B'].shape)}."
                )
            self.tensors[path, "A"], self.tensors[path, "B"] = common["A"], common["B"][:rows]
            self.alphas[path] = float(len(common["A"]))

    def delta(self, path: str) -> np.ndarray:
        """Returns what is added to the weight of the cell at ``path``, float32 and of its shape.

        Raises:
            ShapeMismatchError: The cell is a convolution with groups.
        """
        left, right = factors(*self.pair(path), path in self.embeddings)
        return ((left * np.float32(self.scale(path))) @ right).reshape(self.weight_shape(path))

    def weight_shape(self, path: str) -> Tuple[int, ...]:
        """Returns the shape of the weight that the pair at ``path`` is for."""
        a, b = (self.tensors[path, half].shape for half in "AB")
        return (a[1], b[0]) if path in self.embeddings else (b[0], a[1] * b[1] // a[0], *a[2:])

    def set_alpha(self, alpha: float) -> None:
        """States lora_alpha for every pair, where the file did not.

        Raises:
            ScaleMismatchError: The adapter says it itself, or ``alpha`` is no number above 0.
        """
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= sys.float_info.max:
            raise ScaleMismatchError(f"lora_alpha is {alpha!r}, it must be a number above 0.")
        if self.alphas:
            raise ScaleMismatchError(
                f"lora_alpha is {alpha:g}, but the adapter says itself: "
                f"{', '.join(f'{value:g}' for value in sorted(set(self.alphas.values())))}."
            )
        self.alphas = {path: float(alpha) for path in self.paths}

    def check_pairs(self, source: str, declared: Optional[Dict[str, int]] = None) -> None:
        """Checks that each A has its B and that their shapes agree with each other and with the declared ranks.

        Args:
            source (str): What to name in messages.
            declared (dict): path -> rank by the adapter's own configuration. Default: None.

        Raises:
            MissingTensorsError: Half of a pair is missing, or some cells have a magnitude and others none.
            ShapeMismatchError: A tensor is not a matrix, is empty, or A and B have no rank in common.
            RankMismatchError: The rank is not the declared one.
        """
        lone = [place for place in self.tensors if any((place[0], half) not in self.tensors for half in "AB")]
        if lone:
            raise MissingTensorsError(
                f"{source} lacks half of {len(lone)} pairs: it holds {listed_parts(lone)} without its other half."
            )
        for part in PARTS[2:]:
            bare = [(path, "") for path in self.paths if (path, part) not in self.tensors]
            if bare and len(bare) < len(self.paths):
                raise MissingTensorsError(
                    f"{source} has a {part} at some of its cells and lacks that of {listed_parts(bare)}."
                )
        wrong = {}
        for path in self.paths:
            a, b = self.tensors[path, "A"].shape, self.tensors[path, "B"].shape
            problem = _pair_problem(a, b, (declared or {}).get(path))
            for part, (name, size) in {
                "magnitude": ("out", b[:1]),
                "lambda_d": ("r", a[:1]),
                "lambda_b": ("out", b[:1]),
            }.items():
                found = self.parts(path).get(part, np.empty(size)).shape
                if not problem and found != size:
                    problem = (ShapeMismatchError, f"the {part} is {list(found)} and must be [{name}]")
            if problem:
                wrong.setdefault(problem, []).append(f"{path} (A {list(a)}, B {list(b)})")
        for (kind, problem), found in wrong.items():
            raise kind(f"{source}: {problem}, at {listed(found)}.")

    def check_finite(self, source: str) -> None:
        """Raises NotFiniteError where a tensor holds NaN or infinity."""
        bad = [name_of(place) for place, array in self.tensors.items() if not is_finite(array)]
        bad += [name for name, array in self.saved_modules.items() if not is_finite(array)]
        if bad:
            raise NotFiniteError(f"{source} holds tensors with NaN or infinity: {listed(bad)}.")


def factors(a: np.ndarray, b: np.ndarray, embeds: bool = False) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the matrices [rows of W, r] and [r, the rest of W] whose product is B A as it is added to W.

    Args:
        a (array): A [r, in], or of a convolution [r, in, kh, kw].
        b (array): B [out, r], or of a convolution [out, r / groups, 1, 1].
        embeds (bool): Whether W is a table [in, out]. Default: False.

    Raises:
        ShapeMismatchError: There are groups.
    """
    if a.shape[0] != b.shape[1]:
        raise ShapeMismatchError(
            f"The convolution has {a.shape[0] // b.shape[1]} groups, so that there is no change "
            "of its weight that does what A and B do. Keep the adapter unmerged."
        )
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return (a.T, b.T) if embeds else (b, a)


def row_gains(weight: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Returns what brings each row of ``weight`` to the size that ``magnitude`` [rows] gives it: float32 [rows, 1]."""
    norms = np.linalg.norm(weight, axis=1)
    # A row of zeros has no direction: what becomes of it is not finite, which whoever merges finds.
    with np.errstate(divide="ignore", invalid="ignore"):
        return (magnitude / norms).astype(np.float32)[:, None]


def is_finite(array: np.ndarray) -> bool:
    """Tells whether no element is NaN or infinite; whole numbers never are."""
    array = to_float32(array)
    # The sum is NaN or infinite where an element is: one pass without a mask as large as the array. Large finite
    # elements can overflow it too, which the second look settles.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def name_of(place: PartKey) -> str:
    """Returns a place as text, for messages."""
    return f"{place[0]} {place[1]}".strip()


def listed_parts(places) -> str:
    """Returns places as text with layer numbers put together."""
    return ", ".join(collapse_numbers([name_of(place) for place in places]))


def _pair_problem(a, b, declared) -> Optional[Tuple[type, str]]:
    """Returns the error class and the words for the shapes of a pair that do not fit, or None."""
    if (len(a), len(b)) not in ((2, 2), (4, 4)):
        return ShapeMismatchError, "A and B must be matrices"
    if 0 in a + b:
        return ShapeMismatchError, "A or B is empty"
    rank = declared if declared is not None else a[0]
    if len(a) == 4:
        if a[0] % b[1] or b[0] % (a[0] // b[1]) or a[1] % (a[0] // b[1]) or b[2:] != (1, 1):
            return ShapeMismatchError, "B of a convolution must be [out, r / groups, 1, 1]"
        b = (b[0], a[0])
    if a[0] == rank and b[1] == rank:
        return None
    if len(a) == 4:
        return RankMismatchError, f"the configuration declares rank {rank} and the tensors have {a[0]}"
    if a[1] == rank and b[0] == rank:
        return ShapeMismatchError, "A and B are swapped"
    if a[1] == rank and b[1] == rank:
        return ShapeMismatchError, "A is transposed: it must be [r, in]"
    if a[0] == rank and b[0] == rank:
        return ShapeMismatchError, "B is transposed: it must be [out, r]"
    if a[0] == b[1]:
        return RankMismatchError, f"the configuration declares rank {rank} and the tensors have {a[0]}"
    return ShapeMismatchError, "A [r, in] and B [out, r] have no rank r in common"
