"""Constraints on sampled answers: the key structured_outputs, of a run or of a prompt's row."""

import json
import logging
import os
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

from mindlora.core.errors import ConfigError, DataError
from mindlora.core.text import suggestion
from mindlora.training.rl.structured_outputs import ADVICE, COLUMN, KINDS, problem_of

if TYPE_CHECKING:
    from mindlora.serving.thoughts import Thoughts
    from mindlora.training.rl.tools import Tools

logger = logging.getLogger("mindlora")


class AnswerConstraints:
    """A compiler of the constraints on answers; it compiles each constraint once.

    Args:
        node (mapping): rl.structured_outputs. None: answers are unconstrained, except that their calls must be of
            ``tools``.
        tokenizer: As load_tokenizer returns it.
        folder (str): The folder from which paths of schemas start.
        tools (Tools): Tools that the turns of answers may call instead of answering. Default: None.
    """

    def __init__(self, node: Optional[Mapping[str, Any]], tokenizer: Any, folder: str, tools: Optional["Tools"] = None):
        # Not above: only runs that need the library load it.
        from mindlora.serving.constraints import ConstraintCompiler

        self._node = node
        self._folder = folder
        self._tools = tools
        self._compiler = ConstraintCompiler(tokenizer, "rl")
        self._compiled: Dict[str, Any] = {}

    def grammar(self, columns: Mapping[str, Any], where: str, thoughts: Optional["Thoughts"] = None) -> Optional[Any]:
        """Returns the Grammar of the answers to a prompt; None if they are unconstrained.

        Args:
            columns (mapping): The other fields of the prompt's row; in the constraint's field, null means none, and a
                text is JSON.
            where (str): The row's location, for messages.
            thoughts (Thoughts): The thoughts that may precede an answer. Default: None.

        Raises:
            DataError: The row lacks the column, or its value there is not a node with one of vLLM's keys.
            ConfigError: A file cannot be read as JSON.
            ConstraintError: No answer can meet the constraint, or it cannot be used.
        """
        column = None if self._node is None else self._node.get(COLUMN)
        if column is None:
            return self._of(self._node or {}, "rl.structured_outputs", thoughts)
        if column not in columns:
            raise DataError(
                f"{where}: there is no field {column!r}, which rl.structured_outputs names."
                f"{suggestion(column, list(columns))} Add it, with null where an answer may be anything."
            )
        node, field = columns[column], f"{where}: {column}"
        if isinstance(node, str):
            try:
                node = json.loads(node)
            except ValueError as problem:
                raise DataError(f"{field} is not JSON: {problem}. {ADVICE}, as JSON.") from problem
        problem = "" if node is None else problem_of(node, KINDS)
        if problem:
            raise DataError(f"{field} {problem}. {ADVICE}.")
        return self._of(node or {}, field, thoughts)

    def _of(self, node: Mapping[str, Any], field: str, thoughts: Optional["Thoughts"]) -> Optional[Any]:
        """Returns the compiled constraint of a node with one key or none."""
        from mindlora.serving.constraints import asked_outputs

        key = json.dumps([node, thoughts and thoughts.begun], sort_keys=True)
        if key not in self._compiled:
            schema = node.get("json")
            if isinstance(schema, str) and not schema.lstrip().startswith("{"):
                node = {"json": self._read(schema, field)}
            constraint = next(asked_outputs(node, field), None)
            if self._tools is not None:
                constraint = self._tools.constraint(constraint)
            if constraint is not None and thoughts is not None:
                constraint = thoughts.before(constraint)
            grammar = None if constraint is None else self._compiler.compile(constraint)
            for reason in [] if grammar is None else grammar.loosened:
                logger.warning("An answer need not keep all of %s. Change that argument's schema if it must.", reason)
            self._compiled[key] = grammar
        return self._compiled[key]

    def _read(self, name: str, field: str) -> Any:
        path = os.path.join(self._folder, name)
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"{field}: json is {name}, and {path} cannot be read as JSON: {problem}. Correct the path, or the file."
            ) from problem
