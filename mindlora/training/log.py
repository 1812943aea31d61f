"""Sends mindlora's messages to MindFormers' log, where users of a launcher look for them."""

import logging

from mindformers.tools.logger import logger as mindformers_logger

logger = logging.getLogger("mindlora")


class _ToMindFormers(logging.Handler):
    """A handler that passes records on to MindFormers, which picks handlers per message, so they cannot be shared."""

    def emit(self, record: logging.LogRecord) -> None:
        getattr(mindformers_logger, record.levelname.lower())(self.format(record))


logger.handlers = [_ToMindFormers()]
logger.setLevel(logging.INFO)
logger.propagate = False
