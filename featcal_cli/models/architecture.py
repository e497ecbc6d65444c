"""Find the calibratable structure of a model: its blocks in execution order, and the modules inside each block. Blocks
are found by running the model on probes, never by a model's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch, token_masks
from featcal_cli.models.module_kinds import (
    LINEAR_KINDS,
    FunctionalLinear,
    Kind,
    ParameterPart,
    Projection,
    expand_experts,
    kind_of,
    read_parameters,
    split_systems,
)
from featcal_cli.models.probing import (
    ROUTER,
    SHARED,
    UNMATCHED,
    BlockProbe,
    ProbeRun,
    count_holders,
    explain_skipped,
    find_called_before_end,
    find_stems,
    merge_orders,
    probe_model,
    sort_by_first_call,
    unreached_lists,
    wildcard_path,
)
from featcal_cli.models.token_rows import OWN_AXIS, Rows
from featcal_cli.models.tracing import Trace
from featcal_cli.runtime.errors import ArchitectureError


@dataclass(frozen=True)
class Module:
    """One calibratable module of a block."""

    name: str
    """Path inside the block, for example self_attn.q_proj."""
    kind: Kind
    rows: tuple[Rows, ...]
    """Meaning of its input's rows, one entry for each of its calls in one run of the block; empty if it is never
    called."""
    overwritten: bool
    """Whether the block changes this module's input in place after the module has read it."""
    functional: FunctionalLinear | None = None
    """The weight and bias, with paths inside the block, if a function uses them without calling a module; else None."""
    depth: int = 0
    """Number of successive Linear modules of the block that this module's input passes through."""
    routed: tuple[int, ...] = ()
    """Shape (d_out, d_in) if this module belongs to an expert of a mixture, else empty. Such a module is given only
    some of the tokens, in any number of calls; `rows` then describes the features of all tokens."""

    @property
    def is_routed(self) -> bool:
        """Whether this module is part of an expert of a mixture."""
        return bool(self.routed)


@dataclass(frozen=True)
class Block:
    """One transformer layer."""

    name: str
    """Path inside the model, for example encoder.layers.0."""
    modules: tuple[Module, ...]
    skipped: tuple[tuple[str, str], ...]
    """Parts that are left unchanged, as (path inside the block, reason)."""
    rows: Rows
    """Meaning of the rows of its hidden states."""
    calls: int
    """Number of calls in one forward pass: more than one if layers share their weights."""
    overwritten: bool
    """Whether the block changes its own input in place."""
    holds: Literal["text", "padded text", "patches"]
    """The content of its hidden states. `text`: one row for each text token, perhaps among other rows. `padded text`:
    text with padding that the model itself appends. `patches`: image patches, or other rows whose number does not
    depend on a text's length."""
    gating_modules: tuple[str, ...]
    """Paths inside the block of the modules that choose experts for tokens; an empty string stands for the block
    itself."""
    final_at: tuple[tuple[str, int], ...] = ()
    """Submodules that hold calibrated modules, as (path inside the block, depth): once all modules of smaller depths
    are solved, the submodule's output stays as it is."""

    @property
    def is_mixture(self) -> bool:
        """Whether this block is a mixture with experts that are given only some of the tokens."""
        return any(module.is_routed for module in self.modules)

    def parts(self, *, by_depth: bool) -> tuple[Block, ...]:
        """Split the block into parts, in execution order; the modules of a part are solved together. Dense modules make
        one part, or with `by_depth` one part per depth. Modules of a mixture's experts are always split by depth, and
        further so that their equations fit into memory."""
        dense = [module for module in self.modules if not module.is_routed]
        routed = [module for module in self.modules if module.is_routed]
        width = max((min(module.routed) for module in routed), default=0)  # experts may be narrower than the model
        parts: list[Sequence[Module]] = [] if by_depth else [dense]
        for depth in sorted({module.depth for module in (self.modules if by_depth else routed)}):
            parts += [[module for module in dense if module.depth == depth]] if by_depth else []
            experts = [module for module in routed if module.depth == depth]
            parts += [experts[part] for part in split_systems([module.routed for module in experts], width)]
        return tuple(replace(self, modules=tuple(modules)) for modules in parts if modules) or (self,)


