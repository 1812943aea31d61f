"""Two training steps without what needs values or saves: what mindlora.run.plan.trial runs on the Ascend backend

python -m mindlora.training.launch.trial YAML ROWS OUTCOME: trains as the YAML says on the rows that ROWS describes,
both written by mindlora.run.plan.trial, and writes to OUTCOME how many steps ended and which error ended them. Both
files are JSON.
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

# They load, compare or change the base's values, of which a trial has none, or slices that only a run has.
_NEED_VALUES = ("BaseWeights", "BaseCheck", "ReferenceCheck", "LoraInitialization", "AdapterSlices")
# What stands before the package in the path of a module.
_IN_PACKAGE = re.compile(r".*/(?=(mindlora|mindformers)/)")
# MindSpore's message lists the calls that led to an operator, the innermost one last.
_CALL = re.compile(r"In file (\S+?):(\d+)")


class EnoughSteps(Exception):
    """The trial has taken its last step."""


@register
class TrialSteps(Callback):
    """Counts steps, and ends the run after the last one of a trial."""

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
    """Yields rows of the columns, shapes and number that mindlora.run.plan.trial asks for: tokens that count up."""
    for _ in range(rows["count"]):
        row = {}
        for name, shape in rows["columns"].items():
            row[name] = np.broadcast_to(_column(name, shape[-1], rows), shape).astype(np.int32)
        if "answers" in row:
            # The two rows of the model that a preference is are its two answers.
            row["answers"] = np.broadcast_to(np.arange(2, dtype=np.int32)[:, None], row["answers"].shape)
        yield row


def _column(name: str, width: int, rows: Dict[str, Any]) -> np.ndarray:
    """Returns one row of a column: tokens, their labels a place ahead, or the marks of an example."""
    tokens = 1 + np.arange(width) % (rows["tokens"] - 1)
    tokens[: len(rows["begin"])] = rows["begin"]
    if name == "input_ids":
        return tokens
    if name == "labels":
        return np.roll(tokens, -1) if rows["labels"] is None else np.zeros(width)
    return np.ones(width)


def described(error: Exception) -> str:
    """Returns an error of MindSpore or MindFormers as one sentence, with the line of the network that it is about."""
    calls = _CALL.findall(str(error))
    where = ""
    if calls:
        path, line = calls[-1]
        where = f" ({_IN_PACKAGE.sub('', path)}, line {line})"
    return f"{type(error).__name__}: {sentence(error)}{where}"


if __name__ == "__main__":
    main()
