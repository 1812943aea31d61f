"""The first module in a process on the backend: prepares MindSpore, then runs a program as Python would.

python -m mindlora.run.dry_run.child [--values] --soc-library FILE --report FILE PROGRAM ARGUMENTS...
"""

import argparse
import ctypes
import json
import os
import runpy
import sys
from typing import Any, Iterator, List

# The generation of NPU that the dry run stands for, by MindSpore's two names of it.
SOC_VERSION, SOC_NAME = b"ascend910b", b"Ascend910B1"
_WORLD = "hccl_world_group"


def main() -> None:
    parser = argparse.ArgumentParser(prog="mindlora.run.dry_run.child")
    parser.add_argument("--values", action="store_true", help="initialize weights, as a run on a device does")
    parser.add_argument("--soc-library", required=True, help="the library that tells MindSpore which NPU this is")
    parser.add_argument("--report", required=True, help="the file that gets the memory of the device, as JSON")
    parser.add_argument("program", help="a .py file or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.values:
        _leave_weights_as_memory_is()
    _start(options.soc_library)
    _know_ranks_of_the_world()
    try:
        _run(options.program, options.arguments)
    finally:
        _report(options.report)


def _start(soc_library: str) -> None:
    import mindspore as ms

    ms.set_device("Ascend")
    ctypes.CDLL(soc_library).MindLoraSimulateSoc(SOC_VERSION, SOC_NAME)


def _leave_weights_as_memory_is() -> None:
    """Makes initializers write nothing: a dry run does not compute, and untouched memory costs nothing."""
    from mindspore.common import initializer

    for kind in _kinds(initializer.Initializer):
        setattr(kind, "_initialize", lambda self, array, *_, **__: None)  # noqa: B010


def _kinds(base: Any) -> Iterator[Any]:
    yield base
    for derived in base.__subclasses__():
        yield from _kinds(derived)


def _know_ranks_of_the_world() -> None:
    """Tells MindSpore's dry run the ranks of the group of all ranks, the only one that it lacks."""
    if not os.environ.get("MS_SIMULATION_LEVEL"):
        return
    from mindspore import communication
    from mindspore.communication import management

    of_other_groups = management.get_process_group_ranks

    def ranks(group: str = _WORLD) -> List[int]:
        if group in (None, _WORLD):
            return list(range(int(os.environ["RANK_SIZE"])))
        return of_other_groups(group)

    communication.get_process_group_ranks = management.get_process_group_ranks = ranks


def _run(program: str, arguments: List[str]) -> None:
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        # The folder that Python searches first for a script's imports.
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _report(path: str) -> None:
    from mindspore import runtime

    with open(path, "w", encoding="utf-8") as file:
        json.dump({"peak_bytes": runtime.max_memory_allocated()}, file)


if __name__ == "__main__":
    main()