@dataclass(frozen=True)
class Architecture:
    """The blocks of a model in execution order, and how the examples of each task reach them."""

    blocks: tuple[Block, ...]
    entries: Mapping[str, str]
    """Path of the module that runs on each task's examples: a tower, or an empty string for the whole model."""
    last_blocks: Mapping[str, str]
    """Name of the last block that each task's examples reach."""
    reached: frozenset[str]
    """Paths of all modules that run before the last block has ended."""
    head: frozenset[str] = frozenset()
    """Paths of all modules that run only after the last block has ended."""
    stems: frozenset[str] = frozenset()
    """Paths of the blocks that are stems, which run before all others."""
    needs_full_batches: bool = False
    """Whether batches must be made without padding, because in some module's rows padding cannot be told from
    tokens, or because the length of a batch decides how positions are encoded, or which numbers are drawn."""
    draws: bool = False
    """Whether the model's forward draws random numbers. Batches must then hold one example, as else each example's
    numbers depend on the others."""
    token_logits: frozenset[str] = frozenset()
    """The `entries` whose logits [B, length] are one for each token."""
    notes: tuple[str, ...] = ()
    """Notes to show the user, such as lists of blocks that no example reaches."""

    @property
    def functional(self) -> dict[str, tuple[str, Module]]:
        """The modules whose weights functions use without calling a module: (block name, module) by path in the
        model."""
        return {
            f"{block.name}.{x.name}": (block.name, x) for block in self.blocks for x in block.modules if x.functional
        }


def find_architecture(
    model: PreTrainedModel, batches: Mapping[str, Batch], norms: str, *, routers: bool = False, stems: bool = False
) -> Architecture:
    """Find the blocks of `model`, in the order in which they run on probes cut from one batch of each task.

    `norms` is `auto` or `layernorm` (norms with a bias), `all`, or `none`. With `routers`, the routers of mixtures are
    calibrated as well. With `stems`, modules that hold convolutions and run before the blocks count as blocks too.
    Raises ArchitectureError if no blocks are found or their order differs between tasks, and DataError if the model
    cannot run on a task's examples.
    """
    # tasks with the same inputs share one pair of probes, which shows what padding does if any of them has some
    chosen: dict[frozenset[str], tuple[str, Batch]] = {}
    for task, batch in batches.items():
        if frozenset(batch) not in chosen or (token_masks(batch) and not token_masks(chosen[frozenset(batch)][1])):
            chosen[frozenset(batch)] = task, batch
    runs = {kind: probe_model(model, *given) for kind, given in chosen.items()}
    for run in runs.values() if routers else ():
        run.first.routers.clear()
    before: set[str] = set()
    for run in runs.values() if stems else ():
        before.update(find_stems(model, run.first, run.blocks))
        run.blocks = sort_by_first_call(run.first, {*run.blocks, *before} & {*run.first.calls})
    # one order for all tasks, as each block is solved once for all of them
    order = merge_orders([run.blocks for run in runs.values()])
    if not order:
        raise no_blocks(type(model))
    by_task = {task: runs[frozenset(batch)] for task, batch in batches.items()}
    by_block = {name: run for run in reversed(runs.values()) for name in run.blocks}
    holders = count_holders(model)
    blocks = tuple(_describe(model, name, by_block[name], norms, holders) for name in order)
    reached = frozenset(name for run in runs.values() for name in find_called_before_end(run.first, run.blocks))
    called = frozenset(name for run in runs.values() for name in run.first.calls)
    draws = any(run.first.depth.draws for run in runs.values())
    return Architecture(
        blocks,
        entries={task: run.entry for task, run in by_task.items()},
        last_blocks={task: run.blocks[-1] if run.blocks else "" for task, run in by_task.items()},
        reached=reached,
        head=called - reached,
        stems=frozenset(before),
        needs_full_batches=draws
        or any(run.minds_padding for run in runs.values())
        or any(
            rows.may_hold_padding
            for block in blocks
            for rows in (block.rows, *(rows for module in block.modules for rows in module.rows))
        ),
        draws=draws,
        token_logits=frozenset(run.entry for run in runs.values() if run.has_token_logits),
        notes=tuple(
            f"{path} is left unchanged: no example reaches it" for path in unreached_lists(model, order, called)
        ),
    )


