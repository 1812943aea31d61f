"""Classifiers: what model.arch.type and num_labels of a YAML need from the rest of it."""

from typing import Any, Iterator, Mapping

from mindlora.checks.finding import Finding, error
from mindlora.checks.mcore import is_mcore
from mindlora.common.fields import COUNT
from mindlora.common.yaml_file import PET, value_at
from mindlora.models.llama_classifiers import TASKS, task_of

CLASS, LABELS = "model.arch.type", "model.model_config.num_labels"
# What computes logits of tokens, or samples of them.
_OF_TOKENS = ("SampleAnswers", "Forgetting", "ForgettingBudget")


def check_classifier(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting that does not go with a classifier, or with num_labels without one."""
    labels = value_at(config, LABELS)
    if task_of(value_at(config, CLASS)) is None:
        if labels is not None:
            yield error(
                LABELS,
                f"num_labels is {labels}, and model.arch.type is {value_at(config, CLASS)}, which has no labels.",
                f"Set model.arch.type: {' or '.join(TASKS)}, or remove num_labels.",
            )
        return
    if labels not in COUNT:
        yield error(
            LABELS,
            f"num_labels is {labels!r}: a classifier needs the number of its labels.",
            "Set it as mindlora data labels says.",
        )
    if is_mcore(config):
        yield error(CLASS, "use_legacy is False: classifiers are legacy models.", "Remove use_legacy.")
    if config.get("run_mode") == "predict":
        yield error("run_mode", "run_mode is predict: a classifier writes no text.", "Evaluate it with HeldOutLoss.")
    if value_at(config, f"{PET}.adapters") is not None:
        yield error(
            f"{PET}.adapters",
            "pet_config.adapters trains several adapters in one run, and a classifier has one head.",
            "Train one adapter in a run.",
        )
    if value_at(config, "runner_wrapper.preference") is not None:
        yield error(
            "runner_wrapper.preference",
            "runner_wrapper.preference compares answers, and the model is a classifier.",
            "Remove one of them.",
        )
    for callback in config.get("callbacks") or []:
        if callback.get("type") in _OF_TOKENS:
            yield error(
                f"callbacks.{callback['type']}",
                f"{callback['type']} is about texts that the model writes, and the model is a classifier.",
                "Remove it.",
            )
