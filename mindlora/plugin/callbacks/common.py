"""What the callbacks share: registration in MindFormers, what a step measured, events, and a check of arguments."""

from typing import TYPE_CHECKING

from mindformers.core.callback.callback import _get_loss_output
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindlora.plugin.graph.network import train_step_of
from mindlora.plugin.graph.step_record import StepRecord
from mindlora.plugin.log import logger

if TYPE_CHECKING:
    from mindspore.train.callback._callback import InternalCallbackParam

register = MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)


def loss_of(params: "InternalCallbackParam") -> float:
    """Returns the training loss of the step that MindSpore's callback parameters describe."""
    return float(_get_loss_output(params.net_outputs)[0])


def step_record(params: "InternalCallbackParam") -> StepRecord:
    """Returns what the step that has just ended measured; from a train step that is not mindlora's, the loss alone."""
    step = train_step_of(params.train_network)
    return step.last_record() if step is not None and not step.is_mindformers_step else StepRecord(loss_of(params))


def report_event(params: "InternalCallbackParam", kind: str, message: str) -> None:
    """Logs what happened to a run, and keeps it for the run's report.

    Args:
        params (InternalCallbackParam): MindSpore's callback parameters; ``training_events`` in them gets the event.
        kind (str): One word for what it is, such as "rollback".
        message (str): A sentence for the log and the report.
    """
    logger.info("step %d: %s", params.cur_step_num, message)
    events = params.get("training_events") or []
    params["training_events"] = [*events, {"step": params.cur_step_num, "kind": kind, "message": message}]
