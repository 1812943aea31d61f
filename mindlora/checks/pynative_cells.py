"""Which cells the PyNative trainer puts LoRA on: its search for target_modules, and what MindFormers 2.0 adds to it."""

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional

from mindlora.models import registry
from mindlora.models.architecture import Architecture

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
    """

    cells: List[str]
    leaked: List[str]


def architecture_of(model: Mapping[str, Any]) -> Optional[Architecture]:
    """Returns the record of the model that the node ``model`` of a YAML describes, or None if it is not known."""
    classes = model.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else classes
    found = registry.by_model_type(str(name))
    found = found or registry.by_hugging_face_type(str(model.get("model_type")))
    return found if found and not found.legacy else None


def adaptable_cells(architecture: Architecture, model: Mapping[str, Any]) -> List[str]:
    """Returns the paths of the linear cells and of the experts of a model, in the order in which they are built.

    Raises:
        TypeError, ValueError, ZeroDivisionError: The sizes in ``model`` cannot be worked out.
    """
    paths = list(architecture.linear_sizes(dict(model)))
    holders = [name.rpartition(".")[0] for name in architecture.parameter_sizes(dict(model))]
    paths += [path for path in dict.fromkeys(holders) if path.endswith(_EXPERTS)]
    return sorted(paths, key=_place_in_parent)


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
    searches = [_Search(re.compile(target), re.compile(exclude) if exclude else None, leaks) for leaks in (False, True)]
    right, wrong = (search.cells(tree) for search in searches)
    # In MindFormers 2.0, experts are no cells that it can adapt.
    leaked = [path for path in wrong if path not in right and not path.endswith(_EXPERTS)]
    return Selection([path[len(_HOLDER) :] for path in right], [path[len(_HOLDER) :] for path in leaked])


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
