"""Runs a program on MindSpore's Ascend backend, on stand-ins for CANN, in a separate process."""

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
# Below MindSpore's lib/plugin/ascend: libraries that the plugin loads only by name.
_BESIDE_THE_PLUGIN = (
    "ms_kernels_symmetric_memory/shmem/shmem/lib",
    "ms_kernels_symmetric_memory/shmem/memfabric_hybrid/lib",
    "ms_kernels_internal/asdops/lib",
    "ms_kernels_internal/internal_kernel/lib",
)

_WITH_FRAGMENTS = re.compile(r"Actual peak memory usage \(with fragments\): (\d+)M")
# The beginning of a line of a graph that calls an operator.
_OPERATOR = re.compile(r" *%\d+\(\w+\) = (?:PrimFunc_)?(\w+)\(")


class Finished(NamedTuple):
    """The results of a program.

    Attributes:
        returncode (int): Its exit code; below 0, the signal that ended it.
        output (str): Its standard output and errors together.
        peak_bytes (int): Peak use of the device in MindSpore's planner, without fragments. None if the
            process ended before reporting it.
        reserved_bytes (int): The same with fragments.
        on_cpu (tuple of str): Names of the operators that were compiled for the host's CPU instead of the NPU.
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
    """Runs a Python program in MindSpore's dry run: compiles, plans and shards graphs, and launches no kernel.

    Args:
        program: The path of a .py file or the name of a module, such as mindlora.training.launch.launcher.
        arguments: Its command-line arguments.
        folder: Its working directory.
        ranks: Nominal number of devices.
        rank: This process's device.
        values: Whether weights are initialized; otherwise they hold whatever is in memory, which costs the host
            neither memory nor time.
        timeout: Seconds after which the process is killed.
        environment: Variables in addition to those of this process.

    Raises:
        InstallationError: MindSpore, its Ascend plugin, a C++ compiler or binutils is missing.
        subprocess.TimeoutExpired: The timeout has expired.
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
            # All its children end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return finish(process.returncode, output, scratch)


def simulation(ranks: int, rank: int) -> Dict[str, str]:
    """Returns the variables that put a MindSpore process into a dry run as device ``rank`` of ``ranks``."""
    return {"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": str(ranks), "RANK_ID": str(rank)}


def prepare(made: StandIns, scratch: str, values: bool) -> Tuple[List[str], Dict[str, str]]:
    """Returns the arguments before a program on Python's command line, and the variables of its process.

    Args:
        made: The stand-ins.
        scratch: An empty folder for finish to read.
        values: Whether weights are initialized.
    """
    options = ["--soc-library", made.soc, "--report", _report(scratch), *(["--values"] if values else [])]
    # MindSpore writes each graph only in the form built for the device.
    graphs = {"MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_DUMP_IR_PASSES": "graph_build", "MS_DEV_SAVE_GRAPHS_PATH": scratch}
    return ["-m", "mindlora.run.dry_run.child", *options], {**_environment(made), **graphs}


def finish(returncode: int, output: str, scratch: str) -> Finished:
    """Returns the results of a program that was prepared with the folder ``scratch``."""
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
        # MindSpore reports its planner's use as a warning.
        "GLOG_v": "2",
    }
