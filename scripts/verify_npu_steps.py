"""The steps of scripts/verify_npu.py, each a generator of outcomes."""

import argparse
import csv
import dataclasses
import glob
import json
import os
import re
import runpy
import shlex
import shutil
import statistics
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from verify_npu_devices import VISIBLE, Npus, free_port
from verify_npu_missing import unwritable
from verify_npu_operators import DTYPES, OPERATORS
from verify_npu_page import KERNELS, switch
from verify_npu_report import Report
from verify_npu_run import FAILED, HELD, NOT_RUN, ROOT, Cleaner, Outcome, run
from verify_npu_timing import ways

# Last lines of build_ascend.sh if the machine lacks a requirement.
CANNOT_BUILD = ("no CANN toolkit was found", "the kernels need", "cmake was not found", "g++ was not found")
# As in mindlora/ops/build.py.
CANNOT_COMPILE = ("No C++ compiler was found",)
# Errors if nothing was installed.
NOT_INSTALLED = tuple(f"No module named '{name}'" for name in ("numpy", "yaml", "safetensors", "mindspore", "tqdm"))
# As in check_aclnn.sh.
CANNOT_CHECK = (
    "no CANN toolkit was found",
    "g++ was not found",
    "which the NPU's driver brings",
    "aclInit returned",
    "aclrtSetDevice returned",
)
# Errors without kernels: not a failure unless the build reported that it made them.
NO_PACKAGE = ("no operator package of mindlora was found",)
NO_KERNELS = ("MINDLORA_BACKEND is ascend, but", "MINDLORA_BACKEND is cpu, but")
# Errors of MindSpore and CANN in a worker's log if other processes have taken an NPU's memory.
NO_MEMORY = ("Out of Memory", "Memory not enough", "EL0004")
BUILD = os.path.join(ROOT, "mindlora", "ops", "build.py")
LIBRARY = os.path.join(ROOT, "mindlora", "ops", "lib", "libmindlora_cpu.so")
# Prints a result from the device, or the reason for its failure.
PROBE = """
import sys
import mindspore as ms
try:
    ms.set_context(device_target=sys.argv[1])
    print((ms.Tensor([1.0]) + 1).asnumpy())
except Exception as error:
    sys.exit(str(error).strip().split(". ")[0])
"""
LORA_YAML = os.path.join("configs", "tiny", "lora_llama_tiny_cpu.yaml")
# Allowed relative differences of the first and the last loss from the CPU's.
FIRST_LOSS, LAST_LOSS = 0.01, 0.1
HOUR, PROBE_LIMIT = 3600, 600  # seconds


@dataclasses.dataclass
class Place:
    """The environment in which the steps run.

    Attributes:
        given (argparse.Namespace): The options.
        work (str): A folder that is removed at the end.
        environment (dict): The environment of all commands; the build adds its package to it.
        clean (Cleaner): Cleans every text in the report.
        npus (Npus): The NPUs of this machine.
        report (Report): The report's folder, which stays.
        tuned (str or None): The quickstart's folder, once it has run.
        built (bool): Whether the build reported that it made the kernels.
    """

    given: argparse.Namespace
    work: str
    environment: Dict[str, str]
    clean: Cleaner
    npus: Npus
    report: Report
    tuned: Optional[str] = None
    built: bool = False
    device_problem: Optional[str] = None
    probed: bool = False

    def run(self, name: str, command: Sequence[str], limit: int = HOUR, cannot: Sequence[str] = ()) -> Outcome:
        """Runs a command; see verify_npu_run.run."""
        limit = self.given.limit or limit
        return run(name, command, self.report, self.clean, self.environment, limit, cannot)

    def log(self, outcome: Outcome) -> str:
        """Returns the text of an outcome's log."""
        with open(os.path.join(self.given.output, outcome.log), encoding="utf-8") as file:
            return file.read()

    def problem(self) -> Optional[str]:
        """Returns why nothing can be computed on the device, or None. The device is tried once."""
        if self.given.device == "Ascend" and self.npus.problem():
            return self.npus.problem()
        if not self.probed:
            tried = self.run("device", [sys.executable, "-c", PROBE, self.given.device], PROBE_LIMIT)
            if tried.state != HELD:
                self.device_problem = f"MindSpore cannot compute on {self.given.device}: {tried.line.rstrip('.')}"
            self.probed = True
        return self.device_problem

    def no_kernels(self) -> Sequence[str]:
        """Returns the last lines that mean that MindSpore has no kernels to test, unless the needed ones were built.

        Even on an NPU, MindSpore needs the CPU library, which infers shapes.
        """
        made = self.built or self.given.device == "CPU"
        return () if made and os.path.exists(LIBRARY) else NO_KERNELS

    def python(self, script: str, *arguments: str) -> List[str]:
        """Returns the command that runs a program in scripts/."""
        return [sys.executable, os.path.join(ROOT, "scripts", script), *arguments]

    def quick(self) -> List[str]:
        """Returns the option --quick, if it was given."""
        return ["--quick"] * self.given.quick


