"""Runs a program on MindSpore's Ascend backend, on stand-ins for CANN, in a process of its own."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.run.dry_run.stand_ins import StandIns, mindspore_folder, stand_ins

_ROOT = pathlib.Path(__file__).resolve().parents[3]
# Below lib/plugin/ascend of MindSpore: libraries that the plugin loads by their names alone.
_BESIDE_THE_PLUGIN = (
    "ms_kernels_symmetric_memory/shmem/shmem/lib",
    "ms_kernels_symmetric_memory/shmem/memfabric_hybrid/lib",
    "ms_kernels_internal/asdops/lib",
    "ms_kernels_internal/internal_kernel/lib",
)

_WITH_FRAGMENTS = re.compile(r"Actual peak memory usage \(with fragments\): (\d+)M")
# How a line of a graph begins that calls an operator.
_OPERATOR = re.compile(r" *%\d+\(\w+\) = (?:PrimFunc_)?(\w+)\(")


class Finished(NamedTuple):
    """What a program left.

    Attributes:
        returncode (int): Its exit code; below 0, the signal that ended it.
        output (str): What it wrote, standard output and errors in one.
        peak_bytes (int): The most that MindSpore's planner had in use on the device, without fragments. None if the
            process ended before it could say.
        reserved_bytes (int): The same with fragments.
        on_cpu (tuple of str): The operators that were compiled for the host's CPU in place of the NPU, by name.
    """

    returncode: int
    output: str
    peak_bytes: Optional[int]
    reserved_bytes: Optional[int]
    on_cpu: Tuple[str, ...]


def run(
    program: str,
    *arguments: str,
    folder: str = ".",
    ranks: int = 1,
    rank: int = 0,
    values: bool = False,
    timeout: Optional[float] = None,
    environment: Optional[Mapping[str, str]] = None,
) -> Finished:
    """Runs a Python program in MindSpore's dry run: graphs are compiled, planned and sharded; no kernel is launched.

    Args:
        program: The path of a .py file or the name of a module, such as mindlora.training.launch.launcher.
        arguments: What follows it on the command line.
        folder: The folder in which it works.
        ranks: How many devices there are in name.
        rank: Which of them this process is.
        values: Whether weights are initialized; without, they hold whatever their memory holds, which costs the host
            neither memory nor time.
        timeout: Seconds after which the process is killed.
        environment: Variables beside those of this process.

    Raises:
        InstallationError: MindSpore, its Ascend plugin, a C++ compiler or binutils is missing.
        subprocess.TimeoutExpired: The time is over.
    """
    with tempfile.TemporaryDirectory(prefix="mindlora-dry-run-") as scratch:
        first, variables = prepare(stand_ins(), scratch, values)
        process = subprocess.Popen(
            [sys.executable, *first, program, *arguments],
            cwd=folder,
            env={**variables, **simulation(ranks, rank), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            # Whatever it started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return finish(process.returncode, output, scratch)


def simulation(ranks: int, rank: int) -> Dict[str, str]:
    """Returns the variables that make a process of MindSpore's one of a dry run: device ``rank`` of ``ranks``."""
    return {"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": str(ranks), "RANK_ID": str(rank)}


def prepare(made: StandIns, scratch: str, values: bool) -> Tuple[List[str], Dict[str, str]]:
    """Returns what comes before a program on Python's command line, and the variables of its process.

    Args:
        made: The stand-ins.
        scratch: An empty folder, which finish reads.
        values: Whether weights are initialized.
    """
    options = ["--soc-library", made.soc, "--report", _report(scratch), *(["--values"] if values else [])]
    # MindSpore writes each graph as it is built for the device, and no other stage of it.
    graphs = {"MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_DUMP_IR_PASSES": "graph_build", "MS_DEV_SAVE_GRAPHS_PATH": scratch}
    return ["-m", "mindlora.run.dry_run.child", *options], {**_environment(made), **graphs}


def finish(returncode: int, output: str, scratch: str) -> Finished:
    """Returns what a program left that was prepared with the folder ``scratch``."""
    peak = None
    if os.path.exists(_report(scratch)):
        with open(_report(scratch), encoding="utf-8") as file:
            peak = json.load(file)["peak_bytes"]
    with_fragments = _WITH_FRAGMENTS.findall(output)
    reserved = int(with_fragments[-1]) << 20 if with_fragments else None
    return Finished(returncode, output, peak, reserved, tuple(_on_cpu(pathlib.Path(scratch))))


def _report(scratch: str) -> str:
    return os.path.join(scratch, "report.json")


def _on_cpu(folder: pathlib.Path) -> Iterator[str]:
    for path in sorted(folder.rglob("graph_build_*.ir")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            operator = _OPERATOR.match(line)
            if operator and 'primitive_target: "CPU"' in line:
                yield operator[1]


def _environment(made: StandIns) -> Dict[str, str]:
    plugin = mindspore_folder() / "lib/plugin/ascend"
    libraries = [made.libraries, *(str(plugin / path) for path in _BESIDE_THE_PLUGIN)]
    python = [made.python, str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "LD_PRELOAD": made.cores,
        "PYTHONPATH": ":".join(python),
        "ASCEND_HOME_PATH": made.cann,
        "ASCEND_TOOLKIT_HOME": made.cann,
        "ASCEND_OPP_PATH": f"{made.cann}/opp",
        # MindSpore says what its planner took as a warning.
        "GLOG_v": "2",
    }
