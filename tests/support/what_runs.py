"""The mark of a test that shows a feature at work on a model: docs/what-runs.md is made of these.

@shows("dora", "qwen3", trainer="pynative")
"""

import json
import os

import pytest

# Key -> how the page calls it.
FEATURES = {
    "lora": "LoRA: training, adapter files",
    "whole": "the whole model, without an adapter",
    "rslora": "rank-stabilized LoRA, a rank for each cell",
    "dora": "DoRA",
    "miss": "MiSS",
    "vera": "VeRA",
    "adalora": "AdaLoRA",
    "pissa": "PiSSA, OLoRA",
    "mica": "MiCA",
    "eva": "EVA",
    "loftq": "LoftQ",
    "lora_fa": "LoRA-FA",
    "lora_plus": "LoRA+",
    "neftune": "NEFTune",
    "alora": "aLoRA",
    "experts": "adapters on routed experts",
    "embedding": "adapters on the embedding and a tied head",
    "saved_modules": "modules_to_save",
    "nf4": "a base in 4 bits (QLoRA)",
    "nf4_variants": "DoRA, MiSS, VeRA, AdaLoRA on a base in 4 bits",
    "as_stored": "a base in the integers of its file",
    "several": "several adapters in one run",
    "packed": "packed rows",
    "hugging_face_data": "MindFormers' HFDataLoader",
    "preference": "preferences",
    "rl": "rewards (GRPO, RLOO)",
    "classifier": "classifiers and reward models",
    "held_out": "HeldOutLoss, AdapterHealth",
    "guard": "TrainingGuard and what else controls a run",
    "forgetting": "Forgetting",
    "answers": "SampleAnswers",
    "resume": "a resumed run is the same run",
    "exchange": "compressed gradients",
    "served": "serving",
}
MODELS = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "deepseek_v3": "DeepSeek-V3"}
TRAINERS = {"graph": "Graph mode", "pynative": "The PyNative Trainer"}
# Key -> how a cell of the page says it.
PLACES = {"cpu": "CPU", "processes": "2 processes", "ascend": "NPU"}


def shows(feature, *models, trainer="graph", place="cpu"):
    """Returns a mark: the test shows a feature of FEATURES on these MODELS with one of TRAINERS, at one of PLACES."""
    assert feature in FEATURES and trainer in TRAINERS and place in PLACES, (feature, trainer, place)
    assert models and set(models) <= set(MODELS), models
    return pytest.mark.shows(feature, models, trainer, place)


# Mixtures of experts. What shows a feature of a Qwen3 on them too runs on the second one before a release.
OF_EXPERTS = ("qwen3_moe", "deepseek_v3")


def showing(*features, always=OF_EXPERTS[:1]):
    """Returns OF_EXPERTS as parameters of a test that shows ``features`` on them; those not in ``always`` are long."""
    return [
        pytest.param(
            model,
            marks=[*(shows(feature, model) for feature in features), *([] if model in always else [pytest.mark.long])],
        )
        for model in OF_EXPERTS
    ]


def shown_by(item):
    """Yields (feature, model, trainer, place) for all that the marks of a test say."""
    for mark in item.iter_markers("shows"):
        feature, models, trainer, place = mark.args
        for model in models:
            yield feature, model, trainer, place


def record(items, ran):
    """Adds what tests show to the file that MINDLORA_SHOWN names, a line of JSON each, if it names one.

    Args:
        items (iterable): Tests.
        ran (bool): Whether they have passed; else they are there.
    """
    path = os.environ.get("MINDLORA_SHOWN")
    if not path:
        return
    lines = [json.dumps([*shown, item.nodeid, ran]) + "\n" for item in items for shown in shown_by(item)]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(lines))
