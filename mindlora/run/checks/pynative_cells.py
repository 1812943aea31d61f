"""Which cells the PyNative trainer puts LoRA on: its search for target_modules, and what MindFormers 2.0 adds to it."""

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional

from mindlora.core.errors import ConfigError
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.description import Description
from mindlora.run.checks.model import network_of as described

# The cells of a layer in the order in which the trainer builds them, where that is not the one of their record.
_BUILT_FIRST = ("linear_proj", "linear_qb", "linear_qkv")
_HOLDER = "model."
_EXPERTS = ".mlp.experts"


class Selection(NamedTuple):
    """The paths of the cells that get LoRA, as they are in the names of parameters.

    Attributes:
        cells (list of str): Those that target_modules selects.
        leaked (list of str): Those that MindFormers 2.0 adapts besides. Once a cell matches, it looks for the siblings
            that come after under the path of that cell, in which the pattern then is.
        missed (list of str): Those that MindFormers 2.0 does not adapt: the pattern holds for their own path alone.
    """

    cells: List[str]
    leaked: List[str]
    missed: List[str]

    @property
    def in_2_0(self) -> List[str]:
        """The cells that MindFormers 2.0 adapts."""
        return [path for path in (*self.cells, *self.leaked) if path not in self.missed]


def architecture_of(model: Mapping[str, Any]) -> Optional[Architecture]:
    """Returns the record of the model that the node ``model`` of a YAML describes, or None if it is not known."""
    classes = model.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else classes
    found = registry.by_model_type(str(name))
    found = found or registry.by_hugging_face_type(str(model.get("model_type")))
    return found if found and not found.legacy else None


def network_of(model: Mapping[str, Any]) -> Optional[Description]:
    """Returns the description of that model, or None if it is not known, or its sizes cannot be worked out."""
    architecture = architecture_of(model)
    try:
        return described(architecture, dict(model)) if architecture else None
    except ConfigError:
        return None


def adaptable_cells(network: Description) -> List[str]:
    """Returns the paths of the linear cells and of the experts of a model, in the order in which they are built."""
    paths = [re.sub(r"\.weight[12]$", "", path.removeprefix(_HOLDER)) for path in network.cells]
    return sorted(dict.fromkeys(paths), key=_place_in_parent)


def select(paths: Iterable[str], target: str, exclude: Optional[str] = None) -> Selection:
    """Returns which of the cells at ``paths``, in their order, LoRA is put on.

    Args:
        paths (iterable of str): As adaptable_cells returns them.
        target (str): target_modules, searched in "model." and the path.
        exclude (str): exclude_layers. Default: None.
    """
    tree: Dict[str, Any] = {}
    for path in paths:
        node = tree
        for part in (_HOLDER + path).split("."):
            node = node.setdefault(part, {})
    search = _Search(re.compile(target), re.compile(exclude) if exclude else None, leaks=False)
    right = [path.removeprefix(_HOLDER) for path in search.cells(tree)]
    in_2_0 = [path.removeprefix(_HOLDER) for path in search._replace(leaks=True).cells(tree)]
    # MindFormers 2.0 puts no LoRA on experts.
    leaked = [path for path in in_2_0 if path not in right and not path.endswith(_EXPERTS)]
    missed = [path for path in right if path not in in_2_0 or path.endswith(_EXPERTS)]
    return Selection(right, leaked, missed)


class _Search(NamedTuple):
    target: "re.Pattern[str]"
    exclude: Optional["re.Pattern[str]"]
    leaks: bool

    def cells(self, tree: Dict[str, Any], path: str = "", searched: str = "") -> List[str]:
        """Returns the paths of the cells below ``tree``, which is at ``path`` and is searched as ``searched``."""
        found: List[str] = []
        for name, children in tree.items():
            below = f"{path}.{name}" if path else name
            text = f"{searched}.{name}" if searched else name
            if self.exclude and self.exclude.search(text):
                continue
            if children:
                found += self.cells(children, below, text)
            elif self.target.search(text):
                found.append(below)
                if self.leaks:
                    # It takes the name of the parameter for the path that its siblings are under.
                    searched = below[len(_HOLDER) :]
        return found


def _place_in_parent(path: str) -> int:
    leaf = path.rpartition(".")[2]
    return _BUILT_FIRST.index(leaf) if leaf in _BUILT_FIRST else len(_BUILT_FIRST)
