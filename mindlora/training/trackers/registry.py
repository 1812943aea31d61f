"""The trackers by the names that report_to has."""

from typing import Dict, Type

from mindlora.training.trackers.mlflow import MLflow
from mindlora.training.trackers.swanlab import SwanLab
from mindlora.training.trackers.tensorboard import TensorBoard
from mindlora.training.trackers.tracker import Tracker
from mindlora.training.trackers.wandb import WandB

TRACKERS: Dict[str, Type[Tracker]] = {"tensorboard": TensorBoard, "swanlab": SwanLab, "wandb": WandB, "mlflow": MLflow}
