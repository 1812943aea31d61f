"""The tensors that a graph of MindSpore keeps from its forward for its backward, counted in the optimized graph.

MindSpore writes the graph of a training step as text, after all passes of its frontend: one operator a line, with the
scope that it comes from. Operators of the backward have a scope that begins with Gradients, or are marked as made again
by recomputation, or take what such an operator makes. A tensor is kept if an operator of the forward makes it and one
of the backward takes it. Views (Reshape) count as what they show. This needs no kernels, so that the graph for Ascend
is counted on a CPU too.
"""

import glob
import math
import os
import re
from typing import Dict, List, NamedTuple, Optional, Tuple

BYTES = {"Float32": 4, "Float16": 2, "BFloat16": 2, "Int32": 4, "Int64": 8, "Bool": 1, "UInt8": 1, "Int8": 1}
VIEWS = ("Reshape", "ExpandDims", "Squeeze", "Depend", "Load", "TupleGetItem")
Key = Tuple[str, int]


class Saved(NamedTuple):
    """A tensor that is kept: the scope of the operator that makes it, its shape and its bytes."""

    scope: str
    shape: Tuple[int, ...]
    size: int


class Node:
    """One operator of a graph."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self.types = self.scope = ""
        self.is_backward = False
        self.operator = re.match(r"(?:PrimFunc_)?(\w+)", text)[1]
        self.inputs = names_in(text)

    @property
    def begins_backward(self) -> bool:
        """Whether the operator itself tells that it belongs to the backward."""
        recomputed = "duplicated: Bool(1)" in self.text or "recompute_depend" in self.text
        return self.scope.startswith("Gradients") or recomputed

    @property
    def outputs(self) -> List[Tuple[str, Tuple[int, ...]]]:
        """The dtype and the shape of each tensor that it makes."""
        text = self.types.rsplit(" -> (", 1)[-1]
        several = re.match(r"<Tuple\[(.*?)\]>?, TupleShape\((.*)\)", text)
        if several is None:
            return [(dtype, numbers(shape)) for dtype, shape in re.findall(r"Tensor\[(\w+)\]>?, \(([^()]*)\)", text)]
        found = re.findall(r"Tensor\[(\w+)\](?:\*(\d+))?", several[1])
        dtypes = [dtype for dtype, times in found for _ in range(int(times or 1))]
        return list(zip(dtypes, map(numbers, re.findall(r"\(([^()]*)\)", several[2]))))


def names_in(text: str) -> List[str]:
    """Returns the names of the operators that a line takes the outputs of."""
    return re.findall(r"%(\w+)", re.sub(r"cnode_attrs.*|\{instance name.*", "", text))


def numbers(text: str) -> Tuple[int, ...]:
    """Returns the whole numbers of a shape as the graph has it."""
    return tuple(int(part) for part in text.split(",") if part.strip())


def read_graph(path: str) -> Dict[str, Node]:
    """Returns name -> Node of a graph's text."""
    nodes: Dict[str, Node] = {}
    node: Optional[Node] = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            begin = re.match(r"  %(\d+)\(.*?\) = (.*)$", line)
            if begin:
                node = nodes[begin[1]] = Node(begin[1], begin[2])
            elif node and not node.types and line.startswith("      : ("):
                node.types = line.strip()
            elif node and not node.types:
                # The values of a constant take lines of their own, and other inputs follow it.
                node.inputs += names_in(line)
            elif node and not node.scope and "Fullname with scope: (" in line:
                node.scope = line.split("Fullname with scope: (", 1)[1].rstrip()[:-1]
    # In the text, what an operator takes comes before it.
    for node in nodes.values():
        node.is_backward = node.begins_backward or any(nodes[name].is_backward for name in node.inputs if name in nodes)
    return nodes


def saved_tensors(path: str) -> List[Saved]:
    """Returns the tensors that the graph in a file keeps for its backward."""
    nodes = read_graph(path)
    kept: Dict[Key, None] = {}
    for node in nodes.values():
        if node.is_backward:
            # A Depend passes on its first input alone.
            for name in node.inputs[:1] if node.operator == "Depend" else node.inputs:
                made = nodes.get(name)
                if made is not None and not made.is_backward:
                    kept.update(dict.fromkeys(origins(nodes, name, node)))
    return [
        Saved(nodes[name].scope, shape, BYTES[dtype] * math.prod(shape))
        for name, index in kept
        for dtype, shape in nodes[name].outputs[index : index + 1]
    ]


def widest_point(path: str) -> int:
    """Returns the most bytes of tensors that are in use at a time, if the operators run in the order of the text."""
    nodes = read_graph(path)
    made = {name: node for name, node in nodes.items() if node.operator not in (*VIEWS, "MakeTuple")}
    last: Dict[Key, int] = {}
    for position, node in enumerate(made.values()):
        for name in node.inputs:
            last.update(dict.fromkeys(origins(nodes, name, node), position))
    live: Dict[Key, int] = {}
    widest = 0
    for position, (name, node) in enumerate(made.items()):
        sizes = [BYTES[dtype] * math.prod(shape) for dtype, shape in node.outputs]
        live.update({(name, index): size for index, size in enumerate(sizes)})
        widest = max(widest, sum(live.values()))
        live = {key: size for key, size in live.items() if last.get(key, -1) > position}
    return widest


def origins(nodes: Dict[str, Node], name: str, taker: Node, index: int = 0) -> List[Key]:
    """Returns what makes the tensor ``name``, and which of its outputs it is; nothing for a parameter."""
    node = nodes.get(name)
    if taker.operator == "TupleGetItem":
        index = int(re.search(r"I64\((\d+)\)", taker.text)[1])
    if node is None:
        return []
    if node.operator == "MakeTuple":
        return [key for name in node.inputs for key in origins(nodes, name, node)]
    if node.operator in VIEWS:
        return origins(nodes, node.inputs[0], node, index) if node.inputs else []
    return [(name, index)]


def compiled_graph(step, inputs, folder, monkeypatch) -> str:
    """Returns the file with the graph of ``step(*inputs)``, which is compiled, and run where there are kernels."""
    import mindspore as ms

    # Only the graph after the last pass: writing all of them takes longer than making them.
    monkeypatch.setenv("MS_DEV_DUMP_IR_PASSES", "validate")
    ms.set_context(save_graphs=1, save_graphs_path=str(folder))
    try:
        step(*inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        assert re.search("Select CPU operator|Kernel select failed", str(error)), error
    finally:
        ms.set_context(save_graphs=0)
    (path,) = glob.glob(os.path.join(str(folder), "**", "*validate*.ir"), recursive=True)
    return path
