"""Model-ready tensors of a .safetensors file become batches: the way in for any modality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.batches import Batch, count_examples, forward_names, take_examples
from featcal_cli.errors import DataError
from featcal_cli.labels import LABEL_NAMES
from featcal_cli.recipe import Data
from featcal_cli.rows import check_split_of_file, local_path


@dataclass(frozen=True)
class TensorReader:
    """Model-ready tensors; a row and its item are the row's position."""

    chosen: str
    tensors: Batch
    labels: Tensor | None
    """[rows], where the file has some."""

    @property
    def positions(self) -> range:
        """All rows, in file order."""
        return range(count_examples(self.tensors))

    def read(self, row: int) -> int:
        """The position itself."""
        return row

    def batch(self, items: Sequence[int]) -> Batch:
        """Those rows of every tensor; floating point as float32."""
        found = take_examples(self.tensors, items)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}

    def longest(self, items: Sequence[int]) -> Sequence[int]:
        """The first: all rows of a tensor are alike."""
        return items[:1]


def is_tensor_file(data: Data) -> bool:
    """True for a .safetensors file, which needs no preprocessing."""
    return data.path is not None and data.path.endswith(".safetensors")


def open_tensors(data: Data, split: str | None, model: PreTrainedModel, where: str) -> TensorReader:
    """The reader of a .safetensors file. Raises DataError for tensors that the model cannot take."""
    check_split_of_file(data, split)
    try:
        with safe_open(local_path(data), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"the file cannot be read: {error}", where=where, fix="check that the file is whole") from error
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors.values()]
    texts = {len(x) for name, x in tensors.items() if x.dim() == 2 and name.endswith(("ids", "mask"))}
    if not lengths or min(lengths) == 0 or any(length % min(lengths) for length in lengths) or len(texts) > 1:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "none"
        raise DataError(
            f"the tensors do not agree on a number of examples: {sizes}",
            where=where,
            fix="make dimension 0 of every tensor the examples (or equally many rows of each), at least one",
        )
    label = data.columns.get("label") or next((name for name in LABEL_NAMES if _is_label(tensors.get(name))), None)
    labels = tensors.pop(label, None) if label else None
    names = forward_names(model)
    if not tensors or not names.issuperset(tensors):
        unknown = ", ".join(sorted(set(tensors) - names)) or "nothing but labels"
        raise DataError(
            f"the model's forward does not take {unknown}",
            where=where,
            fix=f"name the tensors after forward arguments: {', '.join(sorted(names))}",
        )
    chosen = f"tensors {', '.join(tensors)}, as they are" + (f" (without {label})" if labels is not None else "")
    return TensorReader(chosen, tensors, labels)


def _is_label(tensor: Tensor | None) -> bool:
    # One integer a row is a class, which the loss of a head of another size would choke on; [rows, tokens] is a target.
    return tensor is not None and tensor.dim() == 1 and not tensor.is_floating_point()
