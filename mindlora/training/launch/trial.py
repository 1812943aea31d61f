"""Two training steps without real values or saves, which mindlora.run.plan.trial runs on the Ascend backend.

python -m mindlora.training.launch.trial YAML ROWS OUTCOME: trains according to YAML on the rows that ROWS describes,
both written by mindlora.run.plan.trial, and writes to OUTCOME how many steps were completed and the error that ended
them. ROWS and OUTCOME are JSON.
"""

import json
import re
import sys
from typing import Any, Dict, Iterator

import numpy as np
from mindformers.tools.register import MindFormerConfig
from mindspore.train import Callback, RunContext

from mindlora.core.errors import LoraError
from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.plan.trial import STEPS
from mindlora.training.callbacks.common import register
from mindlora.training.launch import launcher
from mindlora.training.launch.screen import sentence

# These callbacks load, compare or change the base's values, or slices of it; a trial has neither.
_NEED_VALUES = ("BaseWeights", "BaseCheck", "ReferenceCheck", "LoraInitialization", "AdapterSlices")
# The path that precedes the package in a module's path.
_IN_PACKAGE = re.compile(r".*/(?=(mindlora|mindformers)/)")
# MindSpore's message lists the calls that led to an operator, the innermost one last.
_CALL = re.compile(r"In file (\S+?):(\d+)")


class EnoughSteps(Exception):
    """Raised when the trial has taken its last step."""


@register
class TrialSteps(Callback):
    """Counts steps, and ends the run after a trial's last step."""

    ended = 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Counts a step; raises EnoughSteps after the last one."""
        TrialSteps.ended += 1
        if TrialSteps.ended >= STEPS:
            raise EnoughSteps


def main() -> None:
    """Runs the trial that the command line describes."""
    yaml_path, rows_path, outcome_path = sys.argv[1:]
    problem = ""
    try:
        with open(rows_path, encoding="utf-8") as file:
            for path, rows in json.load(file).items():
                write_mindrecord(made_up_rows(rows), path)
        config = launcher.build_config(["--config", yaml_path])
        launcher.prepare(config)
        callbacks = [callback for callback in config.callbacks if callback["type"] not in _NEED_VALUES]
        config.callbacks = [*callbacks, MindFormerConfig(type="TrialSteps")]
        launcher.start(config)
    except EnoughSteps:
        pass
    except LoraError as error:
        problem = str(error)
    except Exception as error:
        problem = described(error)
    with open(outcome_path, "w", encoding="utf-8") as file:
        json.dump({"steps": TrialSteps.ended, "error": problem}, file)


def made_up_rows(rows: Dict[str, Any]) -> Iterator[Dict[str, np.ndarray]]:
    """Yields rows with the columns, shapes and number that mindlora.run.plan.trial requests: tokens count up."""
    for _ in range(rows["count"]):
        row = {}
        for name, shape in rows["columns"].items():
            row[name] = np.broadcast_to(_column(name, shape[-1], rows), shape).astype(np.int32)
        if "answers" in row:
            # A preference is two rows of the model: its two answers.
            row["answers"] = np.broadcast_to(np.arange(2, dtype=np.int32)[:, None], row["answers"].shape)
        yield row


def _column(name: str, width: int, rows: Dict[str, Any]) -> np.ndarray:
    """Returns one row of a column: tokens, labels shifted by one place, or the marks of an example."""
    tokens = 1 + np.arange(width) % (rows["tokens"] - 1)
    tokens[: len(rows["begin"])] = rows["begin"]
    if name == "input_ids":
        return tokens
    if name == "labels":
        return np.roll(tokens, -1) if rows["labels"] is None else np.zeros(width)
    return np.ones(width)


def described(error: Exception) -> str:
    """Returns an error of MindSpore or MindFormers as one sentence, with the line of the network that caused it."""
    calls = _CALL.findall(str(error))
    where = ""
    if calls:
        path, line = calls[-1]
        where = f" ({_IN_PACKAGE.sub('', path)}, line {line})"
    return f"{type(error).__name__}: {sentence(error)}{where}"


if __name__ == "__main__":
    main()