def no_blocks(model_class: type, where: str = "") -> ArchitectureError:
    """Build the error for a model in which no transformer blocks were found."""
    what = f"no list of transformer blocks was found in {model_class.__name__}"
    return ArchitectureError(what, where=where, fix="give a transformer checkpoint whose layers hold Linear modules")


def _describe(model: nn.Module, name: str, run: ProbeRun, norms: str, holders: Mapping[int, int]) -> Block:
    """Describe one block: the modules to calibrate, with their rows, and the parts that are left unchanged, with
    reasons."""
    modules, skipped = [], []
    probe = BlockProbe(run, name)
    works = run.first.functional.items()
    biases = {work.bias.parameter for path, work in works if work.bias and not run.first.is_router(path)}
    # a probe's few tokens reach some experts only: what is seen of one holds for all with its pattern of path
    held, mixture = model.get_submodule(name), dict[str, list[str]]()
    for path in (path.removeprefix(f"{name}.") for path in run.first.routed if path.startswith(f"{name}.")):
        mixture.setdefault(wildcard_path(held, path), []).append(path)
    for path, module in held.named_modules():
        if not (parameters := dict(module.named_parameters(recurse=False))):
            continue
        kind, full = kind_of(module), f"{name}.{path}".rstrip(".")
        if kind is None:
            for key, value in parameters.items():
                inner = f"{path}.{key}".lstrip(".")
                if f"{name}.{inner}" not in biases:  # else what it is added to says all
                    multiplied, reason = _describe_parameter(probe, inner, value, module, holders)
                    modules += multiplied
                    skipped += [(inner, reason)] if reason else []
        elif mixture and run.first.is_router(full):
            skipped.append((path, ROUTER))
        elif any(holders[id(value)] > 1 for value in parameters.values()):
            skipped.append((path, SHARED))
        elif kind not in LINEAR_KINDS and norms == "none":
            skipped.append((path, "norms are switched off"))
        elif kind in LINEAR_KINDS or norms == "all" or "bias" in parameters:
            read, overwritten = probe.rows_of_module(full, module), full in run.first.overwritten
            if same := mixture.get(wildcard_path(held, path)):
                read = probe.rows_of_experts([f"{name}.{x}" for x in same])
                if kind not in LINEAR_KINDS:
                    skipped.append((path, "it is a norm inside an expert of a mixture"))
                    continue
            elif probe.gives_no_rows(full):
                skipped.append((path, "no token of the first examples reaches it"))
                continue
            work = run.first.functional.get(full) if full not in run.first.calls else None
            inside = work and work.without_prefix(f"{name}.")
            shape = read_parameters(module).weight.shape if same else ()
            modules.append(Module(path, kind, read, overwritten, inside, routed=tuple(shape)))
        else:
            called = "scale" if kind == "scale" else "norm"
            skipped.append((path, f"a {called} without bias; `norms: all` calibrates it"))
    unknown = {x.name for x in modules if any(row.is_of_pairs for row in x.rows)}
    if probe.holds == "padded text":
        # what the model pads itself no batch of ours can avoid: only rows that are single tokens are known to count
        unknown |= {x.name for x in modules if any(row.may_hold_padding and row.axis != OWN_AXIS for row in x.rows)}
    skipped += [(path, UNMATCHED) for path in sorted(unknown)]
    modules = [x for x in modules if x.name not in unknown]
    modules = _count_depths(held, name, modules, run.first.depths)
    choosing = (path for path in sorted(run.first.gating_modules) if f"{path}.".startswith(f"{name}."))
    gating_modules = tuple(path.removeprefix(name).lstrip(".") for path in choosing)
    overwritten = name in run.first.overwritten
    final_at = _find_final(name, modules, gating_modules, run.first) if probe.calls == 1 else ()
    parts = tuple(modules), tuple(skipped)
    return Block(name, *parts, probe.rows, probe.calls, overwritten, probe.holds, gating_modules, final_at)


