"""make_plan and PlanReport: the needs of a run, as a text of 100 columns."""

import collections
import dataclasses
import textwrap
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.integers import IntegerForm
from mindlora.core.overrides import apply_overrides
from mindlora.core.text import listed, wrapped
from mindlora.core.yaml_file import read_merged, read_yaml
from mindlora.models.weights import Weight
from mindlora.run.checks.pynative import is_pynative
from mindlora.run.checks.targets import advise
from mindlora.run.plan.adapter_file import adapter_file_size
from mindlora.run.plan.alternatives import Fit, Layout, fit, layouts_of
from mindlora.run.plan.division import Division
from mindlora.run.plan.memory import (
    ARITHMETIC,
    EXACT,
    OPTIMIZERS,
    DeviceMemory,
    Line,
    kv_cache_per_token,
    loading_of,
    memory_of,
    needed_while_loading,
    optimizer_of,
)
from mindlora.run.plan.pynative import PynativePlan, plan_of_pynative
from mindlora.run.plan.run import Run, count_files, longest_data, read_run
from mindlora.run.plan.trial import STEPS, Trial, try_rank
from mindlora.run.plan.units import gib, size_text
from mindlora.run.yaml_run import YamlRun

# Steps and tokens of a run, from its batch and the number of rows in its data.


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length of a training run.

    Attributes:
        rows_per_step (int): Rows in a step of the optimizer, on all devices together.
        tokens_per_step (int): Their tokens, padding included.
        rows (int): Rows in the data, or None if they could not be counted; then steps and tokens are None too.
        tokens (int): Tokens of the run, padding included.
        data (str): The data whose rows were counted, or why they were not.
    """

    rows_per_step: int
    tokens_per_step: int
    epochs: int
    rows: Optional[int]
    steps: Optional[int]
    tokens: Optional[int]
    data: str


def schedule_of(run: Run) -> Schedule:
    """Returns the schedule of a training run."""
    division = run.division
    micro_batches = division.micro_batches if division.pipeline > 1 else 1
    rows_per_step = run.yaml.rows * run.yaml.accumulation * micro_batches * division.data
    rows, data = count_rows(run)
    epochs = run.yaml.setting("runner_config.epochs")
    steps = None
    if rows is not None:
        drops = run.yaml.at("train_dataset.drop_remainder") is not False
        steps = epochs * (rows // rows_per_step if drops else -(-rows // rows_per_step))
    per_step = rows_per_step * run.rows_of_model * run.seq_length
    return Schedule(rows_per_step, per_step, epochs, rows, steps, steps and steps * per_step, data)


def count_rows(run: Run) -> Tuple[Optional[int], str]:
    """Returns the number of rows of the training data, or None, and the data's name or the reason.

    If adapters have their own data, it is the longest of all.
    """
    keys = ("dataset_files", "dataset_dir")
    source = next(filter(None, (run.yaml.at(f"train_dataset.data_loader.{key}") for key in keys)), None)
    if not source:
        loader = run.yaml.at("train_dataset.data_loader.type")
        if loader not in (None, "MindDataset"):
            return None, f"only {loader}, which makes the rows when the run begins, knows how many there are"
        return None, "the YAML names no data: pass --train_dataset_dir"
    counted = [count_files(adapter.data or source) for adapter in run.adapters] or [count_files(source)]
    return longest_data(counted)


DEVICES = (1, 2, 4, 8)
WIDTH = 100
_BASES = (
    "exact: the same bytes as in a network that MindFormers builds.",
    "model, 15 %: within 15 % of the tensors that MindSpore's graph of such a step keeps, counted for MindFormers' "
    "legacy Llama on one device.",
    "simulated: the rules of MindSpore's memory pool, applied to the tensors above. Where MindSpore maps memory "
    "virtually (enable_vmm) there should be fewer holes.",
    "arithmetic: follows from the sizes and was compared with nothing.",
    "Not counted: work space of kernels, buffers of communication, and what the framework itself takes.",
)


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """The needs of a run.

    Attributes:
        mode (str): The YAML's run_mode.
        parameters (int): Elements of all parameters; a 4-bit weight counts as W [out, in].
        trained (int): Elements of the trained parameters.
        adapted (tuple of str): Paths of the cells with an adapter.
        adapter (str): A description of the adapter; empty if there is none.
        adapters (int): Number of adapters.
        adapter_file (int): Bytes of adapter_model.safetensors, of several adapters together, or None if there is no
            adapter.
        dtype (str): The dtype of most of the base.
        devices (int): Number of devices among which the YAML divides the run.
        division (str): A description of the division.
        batch (str): A description of a step's rows; empty if the run does not train.
        needed (int): Bytes on the device with the largest needs; ``device``, and on a CPU ``loading``, list them.
        loading (Line): The peak of each process on its host while the base is loaded.
        kv_cache_per_token (int): Bytes of the keys and values of a token.
        kv_cache_basis (str): The basis of that number.
        schedule (Schedule): Steps and tokens, or None if the run does not train.
        layouts (tuple of Layout): The same run on other numbers of devices.
        fit (Fit): Whether it fits the given memory, or None without one.
        trial (Trial): The result of MindSpore's own planner, or None if it was not asked.
        notes (tuple of str): The plan's assumptions.
    """

    yaml: str
    model: str
    mode: str
    parameters: int
    trained: int
    adapted: Tuple[str, ...]
    adapter: str
    adapters: int
    adapter_file: Optional[int]
    dtype: str
    devices: int
    division: str
    batch: str
    needed: int
    device: DeviceMemory
    loading: Line
    kv_cache_per_token: int
    kv_cache_basis: str
    seq_length: int
    schedule: Optional[Schedule]
    layouts: Tuple[Layout, ...]
    fit: Optional[Fit]
    trial: Optional[Trial]
    notes: Tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 if the run does not fit the given memory, or MindSpore's planner could not be asked, else 0."""
        fails = self.trial is not None and not self.trial.passed
        return int(fails or self.fit is not None and not self.fit.fits)

    def __str__(self) -> str:
        parts = [_facts(self), _memory(self), *([_compared(self.device, self.trial)] if self.trial else [])]
        parts.append(_layouts(self.layouts))
        parts += [_fit(self.fit, self.needed)] if self.fit else []
        parts.append("\n".join(wrapped("", text, WIDTH) for text in (*self.notes, *_BASES)))
        return "\n\n".join(part for part in parts if part)


