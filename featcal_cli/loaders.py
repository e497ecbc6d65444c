"""The names in transformers and on the Hub under which others load a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

PROCESSORS = (
    ("processor_config.json", "AutoProcessor"),
    ("preprocessor_config.json", "AutoImageProcessor"),
    ("tokenizer_config.json", "AutoTokenizer"),
    ("tokenizer.json", "AutoTokenizer"),
)
"""A file that says which class makes a model's inputs, the likeliest first."""
FEATURES = {"pixel_values": "image-feature-extraction", "input_ids": "feature-extraction"}
"""The Hub's name for models without a head, by what they read."""


def find_pipeline_tag(model_class: type[PreTrainedModel]) -> str | None:
    """The Hub's name of what models of this class are for; None where it has none."""
    from transformers.pipelines import SUPPORTED_TASKS

    tasks: dict[str, Any] = SUPPORTED_TASKS
    for tag, task in tasks.items():
        for auto in task["pt"]:
            heads = getattr(auto, "_model_mapping", None)
            if auto.__name__ != "AutoModel" and heads is not None and model_class.__name__ in _names_in(heads):
                return tag
    return FEATURES.get(model_class.main_input_name)


def find_processor_class(folder: Path) -> str | None:
    """The Auto class that loads what makes the inputs of the model in `folder`; None where nothing there does."""
    return next((name for file, name in PROCESSORS if (folder / file).is_file()), None)


def _names_in(heads: Any) -> set[str]:
    """The names of the classes that an Auto class loads; the classes themselves would import all of transformers."""
    named = heads._model_mapping.values()
    return {name for names in named for name in (names if isinstance(names, tuple) else (names,))}
