"""Classifiers, which mindlora adds to MindFormers: a language model with a new head, score, in place of its own."""

import dataclasses
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.models.architectures.architecture import LEGACY, MCORE, Architecture, Names, ParameterSize
from mindlora.models.architectures.deepseek_v3 import DEEPSEEK_V3
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.qwen import QWEN3, QWEN3_MOE

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


# What a class of transformers begins with -> the record of the language model that it is made of.
_LANGUAGE_MODELS = {"Llama": LLAMA, "Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE, "DeepseekV3": DEEPSEEK_V3}
# Class of the model, as transformers names it too, and a YAML in model.arch.type or, of an mcore model, in
# model.model_config.architectures -> its task.
TASKS: Dict[str, Task] = {}
for _name in _LANGUAGE_MODELS:
    TASKS[f"{_name}ForSequenceClassification"] = Task("SEQ_CLS", False, f"{_name}ForCausalLM")
    TASKS[f"{_name}ForTokenClassification"] = Task("TOKEN_CLS", True, f"{_name}ForCausalLM")


def is_of_head(parameter: str) -> bool:
    """Returns whether the name of a PyNative model's parameter belongs to a classifier's head."""
    return parameter.rpartition(".")[0] == SCORE.mcore


def task_of(model_class: Optional[str]) -> Optional[Task]:
    """Returns the task of a class of models, or None if it is not a classifier."""
    return TASKS.get(str(model_class))


def with_score(modules: Optional[Sequence[str]]) -> List[str]:
    """Returns modules_to_save of a classifier: its head is always among them."""
    return [*dict.fromkeys([*(modules or ()), SCORE.mindformers])]


def _classifier(model_class: str, task: Task) -> Architecture:
    """Returns the record of a classifier built on a language model."""
    base = _LANGUAGE_MODELS[task.language_model.removesuffix("ForCausalLM")]
    world = LEGACY if base.legacy else MCORE
    head, table = base.output_head.under(world), base.embedding_table(world)

    def linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
        return {path: size for path, size in base.linear_sizes(model_config).items() if path != head}

    def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
        found = base.parameter_sizes(model_config)
        found.pop(f"{head}.weight", None)
        labels: Any = model_config.get("num_labels")
        found["score.weight"] = ParameterSize((labels, found[table].shape[1]), "float32")
        if task.has_bias:
            found["score.bias"] = ParameterSize((labels,), "float32")
        return found

    models = "Llama's and Qwen2's" if base.legacy else f"{base.title}'s"
    return dataclasses.replace(
        base,
        title=f"{models} {'token' if task.has_bias else 'sequence'} classifiers",
        model_types=(model_class, "LlamaConfig") if base.legacy else (model_class,),
        output_head=SCORE,
        linear_sizes=linear_sizes,
        parameter_sizes=parameter_sizes,
        hugging_face_types=(),
        from_hugging_face=None,
        hub_names="",
        served=False,
    )


CLASSIFIERS = tuple(_classifier(model_class, task) for model_class, task in TASKS.items())