def make_plan(
    path: str,
    overrides: Sequence[str] = (),
    memory: Optional[int] = None,
    devices: Sequence[int] = DEVICES,
    verify: bool = False,
) -> Union[PlanReport, PynativePlan]:
    """Returns the needs of the run of a complete MindFormers YAML; raises LoraError if a setting in it is wrong.

    For a YAML of the PyNative Trainer, it returns a PynativePlan for one device.

    Args:
        overrides (list of str): As on mindlora-run's command line: ``--a.b.c``, value, ``--epochs``, value, ...
        memory (int): Bytes of a device, to compare with the needs.
        devices (list of int): Numbers of devices to plan for in addition to the YAML's.
        verify (bool): Whether MindSpore's own planner is asked too, which takes minutes; then errors are also those of
            try_rank. Default: False.
    """
    content = read_merged(path)
    if is_pynative(content):
        if verify:
            raise ConfigError(
                f"{path} is a YAML of MindFormers' PyNative Trainer, which makes no graph that MindSpore's planner "
                "could be asked about. Leave --verify out."
            )
        return plan_of_pynative(content, path, overrides, memory)
    config = read_yaml(path)
    apply_overrides(config, overrides)
    report = plan_of(config, path, memory, devices)
    if not verify:
        return report
    # The first rank of the pipeline stage in the table.
    stages = YamlRun(config).setting("parallel_config.pipeline_stage") if report.devices > 1 else 1
    return dataclasses.replace(report, trial=try_rank(config, report.device.stage * report.devices // stages))


def plan_of(config: Dict[str, Any], name: str, memory: Optional[int], devices: Sequence[int]) -> PlanReport:
    """Returns the plan of a YAML's content; see make_plan."""
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in devices):
        raise ConfigError(f"devices is {list(devices)!r}: it must hold whole numbers of at least 1.")
    run = read_run(config)
    weights = run.weights
    division = run.division
    device = memory_of(run)
    return PlanReport(
        name,
        run.architecture.title,
        run.yaml.mode,
        sum(weight.count for weight in weights),
        sum(weight.count for weight in weights if weight.trained),
        run.adapted,
        _adapter(run),
        len(run.adapters) or int(run.lora is not None),
        _files_size(run),
        _dtype(weights, run.held),
        division.devices,
        _division(division),
        _batch(run) if run.yaml.trains else "",
        needed_while_loading(run),
        device,
        loading_of(run),
        kv_cache_per_token(run),
        EXACT if run.architecture.legacy and run.architecture.trains else ARITHMETIC,
        run.seq_length,
        schedule_of(run) if run.yaml.trains else None,
        # Several adapters train on one device.
        () if run.adapters else tuple(layouts_of(run, devices)),
        None if memory is None else fit(run, memory, devices),
        None,
        tuple(_notes(run)),
    )


def _adapter(run: Run) -> str:
    if run.lora is None:
        return ""
    ranks = sorted({rank for path in run.adapted for rank in run.ranks(path)})
    several = f"{len(run.adapters)} adapters, each " if run.adapters else ""
    return f"{several}{run.lora.variant.name} of rank {', '.join(map(str, ranks))} on {len(run.adapted)} cells"


def _files_size(run: Run) -> Optional[int]:
    """Returns the bytes of adapter_model.safetensors, of several adapters together, or None if unpredictable."""
    sizes = [adapter_file_size(alone) for alone in run.alone]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _dtype(weights: List[Weight], forms: Mapping[str, IntegerForm]) -> str:
    held = {name: f"integers of {form.bits} bits" for name, form in forms.items()}
    counts: "collections.Counter[str]" = collections.Counter()
    for weight in weights:
        if not weight.adapter:
            counts[held.get(weight.name, "NF4" if weight.dtype == "uint8" else weight.dtype)] += weight.count
    return " and ".join(dtype for dtype, count in counts.most_common(2) if count > 0.01 * sum(counts.values()))


def _division(division: Division) -> str:
    fields = {
        "data_parallel": division.data,
        "model_parallel": division.model,
        "pipeline_stage": division.pipeline,
        "context_parallel": division.context,
    }
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value > 1)


