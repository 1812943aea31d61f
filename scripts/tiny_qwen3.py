"""Trains LoRA on a tiny Qwen3 on a CPU with each Trainer of the installed MindFormers, and shows the losses."""

import argparse
import os
import pathlib
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.chdir(ROOT)

from tests.support import mcore_networks, pynative_runs, tiny_runs  # noqa: E402

PYNATIVE = "tests.support.pynative_mindlora_run"
ROWS, EPOCHS = 64, 4


def main() -> None:
    """Runs all Trainers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=os.path.join("output", "tiny_qwen3"), help="where to write")
    folder = pathlib.Path(parser.parse_args().output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    in_graph_mode(folder)
    if pynative_runs.has_pynative_trainer():
        in_pynative(folder)


def in_graph_mode(folder: pathlib.Path) -> None:
    """Trains according to docs/mcore.md."""
    data = folder / "rows.mindrecord"
    tiny_runs.write_data(data, ROWS)
    callbacks = [{"type": "LoraCheckpoint"}]
    config = mcore_networks.tiny_config(data, EPOCHS, callbacks, {"target_modules": "all-linear", "lora_rank": 4})
    output = folder / "graph"
    run = tiny_runs.launch(config, output)
    losses = tiny_runs.losses(output) if run.returncode == 0 else {}
    show("graph mode", run, list(losses.values()), folder / "graph.yaml", output / "lora_checkpoint")


def in_pynative(folder: pathlib.Path) -> None:
    """Trains according to docs/pynative.md."""
    data = folder / "shifted.mindrecord"
    pynative_runs.write_data(data, ROWS)
    pynative_runs.write_base(folder / "base", folder / "hf")
    output = folder / "pynative"
    config = pynative_runs.tiny_config(
        "qwen3",
        data,
        EPOCHS * ROWS // 4,
        checkpoint={"load_path": str(folder / "base"), "no_load_optim": True, "save_path": str(output / "checkpoint")},
        callbacks=[{"type": "LoraCheckpoint", "directory": str(output / "lora_checkpoint")}],
    )
    run = pynative_runs.launch(config, output, "--mode", "1", module=PYNATIVE)
    losses = pynative_runs.losses(output) if run.returncode == 0 else []
    show("PyNative Trainer", run, losses, folder / "pynative.yaml", output / "lora_checkpoint")


def show(trainer: str, run, losses: list, config: pathlib.Path, adapters: pathlib.Path) -> None:
    """Prints a run's losses, or exits with the run's output if it failed."""
    if run.returncode:
        sys.exit(f"{trainer}: the run failed.\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    adapter = max(adapters.glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    print(f"{trainer}: loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
    print(f"  YAML     {config}\n  adapter  {adapter}", flush=True)


if __name__ == "__main__":
    main()
