"""Classifiers, which mindlora adds to MindFormers: a Llama or a Qwen3 with a new head, score, in place of its own."""

import dataclasses
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.models.architectures.architecture import Architecture, Names, ParameterSize
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.qwen3 import QWEN3

SCORE = Names("score", "score", "score")


class Task(NamedTuple):
    """A kind of classifier.

    Attributes:
        peft (str): PEFT's task_type.
        has_bias (bool): Whether its head has a bias, as transformers' has.
        language_model (str): The class of the language model on which it is built.
    """

    peft: str
    has_bias: bool
    language_model: str


# Class of the model, as transformers names it too, and a YAML in model.arch.type or, of an mcore model, in
# model.model_config.architectures -> its task.
TASKS: Dict[str, Task] = {
    "LlamaForSequenceClassification": Task("SEQ_CLS", False, "LlamaForCausalLM"),
    "LlamaForTokenClassification": Task("TOKEN_CLS", True, "LlamaForCausalLM"),
    "Qwen3ForSequenceClassification": Task("SEQ_CLS", False, "Qwen3ForCausalLM"),
    "Qwen3ForTokenClassification": Task("TOKEN_CLS", True, "Qwen3ForCausalLM"),
}


def is_of_head(parameter: str) -> bool:
    """Returns whether the name of a PyNative model's parameter belongs to a classifier's head."""
    return parameter.rpartition(".")[0] == SCORE.mcore


def task_of(model_class: Optional[str]) -> Optional[Task]:
    """Returns the task of a class of models, or None if it is not a classifier."""
    return TASKS.get(str(model_class))


def with_score(modules: Optional[Sequence[str]]) -> List[str]:
    """Returns modules_to_save of a classifier: its head is always among them."""
    return [*dict.fromkeys([*(modules or ()), SCORE.mindformers])]


def _classifier(base: Architecture, model_class: str, title: str, **changes: Any) -> Architecture:
    """Returns the record of a classifier built on a language model."""
    head = base.output_head.mcore if not base.legacy else base.output_head.mindformers

    def linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
        return {path: size for path, size in base.linear_sizes(model_config).items() if path != head}

    def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
        found = base.parameter_sizes(model_config)
        found.pop(f"{head}.weight", None)
        labels: Any = model_config.get("num_labels")
        found["score.weight"] = ParameterSize((labels, model_config.get("hidden_size") or 4096), "float32")
        if TASKS[model_class].has_bias:
            found["score.bias"] = ParameterSize((labels,), "float32")
        return found

    return dataclasses.replace(
        base,
        title=title,
        output_head=SCORE,
        linear_sizes=linear_sizes,
        parameter_sizes=parameter_sizes,
        hugging_face_types=(),
        from_hugging_face=None,
        **changes,
    )


def _of_llama(model_class: str, title: str) -> Architecture:
    return _classifier(LLAMA, model_class, title, model_types=(model_class, "LlamaConfig"))


def _of_qwen3(model_class: str, title: str) -> Architecture:
    return _classifier(QWEN3, model_class, title, model_types=(model_class,), hub_names="", served=False)


SEQUENCES = _of_llama("LlamaForSequenceClassification", "Llama's and Qwen2's sequence classifiers")
TOKENS = _of_llama("LlamaForTokenClassification", "Llama's and Qwen2's token classifiers")
QWEN3_SEQUENCES = _of_qwen3("Qwen3ForSequenceClassification", "Qwen3's sequence classifiers")
QWEN3_TOKENS = _of_qwen3("Qwen3ForTokenClassification", "Qwen3's token classifiers")
