"""Classifiers' rules: what a YAML's model class and num_labels require of the rest of the YAML."""

from typing import Any, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from mindlora.core.fields import COUNT
from mindlora.core.yaml_file import PET
from mindlora.models.architectures import registry
from mindlora.models.architectures.classifiers import TASKS, task_of
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun, first_class

LABELS = "model.model_config.num_labels"
_REWARD = "reward"
# The classes that mindlora gives MindFormers' PyNative Trainer.
_IN_PYNATIVE = ("Qwen3ForSequenceClassification", "Qwen3ForTokenClassification")
# Callbacks that compute token logits or sample tokens.
_OF_TOKENS = ("SampleAnswers", "Forgetting", "ForgettingBudget")


class _Asked(NamedTuple):
    """A YAML's settings of the model's head, and those that do not go with a classifier.

    Attributes:
        model_class (str or None): The class of the model.
        labels: num_labels.
        preference: The node of that name.
        adapters: pet_config.adapters.
        callbacks (sequence of str): Types of the callbacks.
        class_key, labels_key, preference_key, pet_key (str): The keys of these settings.
        classes (sequence of str): The classes of classifiers that there are for a YAML of this kind.
    """

    model_class: Optional[str]
    labels: Any
    preference: Any
    adapters: Any
    callbacks: Sequence[str]
    class_key: str
    labels_key: str
    preference_key: str
    pet_key: str
    classes: Sequence[str]

    @property
    def of_model(self) -> List[str]:
        """The classes of classifiers that are made of the YAML's language model, or all, if there are none of it."""
        task = task_of(self.model_class)
        language_model = task.language_model if task else self.model_class
        return [kind for kind in self.classes if TASKS[kind].language_model == language_model] or list(self.classes)


def check_classifier(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting that does not go with a classifier, or that requires one."""
    records = {kind: registry.by_model_type(kind) for kind in TASKS}
    classes = [kind for kind, record in records.items() if record is not None and record.legacy != run.is_mcore]
    yield from _check(
        _Asked(
            run.head_class,
            run.at(LABELS),
            run.preference,
            run.pet_config.get("adapters"),
            [str(callback.get("type")) for _, callback in run.callbacks],
            run.class_key,
            LABELS,
            "runner_wrapper.preference",
            PET,
            classes,
        )
    )
    if run.is_classifier and run.mode == "predict":
        yield error("run_mode", "run_mode is predict: a classifier writes no text.", "Evaluate it with HeldOutLoss.")
    if run.is_classifier and run.predicted_layers:
        yield error(
            run.class_key,
            f"{run.class_key} is {run.head_class}, a classifier, and the model has {run.predicted_layers} layers that "
            "predict further tokens.",
            "Set model.model_config.num_nextn_predict_layers: 0.",
        )


def check_pynative_classifier(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the errors of check_classifier for a YAML of the PyNative trainer."""
    model = config.get("model") or {}
    model_class = first_class(model)
    callbacks = [node for node in config.get("callbacks") or [] if isinstance(node, Mapping)]
    yield from _check(
        _Asked(
            model_class,
            model.get("num_labels"),
            config.get("preference"),
            (config.get("pet_config") or {}).get("adapters"),
            [str(callback.get("type")) for callback in callbacks],
            "model.architectures",
            "model.num_labels",
            "preference",
            "pet_config",
            _IN_PYNATIVE,
        )
    )
    if task_of(model_class) is not None and model_class not in _IN_PYNATIVE:
        yield error(
            "model.architectures",
            f"model.architectures is {model_class}, and under MindFormers' PyNative Trainer classifiers are "
            f"{' and '.join(_IN_PYNATIVE)} alone.",
            "Train it in graph mode (docs/classifiers.md).",
        )
    if task_of(model_class) is not None and (config.get("checkpoint") or {}).get("save_trainable_only"):
        yield error(
            "checkpoint.save_trainable_only",
            f"model.architectures is {model_class}, a classifier, and save_trainable_only leaves out its head.",
            "Remove it. LoraCheckpoint saves the adapter alone and whole.",
        )


def _check(asked: _Asked) -> Iterator[Finding]:
    yield from _check_preference(asked)
    if task_of(asked.model_class) is None:
        if asked.labels is not None:
            yield error(
                asked.labels_key,
                f"num_labels is {asked.labels}, and {asked.class_key} is {asked.model_class}, which has no labels.",
                f"Set {asked.class_key}: {' or '.join(asked.of_model)}, or remove num_labels.",
            )
        return
    if asked.labels not in COUNT:
        yield error(
            asked.labels_key,
            f"num_labels is {asked.labels!r}: a classifier needs the number of its labels.",
            "Set it as mindlora data labels says.",
        )
    if asked.adapters is not None:
        yield error(
            f"{asked.pet_key}.adapters",
            "pet_config.adapters trains several adapters in one run, but a classifier has one head.",
            "Train one adapter in a run.",
        )
    for name in asked.callbacks:
        if name in _OF_TOKENS:
            yield error(
                f"callbacks.{name}",
                f"{name} needs a model that writes texts, but the model is a classifier.",
                "Remove it.",
            )


def _check_preference(asked: _Asked) -> Iterator[Finding]:
    """Yields an error if a preference loss does not go with the model: a reward needs a classifier with one label."""
    key, node = asked.preference_key, asked.preference
    loss: Optional[str] = node.get("loss", "dpo") if isinstance(node, Mapping) else None
    rewarded = next(kind for kind in asked.of_model if not TASKS[kind].has_bias)
    if loss == _REWARD and (asked.model_class, asked.labels) != (rewarded, 1):
        yield error(
            key,
            f"{key}: the loss {_REWARD} needs one score of a text, but the model is {asked.model_class} with "
            f"num_labels {asked.labels}.",
            f"Set {asked.class_key}: {rewarded} and {asked.labels_key.removeprefix('model.')}: 1.",
        )
    elif loss not in (None, _REWARD) and task_of(asked.model_class) is not None:
        yield error(
            key,
            f"{key}: the loss {loss} compares answers that a model writes, but the model is a classifier.",
            f"Set loss: {_REWARD}, which trains a reward model, or remove one of them.",
        )
