"""Run a model block by block: its forward passes pause before each block, and weights are on the device only while
needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from math import isfinite
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn

from featcal_cli.data.batches import Batch, forward_names
from featcal_cli.engine.offload import Offloader, TouchMode
from featcal_cli.engine.weight_uploads import DeviceWeight, Wanted, device_weights, fetch_weights, find_largest
from featcal_cli.models.architecture import Architecture, held_parameters, module_at
from featcal_cli.models.loading import Model, share_model
from featcal_cli.models.tracing import BlockCall
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import CheckpointError, NumericsError

HUGE = 1e12
"""Absolute weight above which it is too large to compute with, as sums of squares of features overflow long before."""
TOO_LARGE = "save merged in bfloat16 or float32 and calibrate that, or give a larger --ridge for smaller updates"
"""Advice in the error for solved weights that are too large for the dtype of merged's weights."""


def find_stem(model: Model, architecture: Architecture) -> list[nn.Parameter]:
    """Return all floating-point parameters outside of blocks and head, also those that no example reaches."""
    blocks = [own for block in architecture.blocks if (own := model.own_path(block.name)) is not None]
    inside = tuple(f"{block}." for block in blocks)
    head = {*map(id, model.parameters_of(architecture.head))} - {*map(id, model.parameters_of(architecture.reached))}
    floats = {name: x for name, x in model.module.named_parameters() if x.is_floating_point() and id(x) not in head}
    return [x for name, x in floats.items() if not name.startswith(inside)]


def convert_stem(model: Model, architecture: Architecture, dtype: torch.dtype) -> list[nn.Parameter]:
    """Convert the parameters of `find_stem` to the computing dtype, as models look at their dtype before using them;
    return those that were of another one. Blocks and head keep their own dtype, in which they are solved, and are
    converted only while they run."""
    converted = [x for x in find_stem(model, architecture) if x.dtype != dtype]
    if not converted:
        return []
    read = [x.data for x in converted]
    for parameter in converted:
        parameter.data = parameter.data.to(dtype)
    hardware.give_back(read)
    with torch.device("meta"):
        plan = type(model.module)._from_config(deepcopy(model.module.config), dtype=dtype)
    dtypes = {name: buffer.dtype for name, buffer in plan.named_buffers()}
    for name, buffer in model.module.named_buffers():
        buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))
    return converted