def on_device(step: Callable[[Place], Iterator[Outcome]], name: str) -> Callable[[Place], Iterator[Outcome]]:
    """Returns a step that reports a missing device instead of running."""

    def guarded(place: Place) -> Iterator[Outcome]:
        if place.problem():
            yield Outcome(name, NOT_RUN, place.problem() or "", excused=not place.npus.seen)
        else:
            yield from step(place)

    return guarded


def doctor(place: Place) -> Iterator[Outcome]:
    """mindlora doctor: versions, CANN, and the path of each operator."""
    outcome = place.run("doctor", [sys.executable, "-m", "mindlora.cli", "doctor"], 600, NOT_INSTALLED)
    if outcome.state == NOT_RUN:
        outcome.line += ": this Python lacks what `pip install .` brings; name another one in PYTHON"
    if outcome.state == HELD:
        outcome.line = what_doctor_found(place.log(outcome))
    yield outcome


def what_doctor_found(text: str) -> str:
    """Returns the warnings, such as an untested MindSpore, and the versions in the doctor's output."""
    versions = [" ".join(item) for item in re.findall(r"^(CANN|driver) +(\S+(?: \S+)*)", text, re.MULTILINE)]
    # A warning continues in the indented lines below it.
    warnings = [" ".join(lines.split()) for lines in re.findall(r"^warning +(.*(?:\n +.*)*)", text, re.MULTILINE)]
    found = ["no errors", *(f"warning: {warning}" for warning in warnings), ", ".join(versions)]
    return "; ".join([*found, "the log names all versions and the path of each operator"])


def library(place: Place) -> Iterator[Outcome]:
    """The CPU library, which infers shapes on an NPU too: pip builds it, but a bare checkout has none."""
    if runpy.run_path(BUILD)["is_current"]():
        outcome = Outcome("library", HELD, "the CPU library is there, and no source is newer")
    elif unwritable():
        outcome = Outcome("library", NOT_RUN, f"it needs {unwritable()}")
    else:
        outcome = place.run("library", [sys.executable, BUILD], cannot=CANNOT_COMPILE)
    yield outcome


def build(place: Place) -> Iterator[Outcome]:
    """build_ascend.sh, into the folder where mindlora looks; later steps use the package."""
    if place.given.device == "CPU":
        yield Outcome("build", NOT_RUN, "the kernels are for NPUs only", excused=True)
        return
    if unwritable():
        yield Outcome("build", NOT_RUN, f"it needs {unwritable()}")
        return
    command = ["bash", os.path.join(ROOT, "scripts", "build_ascend.sh")]
    command += ["--soc", place.given.soc] if place.given.soc else []
    outcome = place.run("build", command, 2 * HOUR, CANNOT_BUILD)
    if outcome.state == HELD:
        outcome.line, place.built = "the operator package is built and installed", True
        # Sets what `source set_env.bash` sets.
        package = os.path.join(ROOT, "mindlora", "ops", "lib", "ascend", "vendors", "mindlora")
        others = place.environment.get("ASCEND_CUSTOM_OPP_PATH", "")
        place.environment["ASCEND_CUSTOM_OPP_PATH"] = ":".join(filter(None, [package, others]))
    yield outcome


