"""AdapterHealth: norms, updates and effective ranks of the adapters while they train, and what is wrong with them."""

import itertools
from typing import Dict, Optional

import numpy as np
from mindformers.tools.register import MindFormerConfig
from mindformers.tools.utils import get_real_rank
from mindspore import nn
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.network.cells.cell import LoRACell
from mindlora.network.tree import lora_cells
from mindlora.run.yaml_run import YamlRun
from mindlora.training.callbacks.common import PeriodicCallback, RuleCallback, register, report_event, step_record
from mindlora.training.health.findings import HealthRules
from mindlora.training.health.measures import cell_values, float_parts, measure, weight_norm
from mindlora.training.health.report import event_message, summary, table
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of


@register
class AdapterHealth(RuleCallback, PeriodicCallback):
    """Measures each adapter while it trains, and says in the log what is wrong and what to change.

    Every ``every_steps`` steps and at the last one, rank 0 puts a HealthReport (mindlora.training.health.report) into
    ``adapter_health`` of MindSpore's callback parameters, logs a line, and reports each new finding of
    mindlora.training.health.findings as an event of the run. Norms of gradients are known only if the wrapper has
    record_gradient_norms; mindlora-run sets it. The update of a step is known unless data sinking hides single steps.

    Args:
        every_steps (int): Steps between measurements. Default: 10.

    Raises:
        ConfigError: every_steps is out of range, or the network has no adapters.
    """

    def __init__(self, every_steps: int = 10):
        super().__init__("every_steps", every_steps)
        self.rule = HealthRules()
        self.cells: Dict[str, LoRACell] = {}
        self.weight_norms: Dict[str, Optional[float]] = {}
        # The values before the step that is measured next: path -> part -> array.
        self.kept: Dict[str, Dict[str, np.ndarray]] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        """Finds the adapters."""
        params = run_context.original_args()
        self.cells = dict(lora_cells(params.train_network))
        if not self.cells:
            raise ConfigError(
                "AdapterHealth: the network has no adapters. Set pet_config in the YAML, or remove AdapterHealth from "
                "callbacks."
            )
        if get_real_rank() == 0 and _recording_step(params) is None:
            logger.warning(
                "AdapterHealth: the train step records no gradient norms, so nothing is said about gradients. Set "
                "runner_wrapper to type: LoraTrainOneStepCell with record_gradient_norms: True."
            )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Keeps the values before a step that will be measured."""
        params = run_context.original_args()
        # With data sinking, more than one step may come now.
        if params.cur_step_num == self.step_before + 1 and self.is_due(params):
            for path, cell in self.cells.items():
                parts = float_parts(cell, trained=True)
                self.kept[path] = {name: part.copy() for name, part in parts.items()}

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures if it is due."""
        params = run_context.original_args()
        params.pop("adapter_health", None)
        if self.is_due(params):
            self._measure(params)
        self.step_before = params.cur_step_num
        self.kept = {}

    def is_due(self, params: InternalCallbackParam) -> bool:
        """Returns whether rank 0 measures at this step."""
        return get_real_rank() == 0 and super().is_due(params)

    def _measure(self, params):
        record = step_record(params)
        step = params.cur_step_num
        recording = _recording_step(params)
        if not self.weight_norms:
            self.weight_norms = {path: weight_norm(cell) for path, cell in self.cells.items()}
        # A step that was skipped has changed nothing, and its gradients may have overflowed.
        before = {} if record.skipped else self.kept
        norms = {} if record.skipped or recording is None else recording.gradient_norms()
        values = {
            path: cell_values(cell, self.weight_norms[path], before.get(path, {}), norms)
            for path, cell in self.cells.items()
        }
        report, new = self.rule.judge(measure(step, values), record.learning_rate)
        params["adapter_health"] = report
        logger.info("step %d: %s", step, summary(report))
        for _, same in itertools.groupby(new, key=lambda finding: finding.rule):
            report_event(params, "adapter_health", event_message(list(same)))
        if any(finding.path in report.cells for finding in new):
            logger.info("The adapters with new findings:\n%s", table(report, new))


def _recording_step(params: InternalCallbackParam) -> Optional[nn.Cell]:
    """Returns the train step if it records norms of gradients, or else None."""
    step = train_step_of(params.train_network)
    return step if step is not None and step.records_norms and not step.is_mindformers_step else None


def record_gradient_norms(config: MindFormerConfig) -> None:
    """Makes the train step record the norms of gradients that AdapterHealth reports; the YAML is changed in place."""
    run = YamlRun(config)
    if run.callbacks_of("AdapterHealth") and run.steps_by_mindlora:
        config.runner_wrapper.setdefault("record_gradient_norms", True)
