"""Evaluate language models on lm-eval's tasks through its Python API. lm-eval is an optional extra and is imported only
where it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from featcal_cli.evaluation.protocols import LabelledTask, check_whole, on_device
from featcal_cli.evaluation.results import RESAMPLES, Score, combine, make_normal_score
from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Evaluate
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.hardware import is_out_of_memory
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.sanitise import exception_text, list_some

INSTALL = {"fix": "install it, in the clone of featcal", "command": "pip install -e '.[lm-eval]'"}
ALLOW = "--allow-code-execution"
CODE = ("humaneval", "mbpp", "apps", "ds1000", "livecodebench", "codexglue")
"""Beginnings of the names of tasks that run code written by a model; lm-eval itself recognises other such tasks."""
CODE_SWITCH = "HF_ALLOW_CODE_EVAL"
"""The environment variable that must be set for lm-eval's metric to run code."""


def check_harness(tasks: Mapping[str, Evaluate], *, allow_code: bool) -> None:
    """Raise RecipeError if a recipe has tasks for lm-eval and it is not installed, or if such a task runs code written
    by a model and the user has not allowed that."""
    wanted = {task: spec for task, spec in tasks.items() if spec.protocol == "lm-eval"}
    if wanted and find_spec("lm_eval") is None:
        what = "lm-eval, which measures language models, is not installed"
        raise RecipeError(what, where=f"tasks.{next(iter(wanted))}.evaluate.lm_eval", **INSTALL)
    for task, spec in wanted.items():
        if not allow_code and (running := [name for name in spec.lm_eval if name.startswith(CODE)]):
            raise _explain_code(running[0], task)


def measure_tasks(task: LabelledTask, role: str, model: Model, *, allow_code: bool) -> Score:
    """Return the mean of lm-eval's figures for its tasks, with the errors that it gives.

    A limit selects the first examples of each task. allow_code: tasks may run code written by the model on this
    machine. Raises RecipeError for tasks and metrics that lm-eval does not know, and for tasks that run code without
    permission.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    check_whole(model)
    how = task.how
    cutting, own = task.open_tokens(), task.find_vocabulary(role)
    # the expert's, with its chat template, unless the model's ids are others
    tokenizer = cutting.tokenizer if own is None or own.ids == cutting.ids else own.tokenizer
    if allow_code:
        os.environ[CODE_SWITCH] = "1"
    with quiet_transformers(), on_device(model.module, task.device):
        harness: Any = HFLM(pretrained=model.module, tokenizer=tokenizer, batch_size=task.batch_size)
        try:
            results: Any = lm_eval.simple_evaluate(
                model=harness,
                tasks=list(how.lm_eval),
                limit=task.limit,
                bootstrap_iters=RESAMPLES,
                apply_chat_template=bool(tokenizer.chat_template) if how.chat is None else how.chat,
                confirm_run_unsafe_code=allow_code,
            )
        except (ImportError, KeyError, ValueError, OSError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise _explain(error, task.name, list_some(how.lm_eval)) from error
    return combine([_read_score(results, name, metric, task.name) for name, metric in how.lm_eval.items()])


def _read_score(results: Any, name: str, metric: str, task: str) -> Score:
    figures = results["results"].get(name, {})
    kind, _, chosen = metric.partition(",")
    fitting = [key for key in figures if key == metric or (not chosen and key.split(",")[0] == kind)]
    if len(fitting) != 1:
        what = f"lm-eval has {'several' if fitting else 'no'} {metric} of {name}"
        known = [key for key in figures if "," in key and "_stderr" not in key]
        # what is a name of several tasks has no figure of its own
        fix = f"name one of: {list_some(fitting or known or results['results'])}"
        raise RecipeError(what, where=f"tasks.{task}.evaluate.lm_eval", fix=fix)
    filtered = fitting[0].partition(",")[2]
    error = figures.get(f"{kind}_stderr,{filtered}")
    error = float(error) if isinstance(error, (int, float)) else 0.0  # of some metrics it knows none
    count = int(results.get("n-samples", {}).get(name, {}).get("effective", 0))
    return make_normal_score(float(figures[fitting[0]]), error, count)


def _explain(error: Exception, task: str, names: str) -> Exception:
    text = str(error).strip()
    if isinstance(error, ImportError):
        what = f"lm-eval needs further packages for one of {names} ({text})"
        return RecipeError(what, where=f"tasks.{task}.evaluate.lm_eval", **INSTALL)
    if "unsafe" in text.lower() or CODE_SWITCH in text:
        return _explain_code(names, task)
    is_unknown = isinstance(error, KeyError) or "not found" in text.lower()
    fix = "see the names of its tasks: lm-eval ls tasks" if is_unknown else "see its documentation"
    if isinstance(error, OSError):
        fix = f"check the connection, and that you may read the data of {names}"
    what = f"lm-eval {version('lm-eval')} refuses: {exception_text(error)}"
    return RecipeError(what, where=f"tasks.{task}.evaluate.lm_eval", fix=fix)


def _explain_code(name: str, task: str) -> RecipeError:
    return RecipeError(
        f"{name} runs code that a model wrote, on this machine",
        where=f"tasks.{task}.evaluate.lm_eval",
        fix=f"give {ALLOW} where that can do no harm (a container), or take the task out",
    )