def doctor_after(place: Place) -> Iterator[Outcome]:
    """mindlora doctor again: if the kernels were built and an NPU is present, it must name them as the path."""
    name = "doctor-after"
    if not place.built:
        yield Outcome(name, NOT_RUN, "there is no new build, so it would say the same as before")
        return
    outcome = place.run(name, [sys.executable, "-m", "mindlora.cli", "doctor"], limit=600)
    if outcome.state == HELD:
        judge_paths(outcome, operator_paths(place.log(outcome)), place.npus.seen > 0)
    yield outcome


def operator_paths(text: str) -> Dict[str, Tuple[str, str]]:
    """Returns {operator: (path, first line of the reason)} from the doctor's output, for operators with a kernel."""
    rows = re.findall(rf"^({'|'.join(KERNELS)}) +(ascend|cpu|composed|none) +(.*)$", text, re.MULTILINE)
    return {op: (path, reason) for op, path, reason in rows}


def judge_paths(outcome: Outcome, paths: Dict[str, Tuple[str, str]], on_npu: bool) -> None:
    """Adds each operator's path to an outcome, which passes if all paths are kernels or there is no NPU."""
    outcome.line = ", ".join(f"{op}: {path}" for op, (path, _) in paths.items()) or "the log names no operator"
    others = [f"{op} is {path}: {reason}" for op, (path, reason) in paths.items() if path != "ascend"]
    if on_npu and (others or not paths):
        outcome.state = FAILED
        outcome.line = f"the kernels are built, and {others[0] if others else outcome.line}"


def aclnn(place: Place) -> Iterator[Outcome]:
    """check_aclnn.sh: every kernel against its reference, called through CANN without MindSpore."""
    if place.given.device == "CPU":
        yield Outcome("aclnn", NOT_RUN, "CANN calls kernels on an NPU only", excused=True)
        return
    if unwritable():
        yield Outcome("aclnn", NOT_RUN, f"it needs {unwritable()}")
        return
    cannot = (*CANNOT_CHECK, *NOT_INSTALLED, *(() if place.built else NO_PACKAGE))
    command = ["bash", os.path.join(ROOT, "scripts", "check_aclnn.sh"), *["--small"] * place.given.quick]
    outcome = place.run("aclnn", command, cannot=cannot)
    if outcome.state == HELD:
        outcome.line = "called by CANN alone, every kernel gives what its reference gives"
    elif outcome.state == NOT_RUN and not place.npus.seen:
        outcome.line, outcome.excused = f"{place.npus.problem()}; {outcome.line}", True
    elif outcome.state == FAILED:
        name_files(outcome, place.log(outcome))
    yield outcome


def name_files(outcome: Outcome, log: str) -> None:
    """Adds to an outcome the golden files that kernels failed, by how much, and the names of these kernels."""
    kernel, results = "", {}
    for line in log.splitlines():
        starts, case = re.match(r"(\w+) on device ", line), re.match(r"(TRY |PASS|FAIL) ([^:]+)(?:: )?(.*)", line)
        if starts:
            kernel = starts[1]
        elif case:
            unended = "the program ended within it, or did not end"
            results[kernel, case[2]] = {"TRY ": unended, "PASS": "", "FAIL": case[3]}[case[1]]
    failures = [
        {"case": f"{kernel} {case}", "problem": problem, "kernel": kernel}
        for (kernel, case), problem in results.items()
        if problem
    ]
    outcome.figures = {"cases": len(results), "failures": failures}
    if failures:
        wrong = ", ".join(dict.fromkeys(failure["kernel"] for failure in failures))
        outcome.line = f"{len(failures)} of {len(results)} golden files, of {wrong}; {outcome.line}"


