"""The plot of a training run's losses."""

from statistics import fmean
from typing import List, Tuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw_loss(train: List[Tuple[int, float]], held_out: List[Tuple[int, float]], path: str) -> None:
    """Plots the training loss, its mean over nine neighbouring steps, and the held-out loss.

    Args:
        train (list): (step, loss) of every step.
        held_out (list): (step, loss) where it was measured; may be empty.
        path (str): The PNG file to write.
    """
    steps, losses = zip(*train)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss, each step")
    smooth = [fmean(losses[max(0, i - 4) : i + 5]) for i in range(len(losses))]
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label="training loss, mean of 9 steps")
    if held_out:
        axes.plot(*zip(*held_out), color="tab:orange", marker="o", linewidth=2, label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.set_title("LoRA fine-tuning")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
