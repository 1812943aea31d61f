"""EachAdapter under MindFormers' PyNative Trainer, whose checkpoints hold all adapters."""

from typing import Any, Dict, Mapping, Tuple

from mindspore import nn
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.text import listed
from mindlora.core.yaml_file import value_at
from mindlora.training.callbacks.common import register, report_event
from mindlora.training.held_out.pynative import LossOfRows
from mindlora.training.model.network import evaluated_model, train_step_of
from mindlora.training.resume import training_state
from mindlora.training.several import each_adapter
from mindlora.training.several.pynative import HeldOutPreferencesOfAdapters
from mindlora.training.several.resuming import check_same_adapters
from mindlora.training.several.stack import AdapterStack
from mindlora.training.several.step_of_adapter import HeldOutOfAdapters
from mindlora.training.several.train_step import UpdatesOfAdapters


def run_facts(configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns a report's facts about a run with this YAML."""
    dataloader = value_at(configuration, "train_dataset.dataloader") or {}
    facts = {
        "training data": dataloader.get("dataset_files") or dataloader.get("dataset_dir"),
        "rows in a step": value_at(configuration, "training.global_batch_size"),
    }
    return {
        "configuration": configuration,
        "defaults": {},
        "data": {name: fact for name, fact in facts.items() if fact},
    }


@register
class EachAdapter(each_adapter.EachAdapter):
    __doc__ = each_adapter.EachAdapter.__doc__

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        # The states in the checkpoint: name of an adapter -> its training_state.
        self.states: Dict[str, Dict[str, Any]] = {}

    def steps_and_held_out(self, train_network: nn.Cell, adapters: int) -> Tuple[UpdatesOfAdapters, HeldOutOfAdapters]:
        """Returns the object that takes all adapters' steps, and the one that measures their held-out losses."""
        step, model = train_step_of(train_network), evaluated_model(train_network)
        if step.preferences is not None:
            return step.updates, HeldOutPreferencesOfAdapters(step.preferences)
        return step.updates, HeldOutOfAdapters(LossOfRows(model, model.config.ignore_token_id, by_row=True), adapters)

    def set_initial_values(self, stack: AdapterStack) -> None:
        """Leaves the adapters' values unchanged: MindFormers has made or loaded them."""

    def parameters_of(self, number: int, params: InternalCallbackParam) -> Dict[str, Any]:
        """Returns the parameters of an adapter's callbacks that are not shared by all adapters."""
        return {"run_facts": run_facts(self.nodes[number]["configuration"])}

    def begin(self, run: each_adapter.AdapterRun, node: Mapping[str, Any]) -> None:
        """Begins or continues an adapter's run, or leaves the adapter where it had ended."""
        state = self.states.get(run.name, {"callbacks": {}, "ended": None})
        anew = training_state.restore_callbacks(state["callbacks"], run.callbacks)
        if anew and self.states:
            found = f"The checkpoint holds nothing of {listed(anew)} of the adapter {run.name}: these begin anew."
            report_event(run.params, "resume", f"{found} Resume with the callbacks of the run to continue exactly.")
        if state["ended"]:
            run.step.stop()
            run.ended = dict(state["ended"])
        else:
            run.call("on_train_begin")

    def tell_how_to_go_on(self, params: InternalCallbackParam) -> None:
        """Leaves the message the same as for one adapter."""

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return {
            run.name: {
                "settings": run.settings,
                "ended": run.ended if run.name in self.left else None,
                "callbacks": training_state.callback_states(run.callbacks),
            }
            for run in self.runs
        }

    def restore_training_state(self, state: Mapping[str, Any]) -> None:
        """Restores what ``training_state`` returned; raises ConfigError if it belongs to other adapters."""
        saved = [{"name": name, "settings": each["settings"]} for name, each in state.items()]
        check_same_adapters("The checkpoint", saved, self.nodes)
        self.states = dict(state)
