"""Classifiers: what model.arch.type and num_labels of a YAML need from the rest of it."""

from typing import Any, Iterator, List, Mapping, Optional

from mindlora.core.fields import COUNT
from mindlora.core.yaml_file import PET
from mindlora.models.architectures import registry
from mindlora.models.architectures.classifiers import TASKS
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun

LABELS = "model.model_config.num_labels"
_PREFERENCE, _REWARD = "runner_wrapper.preference", "reward"
# What computes logits of tokens, or samples of them.
_OF_TOKENS = ("SampleAnswers", "Forgetting", "ForgettingBudget")


def check_classifier(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting that does not go with a classifier, or that needs one."""
    labels = run.at(LABELS)
    yield from _check_preference(run, labels)
    if not run.is_classifier:
        if labels is not None:
            yield error(
                LABELS,
                f"num_labels is {labels}, and {run.class_key} is {run.head_class}, which has no labels.",
                f"Set {run.class_key}: {' or '.join(_classes(run))}, or remove num_labels.",
            )
        return
    if labels not in COUNT:
        yield error(
            LABELS,
            f"num_labels is {labels!r}: a classifier needs the number of its labels.",
            "Set it as mindlora data labels says.",
        )
    if run.mode == "predict":
        yield error("run_mode", "run_mode is predict: a classifier writes no text.", "Evaluate it with HeldOutLoss.")
    if run.pet_config.get("adapters") is not None:
        yield error(
            f"{PET}.adapters",
            "pet_config.adapters trains several adapters in one run, and a classifier has one head.",
            "Train one adapter in a run.",
        )
    for _, callback in run.callbacks:
        if callback.get("type") in _OF_TOKENS:
            yield error(
                f"callbacks.{callback['type']}",
                f"{callback['type']} is about texts that the model writes, and the model is a classifier.",
                "Remove it.",
            )


def _check_preference(run: YamlRun, labels: Any) -> Iterator[Finding]:
    """Yields why a loss of preferences does not go with the model: rewards are of classifiers with one label alone."""
    node = run.preference
    loss: Optional[str] = node.get("loss", "dpo") if isinstance(node, Mapping) else None
    rewarded = next(kind for kind in _classes(run) if not TASKS[kind].has_bias)
    if loss == _REWARD and (run.head_class, labels) != (rewarded, 1):
        yield error(
            _PREFERENCE,
            f"{_PREFERENCE}: the loss {_REWARD} needs one score of a text, and the model is {run.head_class} with "
            f"num_labels {labels}.",
            f"Set {run.class_key}: {rewarded} and model_config.num_labels: 1.",
        )
    elif loss not in (None, _REWARD) and run.is_classifier:
        yield error(
            _PREFERENCE,
            f"{_PREFERENCE}: the loss {loss} compares answers that a model writes, and the model is a classifier.",
            f"Set loss: {_REWARD}, which trains a reward model, or remove one of them.",
        )


def _classes(run: YamlRun) -> List[str]:
    """Returns the classes of classifiers that are legacy models, or those that are mcore models."""
    records = {kind: registry.by_model_type(kind) for kind in TASKS}
    return [kind for kind, record in records.items() if record is not None and record.legacy != run.is_mcore]