def _find_final(
    block: str, modules: Sequence[Module], gating_modules: Sequence[str], run: Trace
) -> tuple[tuple[str, int], ...]:
    """Return `Block.final_at`: the submodules that do nothing but compute an output from the tensors they are given,
    each with the depth above all modules that are called before it ends, as its output may depend on them."""
    found = []
    for path, end in run.ended_at.items() if not run.depth.draws else ():
        inner = path.removeprefix(f"{block}.")
        held = [module for module in modules if path != inner and module.name.startswith(f"{inner}.")]
        chooses = any(f"{x}.".startswith(f"{inner}.") or inner.startswith(f"{x}.") for x in gating_modules)
        has_effects = chooses or path in run.given_objects or path in run.overwritten or run.calls.count(path) != 1
        if held and not has_effects and not any(module.is_routed for module in held):
            before = (x.depth for x in modules if run.read_at.get(f"{block}.{x.name}", 0) <= end)
            found.append((inner, 1 + max(before)))
    return tuple(found)


def _describe_parameter(
    probe: BlockProbe, inner: str, value: Tensor, module: nn.Module, holders: Mapping[int, int]
) -> tuple[list[Module], str]:
    """Describe how functions use a parameter of a module that is neither a Linear nor a norm. Returns the calibratable
    modules that the parameter is made of; or no modules, and the reason why it is left unchanged."""
    prefix, run = f"{probe.name}.", probe.first
    parts = {
        part: functional.without_prefix(prefix)
        for part, functional in run.functional.items()
        if functional.weight.parameter == prefix + inner
    }
    if reason := explain_skipped(module, value, holders, parts, run):
        return [], reason
    if run.routed.keys() & parts.keys():
        source = probe.rows_of_experts(parts)
        experts = expand_experts(next(iter(parts.values())), value.shape)
        names = [(x, x.weight.name(value.shape)) for x in experts]
        return [Module(name, "linear", source, False, x, routed=x.weight.size) for x, name in names], ""
    return [
        Module(part.removeprefix(prefix), "linear", probe.rows_of_module(part), part in run.overwritten, functional)
        for part, functional in parts.items()
    ], ""


def module_at(block: nn.Module, module: Module) -> nn.Module:
    """Return the submodule of `block` that `module` describes. If a function uses the weight without calling a module,
    return a Projection made of that weight and bias."""
    functional = module.functional
    if functional is None or functional.is_module:
        return block.get_submodule(module.name)
    return Projection(block, functional)


def held_parameters(block: nn.Module, module: Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that hold a module's weight and bias, with their paths inside the block."""
    for name, x in module_at(block, module).named_parameters(recurse=False):
        yield (x.place.parameter, x.whole) if isinstance(x, ParameterPart) else (f"{module.name}.{name}", x)


def _count_depths(held: nn.Module, block: str, modules: Sequence[Module], traced: Mapping[str, int]) -> list[Module]:
    """Set the depth of each module: the number of successive Linear modules that its input passes through in the block.
    A norm gets the depth of the next Linear modules, or of the last ones if none follow, so it is solved with them."""
    # products before the block, those of an encoder for example, are not counted
    start = traced.get(block, 0)
    of_modules = {module.name: max(start, traced.get(f"{block}.{module.name}", start)) for module in modules}
    experts: dict[str, list[str]] = {}
    # a probe's tokens may miss an expert: all experts take the largest depth among them
    for module in (module for module in modules if module.is_routed):
        place = module.functional.weight.parameter if module.functional else wildcard_path(held, module.name)
        experts.setdefault(place, []).append(module.name)
    for names in experts.values():
        of_modules |= dict.fromkeys(names, max(of_modules[name] for name in names))
    linear = sorted({of_modules[module.name] for module in modules if module.kind in LINEAR_KINDS})
    steps = {depth: number for number, depth in enumerate(linear)}
    following = {
        name: next((x for x in linear if x >= depth), max(linear, default=0)) for name, depth in of_modules.items()
    }
    return [replace(module, depth=steps.get(following[module.name], 0)) for module in modules]


def find_registered(model: nn.Module, norms: str) -> list[Block]:
    """Describe the blocks of all lists in registration order. How often each module is called is unknown."""
    holders = count_holders(model)
    silent = ProbeRun("", Trace(model), Trace(model), {}, [])
    return [
        _describe(model, f"{path}.{key}", silent, norms, holders)
        for path in unreached_lists(model, (), ())
        for key, _ in model.get_submodule(path).named_children()
    ]
