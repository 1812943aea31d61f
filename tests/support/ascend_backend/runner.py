"""The runs that tests of the Ascend backend make, each in a process of its own, forked from one on the backend."""

import dataclasses
import os
import pathlib
import tempfile
import time
from typing import Any, List, Mapping, Optional, Tuple, Union

import numpy as np
import pytest
import yaml

from mindlora.core.errors import InstallationError
from mindlora.run.dry_run import process
from mindlora.run.dry_run.stand_ins import stand_ins
from tests.support import forked
from tests.support.ascend_backend.launches import Launch, device, read_launches

Path = Union[str, os.PathLike]
# A run that takes longer than this hangs.
TIMEOUT = 540
# Makes the shipped Llama YAMLs small enough for a test: their layers stay as wide as they are.
SMALL_LLAMA = ("--model.model_config.num_layers", "1", "--model.model_config.vocab_size", "4096")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a program left.

    Attributes:
        returncode (int): Its exit code; below 0, the signal that ended it.
        output (str): What it wrote, standard output and then errors.
        peak_bytes (int): The most that MindSpore's planner had in use on the device, without fragments.
        reserved_bytes (int): The same with fragments.
        on_cpu (tuple of str): The operators that were compiled for the host's CPU in place of the NPU, by name.
        launches (list of Launch): The operators that were launched, in order; none in a dry run.
    """

    returncode: int
    output: str
    peak_bytes: Optional[int]
    reserved_bytes: Optional[int]
    on_cpu: Tuple[str, ...]
    launches: List[Launch]


def needs_ascend_backend() -> None:
    """Skips a test where the backend cannot run; on CI it fails there, unless MindSpore's wheel lacks the plugin."""
    try:
        stand_ins()
    except InstallationError as error:
        if os.environ.get("CI", "").lower() in ("1", "true") and "lacks the Ascend plugin" not in str(error):
            raise
        pytest.skip(str(error))


def run_yaml(
    config: Union[Path, Mapping[str, Any]],
    *flags: str,
    folder: Path,
    ranks: int = 1,
    rank: int = 0,
    level: Optional[str] = None,
    **options: Any,
) -> Run:
    """Runs mindlora-run on a YAML in MindSpore's dry run.

    Args:
        config: The path of the YAML, or its content.
        *flags: Options of mindlora-run.
        folder: Where it works; the run is in out/ below.
        ranks: How many devices there are in name; with more than one, the run is parallel.
        rank: Which of them this is.
        level: jit_level, "O0" or "O1", in place of the YAML's.
        **options: Those of run_program.
    """
    folder = pathlib.Path(folder)
    if isinstance(config, Mapping):
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    else:
        path = pathlib.Path(config)
    arguments = ["--config", str(path), "--output_dir", str(folder / "out"), "--auto_trans_ckpt", "False"]
    arguments += ["--use_parallel", str(ranks > 1)]
    if level is not None:
        arguments += ["--context.jit_config.jit_level", level]
    return _run(
        "mindlora.training.launch.launcher", *arguments, *flags, folder=folder, ranks=ranks, rank=rank, **options
    )


def run_mindlora(verb: str, *arguments: str, folder: Path, **options: Any) -> Run:
    """Runs ``mindlora VERB ARGUMENTS``; the options are those of run_program."""
    return _run("mindlora.cli", verb, *arguments, folder=folder, **options)


def run_program(program: str, *arguments: str, folder: Path, **options: Any) -> Run:
    """Runs a Python program.

    Args:
        program: Its source, or the path of a .py file.
        *arguments: What follows it on the command line.
        folder: Where it works.
        **options: launches=True launches its kernels on a device whose memory is the process's own, so that values are
            computed; without, this is MindSpore's dry run. The others are ranks, rank, values and environment of
            mindlora.run.dry_run.process.run.
    """
    if not program.endswith(".py"):
        path = pathlib.Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8")
        program = str(path)
    return _run(program, *arguments, folder=folder, **options)


def _run(
    program: str,
    *arguments: str,
    folder: Path,
    launches: bool = False,
    values: bool = False,
    ranks: int = 1,
    rank: int = 0,
    environment: Mapping[str, str] = {},
) -> Run:
    if launches:
        made, variables = device()
        log = pathlib.Path(folder) / f"launches-{os.getpid()}-{time.monotonic_ns()}.txt"
        variables = {**variables, "STAND_IN_LAUNCHES": str(log)}
    else:
        made, variables = stand_ins(), process.simulation(ranks, rank)
    with tempfile.TemporaryDirectory(prefix="mindlora-dry-run-") as scratch:
        first, of_the_backend = process.prepare(made, scratch, values or launches)
        variables = {**of_the_backend, **variables, **environment}
        done = forked.run([*first, program, *arguments], folder, variables, timeout=TIMEOUT)
        finished = process.finish(done.returncode, done.stdout + done.stderr, scratch)
    return Run(*finished, launches=read_launches(log) if launches else [])


def write_rows(path: Path, rows: int, tokens: int, vocabulary: int = 500, **columns: Any) -> str:
    """Writes rows of random tokens as MindRecord, and returns the path.

    Args:
        path: The file to write.
        rows: How many rows.
        tokens: Length of input_ids and labels: a YAML's seq_length + 1.
        vocabulary: Tokens are below it.
        **columns: More columns: name -> int32 [rows, length].
    """
    from mindspore.mindrecord import FileWriter

    rng = np.random.default_rng(0)
    ids = rng.integers(1, vocabulary, (rows, tokens)).astype(np.int32)
    table = {"input_ids": ids, "labels": ids, **columns}
    writer = FileWriter(str(path), 1, overwrite=True)
    writer.add_schema({name: {"type": "int32", "shape": [-1]} for name in table}, "rows")
    writer.write_raw_data([{name: column[row] for name, column in table.items()} for row in range(rows)])
    writer.commit()
    return str(path)
