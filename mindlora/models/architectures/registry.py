"""The architectures that mindlora knows, one line each. If two know the same name, the first one wins."""

import re
from typing import Dict, Optional, Tuple

from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.classifiers import CLASSIFIERS
from mindlora.models.architectures.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V3_APART
from mindlora.models.architectures.glm import GLM2, GLM4
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.qwen import QWEN2, QWEN3, QWEN3_MOE

ARCHITECTURES: Tuple[Architecture, ...] = (
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    QWEN2,
    DEEPSEEK_V3,
    DEEPSEEK_V3_APART,
    GLM2,
    GLM4,
    *CLASSIFIERS,
)  # fmt: skip


def by_model_type(name: Optional[str]) -> Optional[Architecture]:
    """Returns the architecture of the model type ``name`` of a MindFormers YAML, or None."""
    return next((architecture for architecture in ARCHITECTURES if name in architecture.model_types), None)


def by_hugging_face_type(name: str) -> Optional[Architecture]:
    """Returns the architecture whose config.json has the model_type ``name``, or None."""
    return next((architecture for architecture in ARCHITECTURES if name in architecture.hugging_face_types), None)


def hugging_face_types() -> Tuple[str, ...]:
    """Returns the values of model_type that by_hugging_face_type knows."""
    return tuple(dict.fromkeys(name for architecture in ARCHITECTURES for name in architecture.hugging_face_types))


def trained_mcore_classes() -> Dict[str, str]:
    """Returns model_type of an mcore YAML or of a config.json -> MindFormers' class, of the mcore models that train."""
    trained = [architecture for architecture in ARCHITECTURES if architecture.trains and not architecture.legacy]
    return {kind: architecture.model_types[0] for architecture in trained for kind in architecture.hugging_face_types}


def by_hub_name(name: str) -> Optional[Architecture]:
    """Returns the architecture of a model named ``name``, such as Qwen/Qwen3-8B, or None."""
    return next((one for one in ARCHITECTURES if one.hub_names and re.search(one.hub_names, name.lower())), None)


def titles() -> str:
    """Returns the names of all architectures, for messages."""
    return ", ".join(architecture.title for architecture in ARCHITECTURES)
