"""Values of run_mode and of parallel.parallel_mode in a MindFormers YAML."""

TRAINING_MODES = ("train", "finetune")
RUN_MODES = (*TRAINING_MODES, "eval", "predict")
# The values of parallel_mode with which MindSpore rewrites the graph: it can divide cells and parameters.
SHARDING_MODES = (1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")
