"""EachAdapter: calls each adapter's own callbacks, which see a run with only this adapter."""

import dataclasses
import importlib.util
import os
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import numpy as np
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore import Callback, nn
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import DivergenceError, LoraError
from mindlora.core.fields import ignore_token_id
from mindlora.core.json_files import write_json
from mindlora.serving.evaluation.report import compare
from mindlora.training.callbacks.common import register
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.held_out.cells import HeldOutLossCell
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, innermost, train_step_of
from mindlora.training.report import write_report
from mindlora.training.report.run_report import RunReport
from mindlora.training.resume import training_state
from mindlora.training.several import resuming as several_adapters
from mindlora.training.several.graph_mode import datasets_of
from mindlora.training.several.rules import OF_ADAPTER
from mindlora.training.several.stack import AdapterStack
from mindlora.training.several.step_of_adapter import HeldOutOfAdapters, StepOfAdapter
from mindlora.training.several.train_step import UpdatesOfAdapters

# Files in the run's output folder, in addition to a folder for each adapter.
COMPARISON, PAGE = "comparison.json", "comparison.html"
# Parameters of callbacks that are specific to an adapter, in addition to those of parameters_of.
_OF_ITS_OWN = ("train_network", "list_callback", "net_outputs", "eval_results", "training_events")


class BestRows(Callback):
    """Saves the rows of an adapter's best held-out loss with its state; the adapters are compared by these rows."""

    def __init__(self, held_out: HeldOutOfAdapters, number: int):
        super().__init__()
        self.held_out = held_out
        self.number = number

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return self.held_out.state_of(self.number)

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.held_out.restore(self.number, state)


class AdapterRun:
    """One adapter's part of a run: its callbacks and their parameters.

    Attributes:
        name (str): The name of the adapter's folder.
        settings (dict): The adapter's own settings.
        ended (dict or None): Where it stopped learning: the "step" and the "reason", "" for the end of the run.
    """

    def __init__(
        self,
        node: Mapping[str, Any],
        shared: InternalCallbackParam,
        own: Mapping[str, Any],
        step: StepOfAdapter,
        rows: BestRows,
    ):
        self.name = node["name"]
        self.settings = node["settings"]
        self.step = step
        self.ended: Optional[Dict[str, Any]] = None
        nodes = [dict(callback) for callback in node["configuration"]["callbacks"] if callback["type"] in OF_ADAPTER]
        self.callbacks: List[Callback] = [
            rows,
            *(
                MindFormerRegister.get_instance_from_cfg(MindFormerConfig(**callback), MindFormerModuleType.CALLBACK)
                for callback in nodes
            ),
        ]
        self.params = InternalCallbackParam()
        self.params.update(shared)
        self.params.update(own)
        self.params.update(train_network=step, list_callback=self.callbacks)
        self.own_keys = {*_OF_ITS_OWN, *own}
        self.context = RunContext(self.params)

    def follow(self, shared: InternalCallbackParam) -> None:
        """Copies the parameters that all adapters share: step, epoch and so on."""
        self.params.update({key: value for key, value in shared.items() if key not in self.own_keys})

    def call(self, event: str) -> None:
        """Calls each callback for an event, such as "on_train_begin"."""
        for callback in self.callbacks:
            getattr(callback, event)(self.context)

    def end_step(self) -> None:
        """Calls the callbacks after a step of the adapter; ends its run if one of them requests it."""
        record = self.step.last_record()
        self.params["net_outputs"] = (record.loss, record.skipped, self.step.scale_sense, record.learning_rate, None)
        self.call("on_train_step_end")
        if self.context.get_stop_requested() or self.params.cur_step_num >= training_state.total_steps(self.params):
            self.end()

    def end(self) -> None:
        """Ends the adapter's run: saves it in its current state, and stops its learning."""
        # MindSpore does this at the end of training.
        self.params.pop("eval_results", None)
        self.call("on_train_end")
        self.step.stop()
        reasons = []
        for callback in self.callbacks:
            try:
                callback.__exit__(None, None, None)
            except LoraError as error:
                reasons.append(str(error))
        self.ended = {"step": self.params.cur_step_num, "reason": " ".join(reasons)}

    def stay(self, folder: str, ended: Mapping[str, Any]) -> None:
        """Restores the adapter to its state at its end, before the run was resumed."""
        training_state.restore_state(folder, self.params)
        self.step.stop()
        self.ended = dict(ended)


