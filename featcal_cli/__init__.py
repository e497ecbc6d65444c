"""featcal: mend merged models by calibrating their features to the experts'.

The files, in the order in which data flows through them:

What the user says

    errors         what can go wrong: what, where, fix
    documents      YAML and JSON that strangers wrote, within bounds
    disk           why a disk cannot be written; what is on it whatever happens
    address        what users type: a path, a Hub id, a data source
    keys           what all groups of recipe keys have in common
    yardstick      how a task's figure is measured: the recipe's key evaluate
    shipped        the recipes that come with the package, and what comes beside them
    overrides      options of the command line → keys of a recipe, and back
    recipe         YAML and command-line options → one validated object
    recipe_file    a resolved recipe → a file that says what made it

The Hub

    waiting        what a run waits for is said while it waits
    patience       time limits, and which failures are worth another try
    hub_errors     the Hub's failures → messages
    repo           a repo or folder at one commit: its list of files, its small files
    header         what a safetensors file holds, from its header alone
    conversion     the pull request that offers a repo's weights as safetensors
    origin         where a model's weights come from, before they are downloaded
    download       files arrive in the cache and are held against their checksums
    links          links that lead out of a model's folder
    convert        pickled weights → a safetensors copy
    adapter        a PEFT adapter by its files
    fold           an adapter and its base → one full checkpoint
    hub            an origin → a local snapshot

Lineage

    readme         what a README.md says: metadata and text
    mergekit       what a mergekit configuration says
    fusion_pool    what a FusionBench model pool says
    references     how cards and configs name models, and what may be believed
    known          well-known experts whose cards are silent
    library        every repo of a search opened once
    ancestry       what a merged repo's files say it was made from
    ancestors      which model is the base
    task_data      an expert's dataset
    commands       questions, and the one command that answers them
    lineage        merged model → base, experts, data, each with where it was read

Examples

    splits         which files are which split
    formats        what a file is read with, by its ending
    hub_configs    which files of a dataset's repo are which config and split
    hub_data       a Hub dataset at one commit → the files of one split
    row_groups     parquet on the Hub: a few rows from many row groups
    streams        other formats on the Hub → rows
    contents       what a file is by its first bytes; its lines
    delimited      .csv and .tsv → rows, and what is wrong with them
    tables         local files → rows in any order
    rows           a data source → rows
    columns        which column of a row plays which role
    labels         labels of rows → class numbers
    batches        a model's forward arguments; what every reader of rows offers
    preprocessors  a model's own image processor or tokenizer
    tensors        model-ready .safetensors → batches
    pixels         an image of any kind → eight bits of red, green, blue
    images         image rows → pixel_values
    phrases        text rows → what the tokenizer is given
    text           phrases → token ids
    examples       a task's fitted and held-out batches
    labelled       labelled rows of a split, a batch at a time
    classes        the names that a dataset gives its labels

Models

    config         what config.json says, and what none may say
    checkpoint     memory-mapped models, each in its class
    alignment      models loaded to fit the merged one, and checked that they do
    likeness       whether two models are one function of their weights, as their configs say
    values         what weights hold with which nothing can be calibrated: NaN, nothing but zeros, one huge number
    span           whether merged was made of these experts and this base, from a few of their weights
    merging        the built-in mergers
    layout         which tensor lies where on disk; writing new values and nothing else
    outline        a model without values, from headers alone
    modules        the kinds of modules that can be calibrated, and their parameters
    trace          one watched run of a model
    blocks         where a model's lists of blocks are
    tokens         which rows of a feature are which tokens
    architecture   blocks in execution order; calibratable modules of a block
    inventory      what would be calibrated, from the config alone

The method

    pages          memory-mapped weights: read ahead, and given back
    ahead          weights on their way to a GPU while it computes
    places         moving memory: to a device, to the host, to a file
    shelf          where features of paused passes lie: device, memory, disk
    walker         one model's forward passes, paused before every block
    weights        how much each token counts
    capture        what a block's modules were given in one run
    company        expert and students side by side on the same examples
    features       student and experts walking the blocks together
    watch          everybody side by side where drift is measured
    sums           running sums of matrices; symmetric ones by halves
    ways           which of the equal ways to a result costs least
    moments        running sums → G, C, means
    factor         one system's precision, Cholesky factor, condition number
    solver         the closed forms
    token_space    the same equations over rows, where they are few
    pool           the sums of all processes, added up; the solutions, given to all
    collect        one block's features → its systems of equations
    guard          updates checked on held-out rows, and pulled back
    pullback       all updates pulled back together, where the mean drift would grow
    algorithm      Algorithm 1
    stamps         local files that a job reads: seen when they are no longer what they were
    fingerprint    everything that decides a job's result; what differs between two
    journal        finished blocks on disk; resume
    journal_files  a journal's files: whose they are, which may be deleted
    drift          feature drift from the experts, and its split
    outputs        what drift does to the experts' own heads
    vectors        task vectors: the cosine of expert − base and model − base
    search         candidates for λ, ρ, α in lock-step; weak ones drop out
    select         which λ, ρ, α a run uses: given, searched or the paper's

Evaluation

    scores         accuracy or Spearman's ρ, with a bootstrap interval
    contest        several models answer the same examples
    evaluate       answers of the experts' own heads, on any body
    zero_shot      the class whose name base's text tower puts nearest to the image
    generation     answers in words, right to the letter
    harness        language models on lm-eval's tasks
    ledger         figures that are known already, on disk
    lineup         the models of an evaluation, each loaded when it is needed
    evaluation     the figures of an evaluation: the schema of its JSON

What comes of it

    inspection     the figures of inspect-drift: the schema of its JSON
    measures       what a walk measured → figures
    report         what a run did: featcal_report.json
    figures        what all pictures have in common
    plots          the drift picture of a card
    drift_reading  what the figures of an inspection say in words
    drift_plots    maps and curves of an inspection
    projection     final features in two dimensions
    page           an inspection → one HTML page (page.html)
    drift_summary  an inspection → Markdown for a pipeline's summary
    gate           drift over the user's limit → exit code 3
    markdown       text of others, made inert
    drift_section  what a model card says of drift
    sections       the other parts of a model card
    card           report → model card
    loaders        the names under which others load a checkpoint
    output         the output folder
    built          what was built, looked over before it takes its place
    belongings     what is ours of a folder, and may be deleted or replaced
    workplace      the hidden folder beside an output: what a run leaves for the next one
    finished       an output in its place, and the note in it that says which job made it
    lock           one run at a time on an output
    account        whose token it is, and where it may write
    remote         what a repo holds, against what a folder holds
    upload         large files on their way to the Hub
    push           the output folder → one commit, read back

The run

    launch         how this process was started: alone, or by torchrun
    ranks          the processes of one run, and what they tell each other
    shares         which process works on which tasks and examples
    machine        devices, versions, memory
    memory         how much memory this process takes
    shortage       memory that runs out, and smaller batches
    walk           what a batch takes on its way through a model
    work           operations of a calibration, and how long they take
    estimate       memory, time and disk that a job will need
    batch_size     how many examples make a batch, where nobody says so
    listener       whoever shows a run as it goes
    preflight      everything that can be known before weights are downloaded
    job            the models of a job, loaded and ready to walk
    run            what every verb begins with: lineage, preflight, downloads
    summary        what a run did, put together → report
    calibration    what of a calibration needs torch: from a job that may start to the output
    workflow       the verbs: what the command line and Python users both call
    inspector      inspect-drift: its files, its models, its page
    measuring      what of inspect-drift needs torch: walk, measure, draw
    evaluator      evaluate: models side by side on labelled data
    background_imports  torch and its company, imported on a thread while models are looked for
    demo           the main job on embedded checkpoints
    interruption   Ctrl-C, SIGTERM and SIGHUP end a run at once
    standard_streams  what a process is started with: its streams, folder and encoding in any state
    redact         secrets taken out of a text
    log            a run as lines of JSON
    crash          what a user can send when featcal itself is wrong
    console        what the terminal shows of a run
    drift_bars     drift over depth in characters
    drift_view     what the terminal shows of an inspection
    chooser        what a job leaves open, chosen by number on a terminal
    score_table    what the terminal shows of an evaluation
    options        every option of the command line, declared once
    option_checks  what options cannot mean: empty values, one file for two things
    cli            the commands
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Recipe as Recipe
    from featcal_cli.workflows.verbs import calibrate as calibrate
    from featcal_cli.workflows.verbs import dry_run as dry_run

__version__ = version("featcal-cli")
__all__ = ["Recipe", "__version__", "calibrate", "dry_run"]


def __getattr__(name: str) -> Any:
    """Load the verbs when they are first asked for: importing featcal_cli stays fast, without torch."""
    if name in ("calibrate", "dry_run"):
        from featcal_cli.workflows import verbs as workflow

        return getattr(workflow, name)
    if name == "Recipe":
        from featcal_cli.recipe.schema import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
