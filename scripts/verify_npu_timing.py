"""The step `ways` of scripts/verify_npu.py: lora_delta on either kind of cores, and on few and many cores."""

import csv
import dataclasses
import glob
import os
import shutil
import statistics
from typing import Any, Dict, Iterator, List

from verify_npu_run import FAILED, HELD, NOT_RUN, Outcome
from verify_npu_ways import SHAPES, title

KIND, CORES = "MINDLORA_ASCEND_KIND", "MINDLORA_ASCEND_CORES"
# "" means the plan's choice.
SETTINGS = {"kinds": (KIND, ("", "vector", "cube")), "cores": (CORES, ("", "2", "4", "8", "12", "16", "20", "24"))}
# The host side's error for more cores than the chip has.
TOO_MANY = f"{CORES} is "


def ways(place: Any) -> Iterator[Outcome]:
    """Both kinds of cores from 4 to 16 tokens, and few and many cores at 512: the inputs of the plans' estimates."""
    if place.given.device == "CPU":
        yield Outcome("ways", NOT_RUN, "a CPU has no cube and vector cores to choose from", excused=True)
        return
    if not profiler(place):
        yield Outcome("ways", NOT_RUN, "msprof is not on PATH, and a clock sees more of the host than of the kernel")
        return
    for part, (variable, values) in SETTINGS.items():
        outcome = Outcome(f"ways {part}", HELD, "", figures={"part": part, "microseconds": {}})
        for value in values[:1] if place.given.quick and part == "cores" else values:
            one = run_one(place, part, variable, value)
            outcome.seconds += one.seconds
            outcome.log = one.log
            if one.state == HELD:
                outcome.figures["microseconds"][value or "the plan"] = one.figures
            elif not too_many(place, one):
                outcome.state, outcome.line = one.state, one.line
                break
        if outcome.state == HELD:
            outcome.line = summary(part, outcome.figures["microseconds"])
        yield outcome


def run_one(place: Any, part: str, variable: str, value: str) -> Outcome:
    """Times one setting."""
    name = f"ways {part} {value or 'plan'}"
    folder = os.path.join(place.work, name.replace(" ", "_"))
    command = [profiler(place), f"--output={folder}"]
    command += place.python("verify_npu_ways.py", part, "--device", place.given.device)
    forced = {key: text for key, text in place.environment.items() if key not in (KIND, CORES)}
    forced.update({variable: value} if value else {})
    outcome = dataclasses.replace(place, environment=forced).run(name, command, cannot=place.no_kernels())
    if outcome.state == HELD:
        outcome.figures = kernel_times(folder, part)
        if not outcome.figures:
            outcome.state, outcome.line = FAILED, "msprof left no op_summary with LoraDelta in it"
    return outcome


def profiler(place: Any) -> str:
    """Returns the path of msprof, or ""."""
    return shutil.which("msprof", path=place.environment.get("PATH")) or ""


def too_many(place: Any, outcome: Outcome) -> bool:
    """Returns whether a run ended because the chip has fewer cores than requested."""
    with open(os.path.join(place.given.output, outcome.log), encoding="utf-8") as log:
        return TOO_MANY in log.read()


def kernel_times(folder: str, part: str) -> Dict[str, Any]:
    """Returns the median of LoraDelta's microseconds and its blocks, by shape, from msprof's op_summary files."""
    found: Dict[str, List[Dict[str, str]]] = {}
    for path in glob.glob(os.path.join(folder, "**", "op_summary*.csv"), recursive=True):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("OP Type", "").startswith("LoraDelta") and row.get("Task Duration(us)"):
                    found.setdefault(row.get("Input Shapes", "").strip('"'), []).append(row)
    times = {}
    for tokens, rank in SHAPES[part]:
        for shapes, rows in found.items():
            y0, _, a = (shapes.split(";") + [""] * 3)[:3]
            if y0.split(",")[0] == str(tokens) and a.split(",")[0] == str(rank):
                durations = [float(row["Task Duration(us)"]) for row in rows]
                blocks = rows[0].get("Block Dim") or rows[0].get("Block Num", "")
                times[title(tokens, rank)] = {"median": statistics.median(durations), "blocks": blocks}
    return times


def summary(part: str, microseconds: Dict[str, Dict[str, Any]]) -> str:
    """Returns the times in one sentence."""
    if part == "cores":
        shape = title(*SHAPES[part][-1])
        times = ", ".join(
            f"{cores}: {times[shape]['median']:g}" for cores, times in microseconds.items() if shape in times
        )
        return f"{shape}, us by cores: {times}"
    borders = []
    for rank in sorted({rank for _, rank in SHAPES[part]}):
        tokens = [
            tokens
            for tokens, other in SHAPES[part]
            if other == rank and cube_is_faster(microseconds, title(tokens, rank))
        ]
        borders.append(f"rank {rank}: {', '.join(map(str, tokens)) or 'none'}")
    return f"tokens, of 4 to 16, at which the cube cores are faster: {'; '.join(borders)}"


def cube_is_faster(microseconds: Dict[str, Dict[str, Any]], shape: str) -> bool:
    """Returns whether a shape was faster on the cube cores than on the vector cores."""
    cube, vector = (microseconds.get(kind, {}).get(shape) for kind in ("cube", "vector"))
    return cube is not None and vector is not None and cube["median"] < vector["median"]
