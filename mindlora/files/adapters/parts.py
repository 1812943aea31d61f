"""The parts of a Stable Diffusion adapter: its paths begin with unet, text_encoder or text_encoder_2."""

import dataclasses
from typing import Iterable, List, NamedTuple, Optional, Tuple

from mindlora.core.errors import AdapterError, LoraError
from mindlora.core.numerics.pair_shapes import CONVOLUTION
from mindlora.core.text import listed, suggestion
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.matching import rename
from mindlora.models import names
from mindlora.models.architectures.diffusion import PARTS, part_of

_CLIP = "text_model."


class Wanted(NamedTuple):
    """The part of a Stable Diffusion adapter to read, and the paths of its network.

    Attributes:
        part (str): "unet", "text_encoder" or "text_encoder_2"; None for all parts.
        paths (tuple of str): Paths of the network's cells, for kohya's names; if empty, the paths that mindlora
            knows.
    """

    part: Optional[str] = None
    paths: Tuple[str, ...] = ()


ALL = Wanted()


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of an adapter: its number of cells, how many of them are convolutions, and their distinct ranks."""

    part: str
    cells: int
    convolutions: int
    ranks: Tuple[int, ...]

    def __str__(self) -> str:
        convolutions = f", {self.convolutions} of them convolutions" if self.convolutions else ""
        cells = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        return f"{self.part}: {cells}{convolutions}, rank {', '.join(map(str, self.ranks))}"


def check_part(part: Optional[str]) -> None:
    """Raises LoraError if ``part`` is not one of PARTS or None."""
    if part is not None and part not in PARTS:
        raise LoraError(f"part is {part!r}, which is none of {', '.join(PARTS)}.{suggestion(part, list(PARTS))}")


def check_holds(part: Optional[str], held: Iterable[str], source: str) -> None:
    """Raises AdapterError if ``part`` is neither None nor among the parts that were found in a file."""
    if part is not None and part not in held:
        raise AdapterError(
            f"{source} holds nothing of the part {part}: it holds {', '.join(sorted(held))}. Choose a part that it "
            "holds."
        )


def split(path: str) -> Tuple[Optional[str], str]:
    """Returns the part with which ``path`` begins, or None, and the rest of the path."""
    head, _, rest = path.partition(".")
    return (head, rest) if head in PARTS and rest else (None, path)


def found_in(paths: Iterable[str]) -> List[str]:
    """Returns the parts with which any of the paths begins, in the order of PARTS."""
    present = {split(path)[0] for path in paths}
    return [part for part in PARTS if part in present]


def reports(adapter: Adapter) -> Tuple[PartReport, ...]:
    """Returns a report on each part of an adapter; empty if its paths have no parts."""
    part_reports = []
    for part in found_in(adapter.paths):
        paths = [path for path in adapter.paths if split(path)[0] == part]
        convolutions = sum(adapter.layout(path) is CONVOLUTION for path in paths)
        part_reports.append(PartReport(part, len(paths), convolutions, tuple(sorted(set(map(adapter.rank, paths))))))
    return tuple(part_reports)


def read_paths(file: Optional[str]) -> Tuple[str, ...]:
    """Returns the paths in a text file, one per line; () if ``file`` is None. Raises LoraError if it holds none."""
    if file is None:
        return ()
    try:
        with open(file, encoding="utf-8") as lines:
            paths = tuple(line.strip() for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise LoraError(
            f"{file} cannot be read as a list of paths: {error}. Give a text file in UTF-8 with one path per line."
        ) from error
    if not paths:
        raise LoraError(f"{file} is empty: it must hold the paths of the network's cells, one in a line.")
    return paths


def take(adapter: Adapter, part: Optional[str], source: str) -> None:
    """Keeps ``part`` of an adapter, unless it is None; paths without parts are assigned to it.

    Raises AdapterError if the adapter has other parts only.
    """
    if part is None:
        return
    present = found_in(adapter.paths)
    if not present:
        rename(adapter, {path: f"{part}.{path}" for path in adapter.paths})
    else:
        check_holds(part, present, source)
    for path in adapter.paths:
        if split(path)[0] != part:
            adapter.remove(path)


def of_one_model(adapter: Adapter, source: str) -> None:
    """Removes the part's name from the paths of an adapter; raises AdapterError if it has several parts."""
    present = found_in(adapter.paths)
    if len(present) > 1:
        raise AdapterError(
            f"{source} holds {' and '.join(present)}, which are networks of their own. Choose one with part (--part "
            f"{present[0]})."
        )
    rename(adapter, {path: split(path)[1] for path in adapter.paths})


def for_network(adapter: Adapter, paths: Iterable[str], source: str) -> None:
    """Renames an adapter to the paths of a network: with the parts' names if the network has them, without otherwise.

    Raises AdapterError if the adapter has several parts, and the network is one of them.
    """
    network_paths = list(paths)
    present = found_in(adapter.paths)
    if not present:
        return
    if not set(present) <= set(found_in(network_paths)):
        of_one_model(adapter, source)
    # Newer versions of transformers leave this level of CLIP out.
    if not any(_CLIP in path for path in network_paths):
        rename(adapter, {path: path.replace(_CLIP, "", 1) for path in adapter.paths})


def with_parts(adapter: Adapter, form: str) -> List[Tuple[str, str, str]]:
    """Returns (path, part, path in the part) of each pair; raises AdapterError if a path belongs to no known part."""
    cells_of_parts = []
    unknown = []
    for path in adapter.paths:
        # A text encoder's q_proj may have been renamed like a Llama's.
        part, rest = split(names.to_hugging_face(path))
        part = part or part_of(rest)
        if part is None:
            unknown.append(path)
        else:
            cells_of_parts.append((path, part, canonical(part, rest)))
    if unknown:
        raise AdapterError(
            f"Format {form!r} is for Stable Diffusion, but these cells are neither a UNet's nor a text encoder's under "
            f"diffusers' names: {listed(unknown)}. Say which part they are with part (--part), or write another format."
        )
    return cells_of_parts


def canonical(part: str, path: str) -> str:
    """Returns a path in a part as in files: the text encoders' layers below text_model."""
    return _CLIP + path if part != "unet" and path.startswith("encoder.") else path