def operators(place: Place) -> Iterator[Outcome]:
    """Every operator in every dtype against its reference, in separate processes, so that hangs stay isolated."""
    for dtype in DTYPES:
        for op in OPERATORS:
            name = f"{op} {dtype}"
            result = os.path.join(place.work, f"{op}_{dtype}.json")
            arguments = [op, dtype, "--device", place.given.device, "--json", result, *place.quick()]
            outcome = place.run(name, place.python("verify_npu_operators.py", *arguments), cannot=place.no_kernels())
            outcome.figures = {"operator": op, "dtype": dtype, **read_json(result)}
            running, failures = outcome.figures.get("running"), outcome.figures.get("failures", [])
            if running:
                outcome.line = f"ended within `{running}`; {outcome.line}"
            elif failures:
                outcome.line = f"{len(failures)} of {outcome.figures['cases']} cases; switch it off with {switch(op)}"
            yield outcome


def fine_tune(place: Place) -> Iterator[Outcome]:
    """The quickstart's LoRA on a CPU, then the same run on the device: their losses must agree."""
    name, folder = "fine-tune", os.path.join(place.work, "quickstart")
    quickstart = place.python("quickstart.py", "--short", "--model", "llama", "--output", folder)
    prepared = place.run("fine-tune on a CPU", quickstart)
    if prepared.state == HELD:
        prepared.line, place.tuned = "the quickstart ran", folder
    yield prepared
    if not place.tuned:
        yield Outcome(name, NOT_RUN, "it needs the run on a CPU before it")
        return
    tuned = os.path.join(place.work, "tuned")
    outcome = place.run(name, [sys.executable, *training(place, tuned)])
    if outcome.state == HELD:
        compare_losses(outcome, losses(os.path.join(folder, "lora")), losses(tuned))
        name_paths(outcome, place.log(outcome), place.built)
    yield outcome


def training(place: Place, output: str) -> List[str]:
    """Returns the script and arguments of the quickstart's LoRA run, on the device."""
    (data,) = glob.glob(os.path.join(place.tuned or "", "cache_*", "dialogues.mindrecord"))
    (base,) = glob.glob(os.path.join(place.tuned or "", "cache_*", "Llama-tiny"))
    return [
        *(os.path.join("scripts", "run_mindformer.py"), "--config", LORA_YAML, "--output_dir", output),
        *("--train_dataset_dir", data, "--load_checkpoint", base, "--load_ckpt_format", "safetensors"),
        *("--runner_config.epochs", "1"),
        *("--context.device_target", place.given.device),
    ]


def losses(folder: str) -> List[float]:
    """Returns the losses of a run's steps."""
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        return [record["loss"] for record in map(json.loads, file) if record.get("loss") is not None]


def compare_losses(outcome: Outcome, expected: List[float], found: List[float]) -> None:
    """Adds the first and last losses of both runs, and whether they agree, to an outcome."""
    outcome.figures = {"CPU": expected, "device": found}
    pairs = [(expected[0], found[0], FIRST_LOSS), (expected[-1], found[-1], LAST_LOSS)]
    # Written so that NaN fails.
    agree = len(expected) == len(found) and all(abs(a - b) <= share * a for a, b, share in pairs)
    outcome.state = HELD if agree else FAILED
    outcome.line = "loss from {:.3f} to {:.3f}, on a CPU from {:.3f} to {:.3f}".format(
        found[0], found[-1], expected[0], expected[-1]
    )


def name_paths(outcome: Outcome, log: str, built: bool) -> None:
    """Adds the run's path of lora_delta to an outcome; if kernels were built, the run must have used them."""
    picked = re.findall(r"Path of lora_delta for (\d+) cells: (\w+), (.*)", log)
    outcome.figures["paths"] = {path: int(cells) for cells, path, _ in picked}
    shown = " and ".join(f"{path} on {cells} cells" for cells, path, _ in picked)
    outcome.line += f"; path of lora_delta: {shown or 'not in the log'}"
    if built and set(outcome.figures["paths"]) != {"ascend"}:
        outcome.state = FAILED
        outcome.line += "".join(f"; the kernels are built, and not taken: {why}" for _, path, why in picked[:1])


