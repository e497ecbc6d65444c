"""What a shell offers for names that are not options: it waits for each answer, so nothing here imports torch or asks
the network."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import typer
from typer import _completion_shared as scripts

from featcal_cli.runtime.errors import FeatCalError

BASH = """
%(complete_func)s() {
    # bash ends words at = and :, so TASK=REPO reaches us in parts: they are one word again
    local IFS=$'\\n' words=() i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        if [[ $i -gt 0 && ( ${COMP_WORDS[i]} == [=:]* || ${COMP_WORDS[i-1]} == *[=:] ) ]]; then
            words[-1]+=${COMP_WORDS[i]}
        else
            words+=("${COMP_WORDS[i]}")
        fi
    done
    COMPREPLY=( $( env COMP_WORDS="${words[*]}" \\
                   COMP_CWORD=$((${#words[@]} - 1)) \\
                   %(autocomplete_var)s=complete_bash $1 ) )
    # only what follows the last of these signs is put in
    local last=${COMP_WORDS[COMP_CWORD]}
    [[ $last == [=:]* ]] && last=
    local before=${words[-1]%%"$last"}
    before=${before#--*=}
    COMPREPLY=( "${COMPREPLY[@]#"$before"}" )
    [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
"""Typer's script, but for words with = and :."""


def teach_bash() -> None:
    """Let `--install-completion` and `--show-completion` give BASH; where typer has moved its scripts, its own."""
    getattr(scripts, "_completion_scripts", {})["bash"] = BASH


def complete_shipped(incomplete: str) -> list[str]:
    """Recipes that come with the package, and the files beside them."""
    from featcal_cli.recipe.reading import COMPANIONS, shipped_recipes

    return [name for name in (*(file.stem for file in shipped_recipes()), *COMPANIONS) if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that come with the package; where none matches, a shell offers files."""
    return [name for name in complete_shipped(incomplete) if not Path(name).suffix]


def complete_model(incomplete: str) -> list[str]:
    """Models in the Hub's cache."""
    return [repo for repo in _cached_repos("models") if repo.startswith(incomplete)]


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tasks of the recipe on the command line, and those that its other options name."""
    return [task for task in _name_tasks(ctx) if task.startswith(incomplete)]


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """`TASK=` for each of them."""
    return [f"{task}=" for task in complete_task(ctx, incomplete)]


def complete_expert(ctx: typer.Context, incomplete: str) -> list[str]:
    """`TASK=`, then models in the Hub's cache."""
    return _complete_pair(ctx, incomplete, "models")


def complete_data(ctx: typer.Context, incomplete: str) -> list[str]:
    """`TASK=`, then datasets in the Hub's cache."""
    return _complete_pair(ctx, incomplete, "datasets")


def _complete_pair(ctx: typer.Context, incomplete: str, kind: str) -> list[str]:
    task, equals, begun = incomplete.partition("=")
    if not equals:
        return complete_key(ctx, incomplete)
    return [f"{task}={repo}" for repo in _cached_repos(kind) if repo.startswith(begun)]


def _name_tasks(ctx: typer.Context) -> list[str]:
    from featcal_cli.recipe.reading import collect_overrides, find_recipe, read_draft

    typed = [pair for option in ("expert", "data") for pair in ctx.params.get(option) or ()]
    tasks = {pair.partition("=")[0]: None for pair in typed}
    if recipe := ctx.params.get("recipe"):
        with suppress(FeatCalError, OSError):
            named = collect_overrides(merged="named/later")  # the recipe need not say it
            tasks |= dict.fromkeys(read_draft(find_recipe(recipe), named).tasks)
    return list(tasks)


def _cached_repos(kind: str) -> list[str]:
    """Ids in the Hub's cache, where each repo is a folder such as models--USER--NAME. kind: models or datasets."""
    from huggingface_hub import constants

    try:
        names = [path.name for path in Path(constants.HF_HUB_CACHE).iterdir()]
    except OSError:  # there is no cache yet
        return []
    return sorted(name.removeprefix(f"{kind}--").replace("--", "/") for name in names if name.startswith(f"{kind}--"))
