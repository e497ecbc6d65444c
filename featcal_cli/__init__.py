"""featcal: mend merged models by calibrating their features to the experts'.

The files, in the order in which data flows through them:

    errors        what can go wrong: what, where, fix
    recipe        YAML and command-line options → one validated object
    hub           repo or folder → local snapshot + commit
    hub_errors    the Hub's failures → messages
    convert       pickled weights → a safetensors copy
    adapter       a PEFT adapter by its files
    fold          an adapter and its base → one full checkpoint
    checkpoint    memory-mapped models of one class; alignment check; built-in mergers
    layout        which tensor lies where on disk; writing new values and nothing else
    tables        local files → rows in any order
    rows          a data source → rows
    columns       which column of a row plays which role
    labels        labels of rows → class numbers
    batches       a model's forward arguments; what every reader of rows offers
    preprocessors  a model's own image processor or tokenizer
    tensors       model-ready .safetensors → batches
    images        image rows → pixel_values
    phrases       text rows → what the tokenizer is given
    text          phrases → token ids
    examples      a task's fitted, held-out and labelled batches
    modules       the kinds of modules that can be calibrated, and their parameters
    trace         one watched run of a model
    blocks        where a model's lists of blocks are
    tokens        which rows of a feature are which tokens
    architecture  blocks in execution order; calibratable modules of a block
    inventory     what would be calibrated, from the config alone
    walker        one model's forward passes, paused before every block
    weights       how much each token counts
    features      student and experts walking the blocks together
    moments       running sums → G, C, means
    solver        the closed forms
    collect       one block's features → its systems of equations
    calibrate     Algorithm 1
    journal       finished blocks on disk; resume
    drift         feature drift from the experts
    select        λ, ρ, α
    evaluate      accuracy on labelled data
    report        what a run did: featcal_report.json
    output        the output folder
    machine       devices, versions, memory
    workflow      the verbs: what the command line and Python users both call
    demo          the main job on embedded checkpoints
    console       everything that imports rich
    cli           everything that imports typer
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal_cli.recipe import Recipe as Recipe
    from featcal_cli.workflow import calibrate as calibrate

__version__ = version("featcal-cli")
__all__ = ["Recipe", "__version__", "calibrate"]


def __getattr__(name: str) -> Any:
    """Load the verbs when they are first asked for: importing featcal_cli stays fast, without torch."""
    if name == "calibrate":
        from featcal_cli.workflow import calibrate

        return calibrate
    if name == "Recipe":
        from featcal_cli.recipe import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
