"""What MindSpore's memory planner takes for runs of real width, without fragments and with them, in GiB.

They were measured with MindSpore 2.9.0 and MindFormers 1.9.0 on MindSpore's own Ascend backend, on a stand-in for CANN;
tests/ascend_backend/test_planner_figures.py measures them again.
"""

import os
from typing import Any, Dict, NamedTuple, Optional

from mindlora.core.yaml_file import merged, read_yaml
from tests.conftest import ROOT

# With LoRA on q, k, v and o of attention.
_YAMLS = {
    "Llama 3 8B": ("configs/llama3/lora_llama3_8b.yaml", "num_layers", {}),
    "Qwen3 8B": (
        "configs/qwen3/lora_qwen3_8b.yaml",
        "num_hidden_layers",
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
}
_PREFERENCE = {"type": "LoraTrainOneStepCell", "preference": {"loss": "dpo"}}


class Figures(NamedTuple):
    """A run and the peaks of its planner.

    Attributes:
        model (str): A name of _YAMLS.
        layers, rows (int): How many layers the model has, and rows a batch.
        level (str): jit_level.
        recomputes (bool): Whether the layers are recomputed.
        pet (dict): Other values of pet_config.
        preference (bool): Whether the run is DPO.
        sharded (bool): Whether it is rank 0 of the 8 devices of the YAML, in the semi-automatic mode, and not alone.
        pieces (bool): Whether head and loss go through the tokens in pieces.
        model_parallel (int): Devices that share each layer, and the head.
        whole_head (bool): Whether each of them has the whole head (vocab_emb_dp).
        used (float): The peak without fragments.
        actual (float): The peak with fragments, or None if it was not read.
    """

    model: str
    layers: int
    rows: int
    level: str
    recomputes: bool
    used: float
    actual: Optional[float] = None
    pet: Dict[str, Any] = {}
    preference: bool = False
    sharded: bool = False
    pieces: bool = False
    model_parallel: int = 1
    whole_head: bool = True

    def __str__(self) -> str:
        kind = ", ".join([*self.pet, *(["dpo"] if self.preference else [])]) or "lora"
        recomputation = "recomputed" if self.recomputes else "kept"
        where = ", one of 8" if self.sharded else ""
        where += f", {self.model_parallel} share a layer" if self.model_parallel > 1 else ""
        where += ", a whole head" if self.model_parallel > 1 and self.whole_head else ""
        where += ", in pieces" if self.pieces else ""
        return f"{self.model} {kind} {self.layers}x{self.rows} {self.level} {recomputation}{where}"

    @property
    def config(self) -> Dict[str, Any]:
        """The YAML's content."""
        path, layers, targets = _YAMLS[self.model]
        config = merged(
            read_yaml(os.path.join(ROOT, path)),
            {
                "use_parallel": self.sharded,
                "parallel": {"parallel_mode": 1, "full_batch": True},
                "parallel_config": {
                    "data_parallel": 8 // self.model_parallel,
                    "model_parallel": self.model_parallel,
                    "vocab_emb_dp": self.whole_head,
                },
                "runner_config": {"batch_size": self.rows},
                "recompute_config": {"recompute": self.recomputes},
                "runner_wrapper": {"loss_in_pieces": self.pieces},
                "context": {"jit_config": {"jit_level": self.level}},
                "model": {"model_config": {layers: self.layers, "pet_config": {**targets, **self.pet}}},
            },
        )
        if self.preference:
            config["runner_wrapper"] = merged(config["runner_wrapper"], _PREFERENCE)
            config["train_dataset"]["input_columns"] = ["input_ids", "labels", "answers", "pairs"]
        return config


FIGURES = (
    Figures("Llama 3 8B", 1, 4, "O1", True, 14.28, 16.78),
    Figures("Llama 3 8B", 1, 4, "O1", True, 14.28, 18.16, sharded=True),
    Figures("Qwen3 8B", 1, 2, "O0", True, 12.07, 17.66),
    Figures("Llama 3 8B", 1, 4, "O0", True, 18.19, 20.69),
    Figures("Llama 3 8B", 4, 1, "O1", False, 7.77, 8.91),
    Figures("Llama 3 8B", 1, 1, "O0", True, 10.29, 10.98, preference=True),
    Figures("Qwen3 8B", 4, 1, "O0", False, 9.70, 12.03),
    Figures("Qwen3 8B", 1, 4, "O1", True, 16.81, 27.40),
    Figures("Llama 3 8B", 1, 1, "O0", True, 6.11, pet={"quantize_base": "nf4"}),
    Figures("Llama 3 8B", 4, 1, "O1", False, 6.62, 8.45, pet={"quantize_base": "nf4"}),
    Figures("Llama 3 8B", 1, 4, "O1", True, 14.05, 16.78, pet={"quantize_base": "nf4"}),
    Figures("Llama 3 8B", 4, 1, "O1", False, 7.93, 8.98, pet={"use_dora": True}),
    Figures("Llama 3 8B", 1, 1, "O1", True, 8.36, 8.96, preference=True),
    Figures("Llama 3 8B", 4, 4, "O1", True, 15.75, 18.85),
    Figures("Llama 3 8B", 1, 4, "O1", True, 3.89, pieces=True),
    Figures("Llama 3 8B", 1, 4, "O0", True, 3.89, 4.09, pieces=True),
    Figures("Qwen3 8B", 1, 4, "O1", True, 4.29, pieces=True),
    Figures("Llama 3 8B", 4, 4, "O1", True, 5.49, pieces=True),
    Figures("Llama 3 8B", 4, 1, "O1", False, 5.04, 5.12, pieces=True),
    Figures("Llama 3 8B", 1, 1, "O0", True, 3.13, 3.22, pieces=True, preference=True),
    Figures("Qwen3 8B", 4, 1, "O0", False, 5.29, 5.40, pieces=True),
    Figures("Llama 3 8B", 1, 1, "O0", True, 2.90, pieces=True, pet={"quantize_base": "nf4"}),
    Figures("Llama 3 8B", 4, 1, "O1", False, 4.22, pieces=True, pet={"quantize_base": "nf4"}),
    Figures("Llama 3 8B", 1, 4, "O1", True, 1.35, sharded=True, pieces=True, model_parallel=8, whole_head=False),
    Figures("Llama 3 8B", 1, 4, "O1", True, 2.26, 2.36, sharded=True, pieces=True, model_parallel=2, whole_head=False),
    Figures("Qwen3 8B", 1, 4, "O1", True, 1.45, sharded=True, pieces=True, model_parallel=8),
)