class BlockRunner:
    """Runs one model's forward passes, each of which pauses before every block until it is told to continue.

    A pass is a coroutine around the model's own forward. It yields the arguments of a block, and continues with the
    block output that it is given. Every architecture is thus run by its own code, and featcal need not know what
    happens between blocks.
    """

    def __init__(
        self,
        model: Model,
        architecture: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        token_ids: Tensor | None = None,
    ) -> None:
        """Prepare a model for the merged model's `architecture`; the model may be a part of the merged model, or have
        more parts. `token_ids` maps token ids of merged's vocabulary to the model's own; None if they are equal."""
        self.model = model
        self.token_ids = None if token_ids is None else token_ids.to(device)
        self.device, self.dtype = device, dtype
        self.draws = architecture.draws
        self.bytes_read = 0
        """Bytes of this model's parameters that have been read so far; each parameter is counted once."""
        self.offloader: Offloader | None = None
        """The offloader that may move the tensors of paused passes; None if there is none."""
        self._stems = [stem for stem in architecture.stems if model.own_path(stem) is not None]
        self._blocks = [own for block in architecture.blocks if (own := model.own_path(block.name)) is not None]
        inside = [value for block in self._blocks for value in model.module.get_submodule(block).parameters()]
        self._needed = set(map(id, (*model.parameters_of(architecture.reached), *inside)))
        """Ids of the parameters that lie in blocks or are used before the last block ends."""
        self._functional = architecture.functional
        self._modules: dict[str, nn.Module] = {}
        """The model's modules by their paths in merged, as far as they were asked for."""
        self._read: set[int] = set()
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameters and buffers whose data is on the device, by id, each with the data that it gets back
        afterwards."""
        self._here: dict[int, DeviceWeight] = {}
        """The shared device copies that these tensors use, by id. A tensor that was given a new value has none."""
        self._own = {id(x): x for x in (*model.module.parameters(), *model.module.buffers())}
        self._weights = device_weights(device) if device.type == "cuda" else None
        self._uploads: deque[list[DeviceWeight]] = deque(maxlen=2)
        """Uploads started ahead of time, for the current block and the next."""
        self._held: dict[tuple[str, bool], tuple[dict[str, nn.Parameter], list[Tensor]]] = {}
        """Parameters by name, and buffers, of each module that was brought, with or without those further inside:
        looking for them takes long."""
        self._huge = ""
        """The latest weight that was read and is too large to compute with, if there is one."""
        self._is_open = False
        self._undo = ExitStack()
        self._install()
        for entry in architecture.token_logits:
            if (module := self._find_entry(entry)) is not None:
                self._undo.callback(module.register_forward_hook(_separate_tokens).remove)

    def prepare(self, batch: Batch, entry: str) -> tuple[nn.Module, Batch]:
        """Return the module at `entry`, which runs on these examples, and the inputs that it takes, moved to the
        device. Call this inside `on_device`. Raises CheckpointError if the model has no such module."""
        module = self._find_entry(entry)
        if module is None:
            raise CheckpointError(
                f"{self.model.role} has no {entry}, which these examples are for",
                where=self.model.snapshot.name,
                fix="give examples of the kind that this expert was trained on",
            )
        for stem in self._stems:  # what calls one may look at its dtype first
            self.bring(stem)
        names = forward_names(module) if self.model.part or self.model.body else set(batch)
        self.reach(batch.values())  # it may be that of a pass
        return module, self.place({name: tensor for name, tensor in batch.items() if name in names})

    def _find_entry(self, entry: str) -> nn.Module | None:
        own = self.model.own_path(entry) if entry else ""
        return None if own is None else self.model.module.get_submodule(own)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the weights of modules that run to the device, in the computing dtype; release them all at the end."""
        if self._is_open:
            yield
            return
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._fetch_new()
            for holder, data in self._moved.values():
                holder.data = data
            self._moved.clear()
            self._here.clear()

    def sharing(self, architecture: Architecture) -> BlockRunner:
        """Return a runner of a model that shares the weights of this one."""
        return BlockRunner(share_model(self.model), architecture, self.device, self.dtype, self.token_ids)

    def retire(self) -> None:
        """Restore the model as it was before, so that it no longer pauses at blocks."""
        self._undo.close()

    def place(self, batch: Batch) -> Batch:
        """Move a batch to the device, with floating-point inputs in the computing dtype."""
        return {
            name: tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)
            for name, tensor in batch.items()
        }

    def module(self, path: str) -> nn.Module:
        """Return the module at `path` in the merged model. If a function uses the weight at that path without calling a
        module, return a module made of that weight and bias."""
        block, module = self._functional.get(path, (path, None))
        if block not in self._modules:
            self._modules[block] = self.model.module.get_submodule(self.model.own_path(block) or "")
        found = self._modules[block]
        return found if module is None else module_at(found, module)

    def parameter(self, path: str) -> nn.Parameter:
        """Return the parameter at `path` in the merged model."""
        module, _, name = path.rpartition(".")
        return self.module(module).get_parameter(name)

    def bring(self, path: str) -> None:
        """Move the module at `path` to the device. Its parameters are checked and counted the first time. Raises
        NumericsError if one of them is not finite."""
        self._bring(self.model.own_path(path) or "", recurse=True)

    def keeps_weights(self) -> bool:
        """Tell whether the weights of all blocks can be on the device until `on_device` ends: because the model runs on
        them where they lie, or because there is room for copies."""
        blocks = map(self.model.module.get_submodule, self._blocks)
        inside = {id(x): x for block in blocks for x in block.parameters() if x.is_floating_point()}
        if self.device.type == "cpu":
            return self.dtype == torch.float32 and {x.dtype for x in inside.values()} <= {torch.float32}
        count: int = sum(x.numel() for x in inside.values())
        return count * self.dtype.itemsize <= hardware.room_for_weights(self.device)

    def release(self, path: str) -> None:
        """Release the memory that the weights of the module at `path` take, on the device and of those that were read
        from the disk, before `on_device` ends. They are brought again when the module is needed."""
        own = self.model.own_path(path)
        module = None if own is None else self.model.module.get_submodule(own)
        for holder in (*module.parameters(), *module.buffers()) if module else ():
            if id(holder) in self._moved:
                holder.data = self._moved.pop(id(holder))[1]
                self._here.pop(id(holder), None)
        self.give_back(path)

    def prefetch(self, path: str) -> None:
        """Start reading the module at `path` from the disk, and copying it to a CUDA device, in the background."""
        parameters = self._parameters_in(path)
        hardware.fetch_ahead(map(self._home, parameters))
        if self._weights is not None:
            upload = self._weights.begin(map(self._wanted, parameters))
            self._uploads += [upload] if upload else []

    def give_back(self, path: str | None = None) -> int:
        """Release the memory of weights that were read from the disk, for the module at `path` or for the whole model.
        Returns the number of bytes released."""
        parameters = self.model.module.parameters() if path is None else self._parameters_in(path)
        return hardware.give_back(map(self._home, parameters))

    def _parameters_in(self, path: str) -> list[nn.Parameter]:
        """Return all parameters of the module at `path` in merged; none if the model has no such module."""
        own = self.model.own_path(path)
        return [] if own is None else list(self.model.module.get_submodule(own).parameters())

    def replace(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter a new value of the same shape, stored in the parameter's host dtype. The old tensor stays
        unchanged, as other models may share it. A value computed on the device is copied to host memory only when it is
        needed there."""
        dtype = self._home(parameter).dtype
        if dtype == torch.float16:
            self._check_fits(parameter, value)
        value = value.to(dtype).contiguous()
        if id(parameter) in self._moved:
            self._moved[id(parameter)] = (parameter, value)
            self._here.pop(id(parameter), None)
        parameter.data = value.to(parameter)

    def _check_fits(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Raise NumericsError if a new value is finite but too large for float16."""
        largest = find_largest(value)
        # what is not finite itself is found where it is computed
        if largest.half().isfinite() or not largest.isfinite():
            return
        name = next((name for name, x in self.model.parameters.items() if x is parameter), "a parameter")
        raise NumericsError(
            f"the calibrated {name} does not fit into merged's float16: its largest value is {float(largest):.4g}, and "
            f"float16 ends at {torch.finfo(torch.float16).max:.4g}",
            where=self.model.snapshot.name,
            fix=TOO_LARGE,
        )

    def parameters_at_home(self, path: str) -> dict[str, Tensor]:
        """Return the values of a module's parameters in host memory, by their paths in merged. `path` is the module's
        path in merged. New values that are still on the device are copied to host memory first."""
        self._fetch_new()
        block, module = self._functional.get(path, (path, None))
        held = self.module(block)
        named = held.named_parameters() if module is None else held_parameters(held, module)
        return {f"{block}.{name}": self._home(parameter) for name, parameter in named}

    def copy(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy, on the device, of a parameter's host value in its host dtype."""
        return self._home(parameter).to(self.device, copy=True)

    def forget(self, path: str, other: BlockRunner) -> None:
        """Make the module at `path`, which all passes have left, share its parameters again with `other`, a runner of
        the same model. Inside `on_device` this takes effect at the end."""
        for parameter, shared in zip(self.module(path).parameters(), other.module(path).parameters(), strict=True):
            if id(parameter) in self._moved:
                self._moved[id(parameter)] = (parameter, other._home(shared))
            else:
                parameter.data = other._home(shared)

    def _fetch_new(self) -> None:
        """Copy new values that are still on the device to host memory."""
        new = {key: home for key, (_, home) in self._moved.items() if home.device.type != "cpu"}
        if new:
            fetched = zip(new, fetch_weights(list(new.values())), strict=True)
            self._moved |= {key: (self._moved[key][0], home) for key, home in fetched}

    def _home(self, holder: Tensor) -> Tensor:
        """Return the data that a tensor has outside of `on_device`, wherever the tensor is at present."""
        return self._moved[id(holder)][1] if id(holder) in self._moved else holder.data

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the device if they are weights or buffers of this model, or were offloaded. Call this inside
        `on_device`. Modules are moved when they are called, but models also read weights of modules that they do not
        call."""
        if self.device.type == "cpu":
            return
        touched = list(tensors)
        for tensor in touched:
            if id(tensor) in self._own and tensor.device != self.device:
                self._move([tensor])
        if self.offloader is not None:
            self.offloader.reach(touched)

    def within_reach(self) -> AbstractContextManager[object]:
        """Return a context in which any tensor that a torch function is given is first moved to the device."""
        return nullcontext() if self.device.type == "cpu" else TouchMode(self.reach)

    def _bring(self, path: str, *, recurse: bool) -> None:
        if (path, recurse) not in self._held:
            module = self.model.module.get_submodule(path)
            self._held[path, recurse] = dict(module.named_parameters(path, recurse=recurse)), [*module.buffers(recurse)]
        named, buffers = self._held[path, recurse]
        self._move([*named.values(), *buffers])
        new = {name: x for name, x in named.items() if id(x) not in self._read}
        self._read.update(map(id, new.values()))
        self.bytes_read += sum(self._home(x).nbytes for x in new.values())
        # a head is only read to measure the effect of drift on the outputs
        self._check({name: x for name, x in new.items() if id(x) in self._needed and x.is_floating_point()})

    def _check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise NumericsError if a parameter holds NaN or infinity."""
        for name, parameter in parameters.items():
            here = self._here.get(id(parameter))
            value = float(find_largest(parameter) if here is None else here.largest)
            if not isfinite(value):
                raise self._broken(f"NaN or infinity in {name}")
            if value > HUGE:
                self._huge = f"a weight of {value:.3g} in {name}, which is too large to compute with"

    def check_no_huge_weight(self) -> None:
        """Raise NumericsError if a weight that has been read is too large to compute with. Call this if some numbers
        were not finite: often the activations after such a weight make its products harmless."""
        if self._huge:
            raise self._broken(self._huge)

    def _broken(self, held: str) -> NumericsError:
        fix = "use another checkpoint; this one is broken"
        return NumericsError(f"{self.model.role} has {held}", where=self.model.snapshot.name, fix=fix)

    def _dtype_of(self, holder: Tensor) -> torch.dtype:
        """Return the dtype that a tensor has while it is on the device."""
        computes = isinstance(holder, nn.Parameter) and holder.is_floating_point()
        return self.dtype if computes else holder.dtype

    def _wanted(self, holder: Tensor) -> Wanted:
        """Describe what a tensor is to be on the device. Its values are checked when this model first reads it."""
        return self._home(holder), self._dtype_of(holder), id(holder) not in self._read

    def _move(self, holders: Iterable[Tensor]) -> None:
        """Move the data of tensors to the device unless it is there already."""
        moving = [x for x in holders if x.device != self.device or x.dtype != self._dtype_of(x)]
        wanted = list(map(self._wanted, moving))
        if self._weights is None or not moving:
            taken: Sequence[DeviceWeight | None] = [None] * len(moving)
        else:
            taken = self._weights.take(wanted)
            for upload in self._uploads:  # what was taken leaves the device with its last user
                upload[:] = [weight for weight in upload if weight.upload is not None]
        for holder, (home, dtype, _), here in zip(moving, wanted, taken, strict=True):
            self._moved[id(holder)] = (holder, home)
            if here is None or here.data is None:
                holder.data = home.to(self.device, dtype)
            else:
                holder.data, self._here[id(holder)] = here.data, here

    def _install(self) -> None:
        """Install hooks that make blocks pause, and that move modules outside of blocks to the device when they are
        called. Each such module is moved with everything inside it, as long as that contains no block."""
        around = {name[:end] for name in self._blocks for end, letter in enumerate(name) if letter == "."} | {""}
        for name, module in self.model.module.named_modules():
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and name.rpartition(".")[0] in around:
                around.add(name)  # nobody calls a list: what is in it is called
            if name in self._blocks:
                module.forward = _pausing(name, module.forward)
                self._undo.callback(module.__dict__.pop, "forward")
            elif name in around or name.rpartition(".")[0] in around:
                hook = partial(self._bring_called, name, name not in around)
                self._undo.callback(module.register_forward_pre_hook(hook).remove)

    def _bring_called(self, name: str, recurse: bool, *_: object) -> None:
        if self._is_open:
            with torch._C.DisableTorchFunction():  # what is brought is not touched
                self._bring(name, recurse=recurse)


def _separate_tokens(_: nn.Module, __: Any, output: Any) -> None:
    """Give logits [B, length], one for each token, the shape [B, length, 1] that other heads for tokens give them."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim == 2:
        output.logits = logits[..., None]


def _pausing(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's forward so that, inside a paused pass, it yields its arguments and waits to be given the block's
    output."""

    def paused(*args: Any, **kwargs: Any) -> Any:
        # no frame of a pass may hold the pass: dropped, it would never be freed
        runs_in = getcurrent().parent if getattr(getcurrent(), "pauses", False) else None
        return forward(*args, **kwargs) if runs_in is None else runs_in.switch(BlockCall(name, args, kwargs))

    return paused