@register
class EachAdapter(Callback):
    """Calls each adapter's callbacks in a run with several, as a run with only this adapter would.

    If a callback stops an adapter's run, the adapter is saved and stops learning, and the others continue; the run ends
    with the last one. adapters.json lists the stopped adapters. A resumed run continues exactly as if it had never
    stopped, as with LoraCheckpoint. mindlora-run adds this callback to a run with pet_config.adapters.

    Args:
        runs (list of dict): Each adapter's "name", its own "settings", the "configuration" of a run with it alone, and,
            if it stays as it was saved, where it "ended" and the "folder".
        directory (str): The folder of adapters.json.
    """

    def __init__(self, runs: List[Dict[str, Any]], directory: str):
        super().__init__()
        self.nodes = runs
        self.saved_in = directory
        self.directory = os.path.abspath(get_output_root_path())
        self.runs: List[AdapterRun] = []
        self.held_out: Optional[HeldOutOfAdapters] = None
        # The path of the held-out prompts, if the adapters learn from rewards.
        self.rated: Optional[str] = None
        # Names of adapters that ended before the run.
        self.left: Set[str] = set()

    def on_train_begin(self, run_context: RunContext) -> None:
        """Sets the adapters' initial values, or a resumed run's values."""
        params = run_context.original_args()
        stack = innermost(params.train_network, lambda cell: hasattr(cell, "stack")).stack
        steps, self.held_out = self.steps_and_held_out(params.train_network, stack.count)
        self.set_initial_values(stack)
        policies = getattr(steps, "policies", None)
        if policies is not None:
            self.rated, policies.keep = policies[0].settings.held_out_prompts, self._keep_rewards
        for number, node in enumerate(self.nodes):
            of_adapter = StepOfAdapter(stack, steps, number, self.held_out)
            own = self.parameters_of(number, params)
            run = AdapterRun(node, params, own, of_adapter, BestRows(self.held_out, number))
            self.runs.append(run)
            self.begin(run, node)
            if run.ended is not None:
                at, reason = run.ended["step"], run.ended["reason"]
                logger.info("The adapter %s stays as it was at step %d. %s", run.name, at, reason)
                self.left.add(run.name)
        # All learning adapters begin at the same step.
        params.cur_step_num = next(run.params.cur_step_num for run in self.runs if run.ended is None)
        self.tell_how_to_go_on(params)
        self._write_record()

    # Methods that differ under another Trainer.

    def steps_and_held_out(self, train_network: nn.Cell, adapters: int) -> Tuple[UpdatesOfAdapters, HeldOutOfAdapters]:
        """Returns the object that takes all adapters' steps, and the one that measures their held-out losses."""
        step = train_step_of(train_network)
        model = base_of(step.network)
        return step, HeldOutOfAdapters(HeldOutLossCell(model, ignore_token_id(model.config), by_row=True), adapters)

    def set_initial_values(self, stack: AdapterStack) -> None:
        """Sets the adapters' initial values."""
        stack.set_initial_values()

    def parameters_of(self, number: int, params: InternalCallbackParam) -> Dict[str, Any]:
        """Returns the parameters of an adapter's callbacks that are not shared by all adapters."""
        dataset = datasets_of(params.train_dataset, len(self.nodes))[number]
        return {
            "train_dataset": dataset,
            "batch_num": dataset.get_dataset_size(),
            "run_configuration": self.nodes[number]["configuration"],
        }

    def begin(self, run: AdapterRun, node: Mapping[str, Any]) -> None:
        """Begins an adapter's run, or leaves the adapter where it had ended."""
        if node.get("ended"):
            run.stay(node["folder"], node["ended"])
        else:
            run.call("on_train_begin")

    def tell_how_to_go_on(self, params: InternalCallbackParam) -> None:
        """Keeps the message for a stopped run."""
        params["how_to_go_on"] = (
            f"All adapters are saved in {self.saved_in}. To resume, repeat the command with --resume, or set "
            "resume: True in LoraCheckpoint."
        )
        if not any(isinstance(callback, LoraCheckpoint) for run in self.runs for callback in run.callbacks):
            params["how_to_go_on"] = "Nothing was saved: callbacks has no LoraCheckpoint."

    # The events of a run.

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Calls the callbacks of each learning adapter."""
        params = run_context.original_args()
        # MindSpore counts epochs from 1, even in a resumed run.
        params.cur_epoch_num = params.cur_step_num // params.batch_num + 1
        self._call("on_train_epoch_begin", run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Calls the callbacks of each learning adapter."""
        self._call("on_train_epoch_end", run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Calls the callbacks of each learning adapter."""
        self.held_out.begin(run_context.original_args().cur_step_num)
        self._call("on_train_step_begin", run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Calls each adapter's callbacks after its step, and ends the run when the last adapter's run ends."""
        params = run_context.original_args()
        for run in self._learning(params):
            run.end_step()
            if run.ended is not None and params.cur_step_num < training_state.total_steps(params):
                reason = run.ended["reason"] or "Its run has ended."
                logger.warning("step %d: the adapter %s stops learning. %s", params.cur_step_num, run.name, reason)
                self.left.add(run.name)
                self._write_record()
        if not self._learning(params):
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        """Ends the runs of adapters that are still learning, and compares all adapters."""
        for run in self._learning(run_context.original_args()):
            run.end()
        if get_real_rank() != 0:
            return
        comparisons = list(self._comparisons())
        for comparison in comparisons:
            logger.info("The adapters on %s:\n%s", comparison.measure.source, comparison)
        os.makedirs(self.directory, exist_ok=True)
        write_json(os.path.join(self.directory, COMPARISON), [dataclasses.asdict(each) for each in comparisons])
        self._write_page(comparisons)

    def __exit__(self, *error: Any) -> None:
        """Raises DivergenceError if a guard has ended the run of every adapter."""
        failures = [f"{run.name}: {run.ended['reason']}" for run in self.runs if run.ended and run.ended["reason"]]
        if error[0] is None and failures and len(failures) == len(self.runs):
            raise DivergenceError(" ".join(failures))

    def _write_record(self):
        if get_real_rank() != 0:
            return
        adapters = [{"name": run.name, "settings": run.settings, "ended": run.ended} for run in self.runs]
        several_adapters.write_record(self.saved_in, adapters)

    def _keep_rewards(self, number: int, rewards: np.ndarray) -> None:
        """Keeps the rewards of an adapter's answers to held-out prompts, if they are its best."""
        self.held_out.keep(number, self.rated, -rewards, np.ones(len(rewards)))

    def _comparisons(self):
        """Yields a Comparison of the adapters for each dataset of their held-out losses or rewards."""
        for path, best in self.held_out.best.items():
            names = {number: self.runs[number].name for number in best}
            losses = {names[number]: rows for number, (rows, _, _) in best.items()}
            steps = {names[number]: step for number, (_, _, step) in best.items()}
            counts = next(iter(best.values()))[1]
            comparison = compare(losses, counts, steps, os.path.basename(path), are_rewards=path == self.rated)
            if comparison is not None:
                yield comparison

    def _write_page(self, comparisons):
        """Writes the page that shows all adapters side by side."""
        folders = [callback.directory for run in self.runs for callback in run.callbacks if type(callback) is RunReport]
        if importlib.util.find_spec("jinja2") is None or not folders:
            return
        page = os.path.join(self.directory, PAGE)
        try:
            write_report(folders, page, comparisons)
        except (LoraError, OSError) as error:
            # A run that takes days must not fail because of its report.
            logger.warning("The page could not be written (%s); make it with mindlora report.", error)
        else:
            logger.info("All adapters are on one page: %s.", page)

    def _learning(self, params):
        """Returns the runs of the learning adapters, after copying the step's parameters to them."""
        learning = [run for run in self.runs if run.ended is None]
        for run in learning:
            run.follow(params)
        return learning

    def _call(self, event, run_context):
        for run in self._learning(run_context.original_args()):
            run.call(event)
