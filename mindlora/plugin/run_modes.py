"""The values of run_mode in a MindFormers YAML. Imports no MindFormers."""

TRAINING_MODES = ("train", "finetune")
RUN_MODES = (*TRAINING_MODES, "eval", "predict")
