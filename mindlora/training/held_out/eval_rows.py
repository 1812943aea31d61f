"""MindFormers' evaluation of rows that ``mindlora data`` writes, which have one token more than it takes."""

from typing import Any, List, Optional

import mindspore as ms
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister

from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data.mindrecord import first_rows
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger

CUT_ROWS = "RowsForEvaluation"


def cut_rows_for_eval(config: MindFormerConfig) -> None:
    """Cuts the last token of rows of seq_length + 1 tokens, which MindFormers' evaluation does not take.

    The ``type`` of eval_dataset's data_loader in the YAML is changed where needed.
    """
    length = config.model.model_config.get("seq_length")
    data = YamlRun(config).eval_data
    if not data or (config.run_mode != "eval" and not config.do_eval):
        return
    files = mindrecord_files(data)
    row = next(first_rows(files[0], 1), None) if files else None
    if row is not None and "input_ids" in row and len(row["input_ids"]) == (length or 0) + 1:
        config.eval_dataset.data_loader.type = CUT_ROWS
        config.eval_dataset.data_loader.length = length
        logger.info(
            "The rows of eval_dataset have %d tokens, as training takes them: the last one of each is not judged here. "
            "HeldOutLoss judges it.",
            length + 1,
        )


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER, alias=CUT_ROWS)
def rows_for_evaluation(
    column_names: List[str],
    length: int,
    dataset_dir: Optional[str] = None,
    dataset_files: Optional[List[str]] = None,
    num_shards: Optional[int] = None,
    shard_id: Optional[int] = None,
    shuffle: Optional[bool] = None,
    num_samples: Optional[int] = None,
    **_: Any,
) -> ms.dataset.MindDataset:
    """Returns a MindDataset with the first ``length`` elements of each row of MindRecord files or a folder of them."""
    rows = ms.dataset.MindDataset(
        mindrecord_files(dataset_dir or dataset_files or []),
        columns_list=column_names,
        num_shards=num_shards,
        shard_id=shard_id,
        shuffle=shuffle,
        num_samples=num_samples,
    )
    for column in column_names:
        rows = rows.map(lambda values: values[:length], input_columns=[column])
    return rows
