"""make_plan: from a YAML to a PlanReport."""

import collections
from typing import Any, Dict, List, Optional, Sequence

from mindlora.common.overrides import apply_overrides
from mindlora.common.yaml_file import read_yaml, value_at
from mindlora.config.weights import Weight
from mindlora.errors import ConfigError
from mindlora.plan.adapter_file import adapter_file_size
from mindlora.plan.alternatives import fit, layouts_of
from mindlora.plan.division import Division
from mindlora.plan.memory import ARITHMETIC, EXACT, OPTIMIZERS, kv_cache_per_token, memory_of, optimizer_of
from mindlora.plan.report import PlanReport
from mindlora.plan.run import Run, read_run
from mindlora.plan.schedule import schedule_of

DEVICES = (1, 2, 4, 8)


def make_plan(
    path: str, overrides: Sequence[str] = (), memory: Optional[int] = None, devices: Sequence[int] = DEVICES
) -> PlanReport:
    """Returns what the run of a YAML will take.

    Args:
        path (str): A complete MindFormers YAML.
        overrides (list of str): As on mindlora-run's command line: ``--a.b.c``, value, ``--epochs``, value, ...
        memory (int): Bytes of a device, to be compared with what is needed. Default: None.
        devices (list of int): Numbers of devices to plan for besides the YAML's.

    Raises:
        LoraError: The YAML cannot be read, or a setting in it is wrong.
    """
    config = read_yaml(path)
    apply_overrides(config, overrides)
    return plan_of(config, path, memory, devices)


def plan_of(config: Dict[str, Any], name: str, memory: Optional[int], devices: Sequence[int]) -> PlanReport:
    """Returns the plan of a YAML's content; as make_plan."""
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in devices):
        raise ConfigError(f"devices is {list(devices)!r}: it must hold whole numbers of at least 1.")
    run = read_run(config)
    weights = run.weights
    division, device = run.division, memory_of(run)
    return PlanReport(
        name,
        run.architecture.title,
        run.mode,
        sum(weight.count for weight in weights),
        sum(weight.count for weight in weights if weight.trained),
        run.adapted,
        _adapter(run),
        adapter_file_size(run),
        _dtype(weights),
        division.devices,
        _division(division),
        _batch(run) if run.trains else "",
        device.total,
        device,
        kv_cache_per_token(run),
        EXACT if run.architecture.legacy and run.architecture.trains else ARITHMETIC,
        run.seq_length,
        schedule_of(run) if run.trains else None,
        tuple(layouts_of(run, devices)),
        None if memory is None else fit(run, memory, devices),
        tuple(_notes(run)),
    )


def _adapter(run: Run) -> str:
    if run.lora is None:
        return ""
    ranks = sorted({run.lora.for_cell(path).lora_rank for path in run.adapted})
    return f"{run.lora.variant.name} of rank {', '.join(map(str, ranks))} on {len(run.adapted)} cells"


def _dtype(weights: List[Weight]) -> str:
    counts: "collections.Counter[str]" = collections.Counter()
    for weight in weights:
        if not weight.adapter:
            counts["NF4" if weight.dtype == "uint8" else weight.dtype] += weight.count
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
    parts = [f"{run.rows} row{'s' * (run.rows > 1)} of {run.seq_length:,} tokens"]
    parts += [f"{run.accumulation} micro-batches"] if run.accumulation > 1 else []
    parts += [f"{run.division.micro_batches} micro-batches in the pipeline"] if run.division.pipeline > 1 else []
    parts += [f"{run.division.data} devices with rows of their own"] if run.division.data > 1 else []
    rows = f"{schedule.rows_per_step:,} row{'s' * (schedule.rows_per_step > 1)}"
    return f"{' x '.join(parts)} = {rows}, {schedule.tokens_per_step:,} tokens in a step"


def _notes(run: Run) -> List[str]:
    notes = []
    kind = optimizer_of(run)[0]
    if run.trains and kind not in OPTIMIZERS:
        notes.append(f"Note: the optimizer {kind} is not known; it is counted as AdamW, with two float32 states.")
    if run.lora is not None and not run.lora.variant.in_files:
        name = run.lora.variant.name
        notes.append(f"Note: {name} saves the ranks that training leaves: the size of its file is known after the run.")
    elif run.lora is not None and adapter_file_size(run) is None:
        notes.append(
            "Note: the pairs of a joined cell's parts are saved as one, of a rank that depends on their values, so the "
            "size of the file is known after the run."
        )
    if any(path.startswith("mtp.") for path in run.linear):
        notes.append(
            "Note: the parameters of layers that predict further tokens (num_nextn_predict_layers) are counted, their "
            "activations, logits and loss are not."
        )
    if run.division.pipeline > 1:
        notes.append(
            f"Note: the table is that of stage {memory_of(run).stage} of the pipeline, which needs most, with "
            f"{run.division.in_flight(memory_of(run).stage)} micro-batches in flight."
        )
    if value_at(run.config, "swap_config.swap"):
        notes.append("Note: swap_config moves activations to the host; the plan counts them on the device.")
    return notes