def _batch(run: Run) -> str:
    schedule = schedule_of(run)
    each = f"{run.rows_of_model} x " * (run.rows_of_model > 1)
    parts = [f"{run.yaml.rows} row{'s' * (run.yaml.rows > 1)} of {each}{run.seq_length:,} tokens"]
    parts += [f"{run.yaml.accumulation} micro-batches"] if run.yaml.accumulation > 1 else []
    parts += [f"{run.division.micro_batches} micro-batches in the pipeline"] if run.division.pipeline > 1 else []
    parts += [f"{run.division.data} devices with rows of their own"] if run.division.data > 1 else []
    rows = f"{schedule.rows_per_step:,} row{'s' * (schedule.rows_per_step > 1)}"
    return f"{' x '.join(parts)} = {rows}, {schedule.tokens_per_step:,} tokens in a step"


def _notes(run: Run) -> List[str]:
    notes = []
    kind = optimizer_of(run)[0]
    if run.yaml.trains and kind not in OPTIMIZERS:
        notes.append(f"Note: the optimizer {kind} is not known; it is counted as AdamW, with two float32 states.")
    if run.lora is not None and not run.lora.variant.in_files:
        name = run.lora.variant.name
        notes.append(f"Note: {name} saves the ranks that training leaves: the size of its file is known after the run.")
    elif run.lora is not None and _files_size(run) is None:
        notes.append(
            "Note: the pairs of a joined cell's parts are saved as one, of a rank that depends on their values, so the "
            "size of the file is known after the run."
        )
    if run.predicts_further:
        notes.append(
            "Note: the parameters of layers that predict further tokens (num_nextn_predict_layers) are counted, their "
            "activations and their loss are not."
        )
    if run.division.pipeline > 1:
        notes.append(
            f"Note: the table is that of stage {memory_of(run).stage} of the pipeline, which needs most, with "
            f"{run.division.in_flight(memory_of(run).stage)} micro-batches in flight."
        )
    if run.yaml.at("swap_config.swap"):
        notes.append("Note: swap_config moves activations to the host; the plan counts them on the device.")
    return notes + [f"Note: {advice}" for advice in advise(run.yaml, run.adapted, run.linear)]


def _facts(report: PlanReport) -> str:
    share = f", of which {report.trained:,} are trained ({100 * report.trained / report.parameters:.4f} %)"
    facts = [
        ("run", f"{report.yaml}: {report.mode}, {report.model}"),
        ("parameters", f"{report.parameters:,}{share * (report.schedule is not None)}"),
    ]
    if report.adapter:
        facts.append(("adapter", f"{report.adapter}: {listed(report.adapted)}"))
    if report.adapter_file:
        size = f"{size_text(report.adapter_file)} ({report.adapter_file:,} bytes)"
        of_all = f" of {report.adapters} adapters" if report.adapters > 1 else ""
        facts.append(("adapter file", f"adapter_model.safetensors{of_all}: {size}, exact"))
    if report.batch:
        facts.append(("batch", report.batch))
    if report.schedule:
        facts.append(("steps", _steps(report.schedule)))
    return "\n".join(wrapped(f"{name:<14}", text, WIDTH) for name, text in facts)


def _steps(schedule: Schedule) -> str:
    if schedule.rows is None:
        return f"not known: {schedule.data}"
    epochs = f"{schedule.epochs} epoch{'s' * (schedule.epochs > 1)}"
    return (
        f"{epochs} of {schedule.rows:,} rows ({schedule.data}): {schedule.steps:,} steps, {schedule.tokens:,} tokens "
        "with padding"
    )


