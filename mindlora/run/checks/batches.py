"""Checks that the data has enough rows for a step: the rows of a step, and each device's share of them."""

import math
import os
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.core.fields import COUNT
from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.yaml_run import Data, YamlRun

_BATCH = "runner_config.batch_size"
_MICRO_BATCH = "training.local_batch_size"
_ACCUMULATION = "runner_config.gradient_accumulation_steps"
_DATA_PARALLEL = "parallel_config.data_parallel"
_DEVICES = "the number of devices"
# Before a data-parallel run is launched, the doctor assumes the number of devices in an NPU server.
_SUPPOSED = 8


class Batch(NamedTuple):
    """The rows of one step.

    Attributes:
        factors (dict): Name of a number in messages -> the number. Their product is the number of rows in a step.
        shares (int): Number of parts into which MindFormers cuts the data, one for each device with its own rows.
    """

    factors: Dict[str, int]
    shares: int

    @property
    def rows(self) -> int:
        """The number of rows in a step, for all devices together."""
        return math.prod(self.factors.values())

    def __str__(self) -> str:
        return " x ".join(
            f"{name} {number}" for name, number in self.factors.items() if number > 1 or name in (_BATCH, _MICRO_BATCH)
        )


def check_batches(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each dataset of a run that has too few rows for a step, so that the run would have no steps.

    It skips data that does not exist, and data whose rows cannot be counted without MindSpore.
    """
    devices = launched_devices()
    if run.trains and _drops_rest(run, "train_dataset"):
        batch = _sunk(run, batch_of(run, devices or 1))
        for where, data in _training_data(run):
            finding = _too_few(run, "train_dataset", where, data, batch)
            if finding is None and devices is None and run.in_parallel and run.accumulates_here:
                finding = _too_few(run, "train_dataset", where, data, _sunk(run, batch_of(run, _SUPPOSED)))
                finding = finding and warning(finding.key, finding.found, finding.advice)
            if finding is not None:
                yield finding
    if run.evaluates and _drops_rest(run, "eval_dataset"):
        batch = batch_of(run, devices or 1, accumulates=False)
        finding = _too_few(run, "eval_dataset", "eval_dataset", run.eval_data, batch)
        if finding is not None:
            yield finding
    for where, path in run.held_out_data if run.trains else ():
        if mindrecord_files(path) and rows_up_to(1, path) == 0:
            yield error(where, f"{where}: {path} has no rows.", "Name data with rows.")


def rows_left_out(run: YamlRun) -> Iterator[str]:
    """Yields a sentence for each dataset of a training run whose last rows, too few for a step, an epoch leaves out.

    The YAML must have no mistakes. It skips data whose rows cannot be counted without MindSpore.
    """
    batch = batch_of(run, launched_devices() or 1)
    for where, data in _training_data(run):
        yield from _left_out(run, where, data, batch, "a step takes")


def pynative_rows_left_out(config: Mapping[str, Any], micro_batches: int) -> Iterator[str]:
    """Yields such a sentence for the YAML of a PyNative run, as completed by the Trainer.

    The Trainer reads ``micro_batches`` at once, and leaves out the rows that do not fill them.
    """
    shares = value_at(config, "parallelism.data_parallel")
    rows = value_at(config, _MICRO_BATCH)
    factors = {_MICRO_BATCH: rows, "micro-batches": micro_batches, "parallelism.data_parallel": shares}
    dataset = {**(config.get("train_dataset") or {}), "data_loader": value_at(config, "train_dataset.dataloader")}
    read = YamlRun({"train_dataset": dataset})
    yield from _left_out(read, "train_dataset", read.train_data, Batch(factors, shares), "MindFormers reads")


def _left_out(run: YamlRun, where: str, data: Optional[Data], batch: Batch, taken: str) -> Iterator[str]:
    """Yields a sentence if an epoch leaves out rows of the data."""
    if data is None or not _drops_rest(run, "train_dataset"):
        return
    rows = _available(run, "train_dataset", data, math.inf)
    if rows == math.inf:
        return
    batches = math.ceil(rows / batch.shares) // (batch.rows // batch.shares)
    left = int(rows) - batches * batch.rows
    if left > 0:
        yield f"{where}: each epoch leaves out {left} of {rows} rows (drop_remainder): {taken} {batch}."


def batch_of(run: YamlRun, devices: int, accumulates: bool = True) -> Batch:
    """Returns the rows of a step, as MindFormers computes them.

    Args:
        config (mapping): The content of a YAML with valid keys.
        devices (int): Devices of the run, which matter for data parallelism.
        accumulates (bool): Whether the step is a training step, which may consist of several micro-batches.
    """
    factors = {_BATCH: run.setting(_BATCH)}
    if run.accumulates_here:
        factors.update({_ACCUMULATION: run.accumulation} if accumulates else {})
        shares = devices if run.in_parallel else 1
        return Batch({**factors, _DEVICES: shares}, shares)
    if accumulates:
        stages = run.setting("parallel_config.pipeline_stage")
        micro_batches = "parallel_config.micro_batch_num" if stages != 1 else _ACCUMULATION
        for key in (micro_batches, "micro_batch_interleave_num"):
            factors[key] = run.setting(key)
    shares = run.setting(_DATA_PARALLEL)
    factors[_DATA_PARALLEL] = shares
    return Batch(factors, 1 if run.reads_all else shares)


def _sunk(run: YamlRun, batch: Batch) -> Batch:
    """Returns the rows that MindFormers feeds to the device at once, at least once in the run, by sink_size."""
    steps, epochs = (run.setting(f"runner_config.{key}") for key in ("sink_size", "epochs"))
    if not run.setting("runner_config.sink_mode") or steps not in COUNT or epochs not in COUNT:
        return batch
    return batch._replace(factors={**batch.factors, "runner_config.sink_size": -(-steps // epochs)})


def launched_devices() -> Optional[int]:
    """Returns the number of processes that msrun or mpirun has launched, this one included; None without a launch."""
    for name in ("RANK_SIZE", "MS_WORKER_NUM", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _drops_rest(run: YamlRun, dataset: str) -> bool:
    """Returns whether an incomplete last batch is left out; otherwise a step may have fewer rows."""
    return bool((run.at(dataset) or {}).get("drop_remainder", True))


def _training_data(run: YamlRun) -> Iterator[Tuple[str, Optional[Data]]]:
    """Yields (key in the YAML, data) for the data on which a run trains."""
    if not run.adapters or not all(isinstance(node, Mapping) and node.get("data") for node in run.adapters):
        yield "train_dataset", run.train_data
    yield from run.data_of_adapters


def _too_few(run: YamlRun, dataset: str, where: str, data: Optional[Data], batch: Batch) -> Optional[Finding]:
    """Returns an error if the data has too few rows for a step, otherwise None."""
    if data is None or not all(number in COUNT for number in batch.factors.values()):
        return None
    samples = _samples(run, dataset)
    available = _available(run, dataset, data, batch.rows)
    # A device gets one row more if they cannot be shared equally, but MindFormers rounds num_samples down.
    share = math.inf if available == math.inf else math.ceil(available / batch.shares)
    share = min(share, samples // batch.shares) if samples else share
    if share >= batch.rows // batch.shares:
        return None
    factors = [name.rpartition(".")[2] for name, number in batch.factors.items() if number > 1]
    return error(
        where,
        f"{where} has {available} rows, but a step needs {batch.rows} ({batch}).",
        f"Lower {' or '.join(factors) or 'batch_size'}, or give more data.",
    )


def _samples(run: YamlRun, dataset: str) -> Optional[int]:
    samples = run.at(f"{dataset}.data_loader.num_samples")
    return samples if samples in COUNT else None


def _available(run: YamlRun, dataset: str, data: Data, enough: float) -> float:
    """Returns the number of rows that a run reads, if there are fewer than ``enough``."""
    return min(rows_up_to(enough, data), _samples(run, dataset) or math.inf)


def rows_up_to(enough: float, data: Data) -> float:
    """Returns the number of rows in the data; once there are enough, the other files, maybe thousands, stay closed."""
    total = 0
    files: List[str] = mindrecord_files(data)
    for file in files:
        rows = row_count(file)
        if rows is None:
            return math.inf
        total += rows
        if total >= enough:
            break
    return total if files else math.inf
