"""The model that batches are made for, and what its own preprocessors make of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.data.batches import CHECK_PROCESSOR, Batch, Folders, forward_names
from featcal_cli.data.hub_dataset import first_line
from featcal_cli.data.vocabulary import TextModels, TextTokens, Vocabulary, open_tokens
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import plain


@dataclass(frozen=True)
class Target:
    """A model that batches are made for, and where its preprocessors may lie."""

    model: PreTrainedModel
    folders: Folders
    where: str
    """The task and its source, as messages name them."""
    text_models: TextModels | None = None
    """The models that read the task's texts together; without them every model has the vocabulary of the tokenizer."""

    def open_tokens(self) -> TextTokens:
        """The tokens that the models' tokenizer makes of texts. Raises DataError where none can be loaded."""
        return open_tokens(self.text_models, self.folders, self.where)

    def tokens_of(self, processor: Any, source: str) -> TextTokens:
        """The tokens that the tokenizer of a processor from `source` makes of texts."""
        cutting = Vocabulary("processor", source, processor.tokenizer, processor.tokenizer.get_vocab())
        return TextTokens(cutting) if self.text_models is None else self.text_models.relate(cutting, self.where)

    def preprocess(self, kind: str, call: Callable[[], Mapping[str, Any]], count: int, main: str) -> Batch:
        """The tensors that a preprocessor, called for `count` examples, makes for the model; floating point as float32.
        `kind` says in a word what the examples are. Raises DataError where it fails, or makes no tensor `main` with an
        entry for each."""
        try:
            output = call()
        except Exception as error:  # what its files say may make a processor raise anything
            what = f"no batch can be made of these {kind}: {plain(first_line(error))}"
            raise DataError(what, where=self.where, fix=CHECK_PROCESSOR) from error
        names = forward_names(self.model) | {main}
        batch = {name: x for name, x in output.items() if name in names and isinstance(x, Tensor)}
        if main not in batch or len(batch[main]) != count:
            what = f"{count} {kind} did not become a tensor {main} with an entry for each"
            fix = "give a .safetensors file with one tensor a forward argument"
            raise DataError(what, where=self.where, fix=fix)
        return {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