def _memory(report: PlanReport) -> str:
    device = report.device
    rows = [
        (f"base, {report.dtype}" if line.name == "base" else line.name, gib(line.size), line.basis)
        for line in device.lines
    ]
    rows.append(("in all", gib(device.total), ""))
    if device.kept_at_most:
        rows.append(("  activations with nothing recomputed", gib(device.kept_at_most), ""))
        rows.append(("  activations with all layers recomputed", gib(device.kept_at_least), ""))
    rows.append((f"  host of each process, {report.loading.name}", gib(report.loading.size), report.loading.basis))
    cache = gib(report.kv_cache_per_token * report.seq_length)
    rows.append(("  KV cache of one row, when asked", cache, report.kv_cache_basis))
    title = f"one device of {report.devices}, {report.division}" if report.devices > 1 else "one device"
    return _table((title, "GiB", "basis"), rows, (">", "<"))


def _compared(device: DeviceMemory, trial: Trial) -> str:
    """Returns a sentence that compares MindSpore's planner with the plan, or says why it cannot."""
    who = f"MindSpore's own Ascend backend, on a stand-in for CANN, as rank {trial.rank} of {trial.devices}"
    if not trial.passed or trial.used is None or trial.actual is None:
        return wrapped("", f"{who}, ended after {trial.steps} of {STEPS} steps: {trial.error}", WIDTH)
    planned = {"peak without fragments": device.used, "peak with fragments": device.total}
    found = {"peak without fragments": trial.used, "peak with fragments": trial.actual}
    rows = []
    for name, size in planned.items():
        rows.append((name, gib(found[name]), gib(size), f"{100 * (size / found[name] - 1):+.1f} %"))
    rows_of = "made-up rows" if trial.made_up else "rows of the data"
    how = (
        f"{who}, compiled all layers and took {trial.steps} steps on {rows_of} in {trial.seconds:.0f} s. No kernel was "
        "launched: work space of kernels and the time of a step are not known."
    )
    table = _table(("MindSpore's planner", "GiB", "plan", "plan is"), rows, ">>>")
    return f"{table}\n{wrapped('', how, WIDTH)}"


def _layouts(layouts: Sequence[Layout]) -> str:
    if not layouts:
        return ""
    divides = any(layout.yaml is not None for layout in layouts)
    titles = ["GiB on each device", "data parallel", "optimizer parallel", "model parallel"]
    rows = []
    for layout in layouts:
        sizes = [layout.data, layout.optimizer, layout.model] + ([layout.yaml] if divides else [])
        name = f"{layout.devices} device{'s' * (layout.devices > 1)}"
        rows.append((name, *("-" if size is None else gib(size) for size in sizes)))
    table = _table((*titles, *(["as the YAML"] if divides else [])), rows, ">" * (3 + divides))
    notes = [wrapped("- ", note, WIDTH) for layout in layouts for note in layout.notes]
    return "\n".join([table, *notes])


def _fit(fit: Fit, needed: int) -> str:
    limit = f"{gib(fit.memory)} GiB, of which {gib(fit.usable)} can be filled: {fit.reason}"
    longest = wrapped("", _longest(fit), WIDTH)
    if fit.fits:
        return f"{wrapped('', f'The run fits: it needs {gib(needed)} GiB. A device has {limit}.', WIDTH)}\n{longest}"
    text = [wrapped("", f"The run does not fit: it needs {gib(needed)} GiB. A device has {limit}.", WIDTH)]
    rows = [(trial.change, gib(trial.needed), "fits" if trial.fits else "") for trial in fit.tried]
    text.append(_table(("change", "GiB", ""), rows, (">", "<")))
    if fit.lines:
        text.append(f"\nTo make the last change, put into the YAML:\n\n{textwrap.indent(fit.lines, '  ')}")
    else:
        text.append("\nNone of these makes it fit: use more devices (--devices), or a smaller model or seq_length.")
    return "\n".join([*text, "", longest])


def _longest(fit: Fit) -> str:
    """Returns a sentence on the longest rows."""
    rows = []
    for row in fit.longest_rows:
        positions = ", all positions that the model has" if row.is_the_models else ""
        rows.append(f"{row.seq_length:,} tokens at batch_size {row.batch_size}{positions}")
    return f"Longest rows that fit: {'; '.join(rows)}." if rows else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Returns a table, with its first column wrapped if the table would be wider than WIDTH."""
    first, *widths = [max(map(len, column)) for column in zip(titles, *rows)]
    room = min(first, WIDTH - sum(2 + width for width in widths))
    lines: List[str] = []
    for name, *others in (titles, *rows):
        indent = name[: len(name) - len(name.lstrip())] + "  "
        pieces = textwrap.wrap(name, room, subsequent_indent=indent, drop_whitespace=True) or [""]
        cells = [f"{text:{side}{width}}" for text, side, width in zip(others, sides, widths)]
        lines.append("  ".join([f"{pieces[0]:<{room}}", *cells]).rstrip())
        lines += pieces[1:]
    return "\n".join(lines)
