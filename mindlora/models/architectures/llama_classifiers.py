"""Classifiers on a Llama, which mindlora adds to MindFormers: the Llama with a new head, score, in place of lm_head."""

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.models.architectures import llama
from mindlora.models.architectures.architecture import Architecture, Names, ParameterSize

SCORE = Names("score", "score", "")
# The class of the language model that they are made of.
CAUSAL_LM = "LlamaForCausalLM"


class Task(NamedTuple):
    """What a classifier is for.

    Attributes:
        peft (str): PEFT's task_type.
        has_bias (bool): Whether its head has a bias, as transformers' has.
    """

    peft: str
    has_bias: bool


# Class of the model, as a YAML's model.arch.type names it and transformers too -> its task.
TASKS: Dict[str, Task] = {
    "LlamaForSequenceClassification": Task("SEQ_CLS", False),
    "LlamaForTokenClassification": Task("TOKEN_CLS", True),
}


def task_of(model_class: Optional[str]) -> Optional[Task]:
    """Returns the task of a class of models, or None if it is not a classifier."""
    return TASKS.get(str(model_class))


def with_score(modules: Optional[Sequence[str]]) -> List[str]:
    """Returns modules_to_save of a classifier: its head is always among them."""
    return [*dict.fromkeys([*(modules or ()), SCORE.mindformers])]


def _linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
    sizes = llama.linear_sizes(model_config)
    sizes.pop("lm_head")
    return sizes


def _parameter_sizes(has_bias: bool) -> Callable[[dict], Dict[str, ParameterSize]]:
    def sizes(model_config: dict) -> Dict[str, ParameterSize]:
        found = llama.parameter_sizes(model_config)
        found.pop("lm_head.weight", None)
        labels: Any = model_config.get("num_labels")
        found["score.weight"] = ParameterSize((labels, model_config.get("hidden_size") or 4096), "float32")
        if has_bias:
            found["score.bias"] = ParameterSize((labels,), "float32")
        return found

    return sizes


def _classifier(model_class: str, title: str) -> Architecture:
    return dataclasses.replace(
        llama.LLAMA,
        title=title,
        model_types=(model_class, "LlamaConfig"),
        output_head=SCORE,
        linear_sizes=_linear_sizes,
        parameter_sizes=_parameter_sizes(TASKS[model_class].has_bias),
        hugging_face_types=(),
        from_hugging_face=None,
    )


SEQUENCES = _classifier("LlamaForSequenceClassification", "Llama's and Qwen2's sequence classifiers")
TOKENS = _classifier("LlamaForTokenClassification", "Llama's and Qwen2's token classifiers")
