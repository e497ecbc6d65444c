"""The figures of an evaluation: the schema of its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from featcal_cli.scores import Score, combine

EXPERT, MERGED, CALIBRATED = "expert", "merged", "calibrated"
"""Roles of models; others are called by their names."""


@dataclass(frozen=True)
class TaskScores:
    """All models on one task."""

    protocol: str
    """zero-shot, generation, lm-eval or heads."""
    metric: str
    """accuracy or spearman; of lm-eval, its tasks with their metrics."""
    data: str
    """The dataset, file or folder; of lm-eval nothing."""
    split: str
    scores: Mapping[str, Score]
    """By role: expert, merged, and further models."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scores": {role: asdict(score) for role, score in self.scores.items()}}


@dataclass(frozen=True)
class Evaluation:
    """Models side by side on the tasks of a recipe."""

    featcal_version: str
    names: Mapping[str, str]
    """By role, what the model is; of the expert, each task's."""
    tasks: Mapping[str, TaskScores]
    notes: list[str]
    recipe: Mapping[str, Any]
    environment: Mapping[str, str]
    limit: int | None
    """Examples per task, where not all were asked for."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For --json and the report."""
        return {
            "featcal_version": self.featcal_version,
            "names": dict(self.names),
            "tasks": {task: found.to_dict() for task, found in self.tasks.items()},
            "means": {role: asdict(score) for role, score in average_tasks(self.tasks).items()},
            "limit": self.limit,
            "notes": self.notes,
            "recipe": dict(self.recipe),
            "environment": dict(self.environment),
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """The text that --json prints."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"


def average_tasks(tasks: Mapping[str, TaskScores]) -> dict[str, Score]:
    """By role, the plain mean over the tasks, of which there is at least one."""
    roles = next(iter(tasks.values())).scores
    return {role: combine([found.scores[role] for found in tasks.values()]) for role in roles}


def read_tasks(found: Mapping[str, Any]) -> dict[str, TaskScores]:
    """The tasks of what `to_dict` made."""
    return {
        task: TaskScores(**{**values, "scores": {role: Score(**score) for role, score in values["scores"].items()}})
        for task, values in found.items()
    }
