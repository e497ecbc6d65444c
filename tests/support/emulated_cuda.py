"""A CUDA device for a torch that was built without one; emulated_cuda.cpp says what it is strict about.

`install()` changes torch for the whole process, so tests that need it run in processes of their own: `pytest -m cuda`.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "emulated_cuda_native"
FLAGS = ["-O1", "-g0", "-w"]


def build() -> ModuleType:
    """The compiled part, made where it is not in the user's cache yet, which takes a minute.

    Raises RuntimeError or OSError where that cannot be done.
    """
    from torch.utils import cpp_extension

    if torch.backends.cuda.is_built():
        raise RuntimeError("this torch has CUDA of its own")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "featcal-tests" / f"emulated-cuda-{torch.__version__}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "1")
    built = folder / f"{NAME}.so"
    with (folder / "taken").open("w") as taken:
        # the system lets it go when whoever builds is ended, and torch's own lock stays
        fcntl.flock(taken, fcntl.LOCK_EX)
        if not built.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as build_folder:
                source, load = shutil.copy(SOURCE, build_folder), cpp_extension.load
                module: ModuleType = load(NAME, [source], build_directory=build_folder, extra_cflags=FLAGS)
                (Path(build_folder) / built.name).replace(built)
                return module
    spec = importlib.util.spec_from_file_location(NAME, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install() -> ModuleType:
    """Let `torch.cuda` be the emulated device; returns its counters and limits. Raises as `build` does."""
    native = build()
    cuda: Any = torch.cuda
    for name, answer in {
        "init": None, "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1,
        "current_device": 0, "set_device": None, "get_device_name": "emulated", "get_device_capability": (9, 0),
        "empty_cache": None, "is_bf16_supported": True, "manual_seed": None, "manual_seed_all": None,
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, answer=answer: answer)
    cuda.get_device_properties = lambda *_: SimpleNamespace(name="emulated", total_memory=native.limit())
    cuda.mem_get_info = lambda *_: (native.limit() - native.taken(), native.limit())
    cuda.memory_allocated = lambda *_: native.taken()
    cuda.max_memory_allocated = lambda *_: native.peak()
    cuda.synchronize = lambda *_: native.synchronize()
    cuda.current_stream = lambda *_: torch.Stream(stream_id=native.current_stream(), device_index=0, device_type=1)
    cuda.Stream, cuda.device = _Stream, contextlib.nullcontext

    @contextlib.contextmanager
    def use_stream(stream: torch.Stream) -> Any:
        before = native.exchange_stream(stream.stream_id)
        try:
            yield stream
        finally:
            native.exchange_stream(before)

    cuda.stream = use_stream
    _pin(native)
    return native


def tell_place() -> str:
    """The innermost lines of featcal and of transformers that are being run."""
    frame, places = sys._getframe(), []
    while frame := frame.f_back:  # type: ignore[assignment]
        name = frame.f_code.co_filename
        if "featcal_cli" in name or "transformers" in name:
            places.append(f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}")
    return ", ".join(places[:3])


class _Stream(torch.Stream):
    """A type, as others annotate with it."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return torch.Stream(device=torch.device("cuda", 0))


def _pin(native: ModuleType) -> None:
    """torch asked for its CUDA hooks when it was imported, and remembers that nothing can be pinned."""
    empty = torch.empty
    _device_constructors()  # which of them `with torch.device(…)` is for is looked up once: this one too

    def empty_or_pinned(*size: Any, pin_memory: bool = False, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
        if not pin_memory:
            return empty(*size, dtype=dtype, **more)
        shape = list(size) if isinstance(size[0], int) else list(size[0])
        pinned: Tensor = native.empty_pinned(shape, dtype or torch.get_default_dtype())
        return pinned

    tensor: Any = torch.Tensor
    torch.empty = empty_or_pinned  # type: ignore[assignment]
    tensor.pin_memory = lambda self, *_: native.empty_pinned(list(self.shape), self.dtype).copy_(self)
    tensor.is_pinned = lambda self, *_: native.is_pinned(self)
