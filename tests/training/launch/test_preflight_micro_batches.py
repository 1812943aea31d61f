"""Gradient accumulation of a YAML becomes micro-batches of the train step."""


def test_a_step_has_the_rows_of_all_micro_batches_and_routers_count_their_tokens(mindformers):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch.preflight import set_micro_batches

    config = MindFormerConfig(
        runner_config={"batch_size": 2, "gradient_accumulation_steps": 3},
        runner_wrapper={"type": "LoraTrainOneStepCell"},
        callbacks=[{"type": "MFLossMonitor"}, {"type": "TopkBiasBalanceCallback"}],
        use_parallel=False,
    )
    set_micro_batches(config)
    assert (config.runner_config.batch_size, config.runner_config.gradient_accumulation_steps) == (6, 1)
    assert config.runner_wrapper.micro_batches == 3
    assert config.callbacks == [
        {"type": "MFLossMonitor"},
        {"type": "TopkBiasBalanceCallback", "gradient_accumulation_steps": 3},
    ]
