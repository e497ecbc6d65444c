"""The model that examples are made for, and the base class of all readers of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.data.batches import (
    BadRowError,
    Batch,
    Example,
    count_target_vocabulary,
    count_vocabulary,
    forward_names,
)
from featcal_cli.data.loading import Folders
from featcal_cli.data.vocabulary import TextModels
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text


@dataclass(frozen=True)
class Target:
    """The model that examples are made for, and the folders to search for its preprocessors."""

    model: PreTrainedModel
    folders: Folders
    where: str
    """The task and its source, as error messages name them."""
    text_models: TextModels | None = None
    """The models that read the task's texts together; None if every model has the vocabulary of the tokenizer."""

    @cached_property
    def names(self) -> set[str]:
        """The names of the model's forward arguments."""
        return forward_names(self.model)

    def check_ids(self, ids: Sequence[int], *, is_target: bool = False) -> None:
        """Raise DataError for token ids beyond the model's embeddings. is_target: the decoder reads them."""
        count = count_target_vocabulary(self.model) if is_target else count_vocabulary(self.model)
        if count is not None and (largest := max(ids, default=0)) >= count:
            what = f"the tokenizer has token {largest}, but the model only {count} tokens"
            raise DataError(what, where=self.where, fix="put each model's own tokenizer into its folder")

    def preprocess(self, main: str, call: Callable[[], Mapping[str, Any]]) -> Batch:
        """Call a preprocessor for one example, and return the tensors that the model takes, floating-point ones as
        float32. Raises BadRowError if the preprocessor fails, or makes no tensor `main`."""
        try:
            output = call()
        except Exception as error:  # what its files say may make a processor raise anything
            fix = "compare the expert's preprocessor_config.json with the data, or fix these rows"
            raise BadRowError(f"it cannot be processed ({exception_text(error)})", fix) from error
        made = {name: x for name, x in output.items() if name in self.names | {main} and isinstance(x, Tensor)}
        if main not in made:
            raise BadRowError(f"processing makes no tensor {main} of it")
        return {name: x.float() if x.is_floating_point() else x for name, x in made.items()}


@dataclass(frozen=True)
class Reader(ABC):
    """Turns rows into examples, each on its own, so that no example depends on its neighbours."""

    chosen: str
    """A note that says which columns and preprocessing were chosen."""
    padding: int
    """The token id that pads texts in batches."""

    @abstractmethod
    def read(self, row: Any) -> Example:
        """Turn a row into an example. Raises BadRowError."""

    def unknown_share(self, example: Example) -> float:  # noqa: ARG002 - for readers of texts
        """Return the share of an example's tokens that the tokenizer does not know."""
        return 0.0