def two_devices(place: Place) -> Iterator[Outcome]:
    """The tiny fine-tune on two NPUs under msrun, each with half of the data."""
    name, free = "two-devices", place.npus.free
    if place.given.device == "CPU" or free is None or len(free) < 2:
        advice = f"; name two in {VISIBLE}" if free is None and place.npus.seen > 1 else ""
        yield Outcome(name, NOT_RUN, f"it needs two free NPUs; here: {place.npus}{advice}", excused=True)
        return
    if not place.tuned:
        yield Outcome(name, NOT_RUN, "it needs the data and the base of the step fine-tune")
        return
    order = shlex.join([*training(place, os.path.join(place.work, "both")), "--use_parallel", "True"])
    logs = os.path.join(place.work, "msrun")
    command = ["bash", os.path.join(ROOT, "scripts", "msrun_launcher.sh"), order, "2", free_port(), logs, "True", "600"]
    visible = {**place.environment, VISIBLE: ",".join(free[:2])}
    outcome = dataclasses.replace(place, environment=visible).run(name, command)
    if outcome.state == HELD:
        outcome.line = f"both workers ended well, on NPUs {' and '.join(free[:2])}"
    for path in sorted(glob.glob(os.path.join(logs, "*.log"))):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = place.clean(file.read())
        with open(os.path.join(place.given.output, "logs", f"msrun_{os.path.basename(path)}"), "w") as log:
            log.write(text)
        if outcome.state == FAILED and any(words in text for words in NO_MEMORY):
            outcome.state, outcome.line = NOT_RUN, "an NPU has too little memory left; the logs msrun_... have more"
    yield outcome


def bench(place: Place) -> Iterator[Outcome]:
    """bench.py ops: the operators against MindSpore's own."""
    result = os.path.join(place.work, "bench.json")
    command = place.python("bench.py", "ops", "--device", place.given.device, "--json", result, *place.quick())
    outcome = place.run("bench", command, cannot=place.no_kernels())
    outcome.figures = read_json(result)
    if outcome.state == HELD:
        outcome.line = "measured; the log has the tables, report.json the figures. Figures are not a judgement"
    yield outcome


def msprof(place: Place) -> Iterator[Outcome]:
    """The times of only the kernels, by CANN's profiler."""
    name, folder = "msprof", os.path.join(place.work, "msprof")
    program = shutil.which("msprof", path=place.environment.get("PATH"))
    if place.given.device == "CPU" or not program:
        why = "CANN's profiler measures NPUs only" if place.given.device == "CPU" else "msprof is not on PATH"
        yield Outcome(name, NOT_RUN, why, excused=place.given.device == "CPU")
        return
    command = [program, f"--output={folder}"]
    command += place.python("bench.py", "ops", "--device", "Ascend", "--quick")
    outcome = place.run(name, command, cannot=place.no_kernels())
    if outcome.state == HELD:
        outcome.figures = kernel_times(folder)
        outcome.state = HELD if outcome.figures else FAILED
        outcome.line = (
            "; ".join(f"{kernel} {times['median']:g} us" for kernel, times in outcome.figures.items())
            or "msprof left no op_summary with kernels that are looked for"
        )
    yield outcome


def kernel_times(folder: str) -> Dict[str, Any]:
    """Returns the microseconds and calls of our kernels and MindSpore's products, from msprof's op_summary files."""
    found: Dict[str, List[float]] = {}
    wanted: Tuple[str, ...] = (*(kernel for kernel, _ in KERNELS.values()), "MatMul")
    for path in glob.glob(os.path.join(folder, "**", "op_summary*.csv"), recursive=True):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                kind, time = row.get("OP Type", ""), row.get("Task Duration(us)", "")
                if kind.startswith(wanted) and time:
                    found.setdefault(kind, []).append(float(time))
    return {
        kind: {"median": statistics.median(times), "min": min(times), "calls": len(times)}
        for kind, times in sorted(found.items())
    }


def read_json(path: str) -> Dict[str, Any]:
    """Returns the JSON that a program wrote, or an empty result if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


STEPS: Dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "doctor": doctor,
    "library": library,
    "build": build,
    "doctor-after": doctor_after,
    "aclnn": aclnn,
    "operators": on_device(operators, "operators"),
    "fine-tune": on_device(fine_tune, "fine-tune"),
    "two-devices": on_device(two_devices, "two-devices"),
    "bench": on_device(bench, "bench"),
    "msprof": on_device(msprof, "msprof"),
    "ways": on_device(ways, "ways"),
}
