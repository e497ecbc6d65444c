"""The emulated device says what a real one would only show now and then."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

ROWS = torch.arange(20.0).view(4, 5)


def test_it_computes_what_the_cpu_computes(device: ModuleType) -> None:
    x = ROWS.to("cuda")
    assert x.device == torch.device("cuda", 0)
    assert torch.equal((x @ x.T + 1).cpu(), ROWS @ ROWS.T + 1)
    assert torch.equal(x[torch.tensor([0, 2])].cpu(), ROWS[[0, 2]])
    assert torch.equal(x[x[:, 0] > 5].cpu(), ROWS[2:])
    assert torch.histc(x.int(), bins=2, min=0, max=19).tolist() == [10, 10]
    assert torch.fft.fft(x).real.is_cuda
    assert not device.faults()


def test_operands_on_two_devices_are_refused(device: ModuleType) -> None:
    assert torch.equal((ROWS.to("cuda") + torch.tensor(2.0)).cpu(), ROWS + 2)  # a number of the host is none
    for other in (ROWS, ROWS.bool()):
        with pytest.raises(RuntimeError, match="same device"):
            ROWS.to("cuda") * other
    assert not device.faults()


def test_a_copy_is_not_there_before_somebody_waits(device: ModuleType) -> None:
    stream, here = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        copy = ROWS.pin_memory().to("cuda", non_blocking=True)
    assert copy.sum().isnan()
    assert "has not filled yet" in device.faults()[0]
    device.reset()
    here.wait_stream(stream)
    copy.record_stream(here)
    assert torch.equal(copy.cpu(), ROWS)
    assert not device.faults()


def test_what_the_device_has_waited_for_the_host_has_not(device: ModuleType) -> None:
    stream, here = torch.cuda.Stream(), torch.cuda.current_stream()
    rows, target = ROWS.to("cuda"), torch.empty(ROWS.shape, pin_memory=True)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        target.copy_(rows, non_blocking=True)
    here.wait_stream(stream)
    assert target.isnan().all()
    assert torch.equal(target.to("cuda", non_blocking=True).cpu(), ROWS)  # the device sees it already
    stream.synchronize()
    assert torch.equal(target, ROWS)
    rows.record_stream(stream)
    assert not device.faults()


def test_copying_what_is_still_computed_is_a_fault(device: ModuleType) -> None:
    stream, rows = torch.cuda.Stream(), ROWS.to("cuda") * 2
    with torch.cuda.stream(stream):
        torch.empty(ROWS.shape, pin_memory=True).copy_(rows, non_blocking=True)
    assert "has not waited" in device.faults()[0]
    stream.synchronize()


def test_freeing_what_another_stream_may_use_is_a_fault(device: ModuleType) -> None:
    stream, here = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        copy = ROWS.pin_memory().to("cuda", non_blocking=True)
    here.wait_stream(stream)
    copy.add(1)
    del copy
    assert "record_stream" in device.faults()[0]


def test_memory_runs_out(device: ModuleType) -> None:
    limit, others = device.limit(), torch.cuda.memory_allocated()
    rows = torch.empty(1000, device="cuda")
    device.set_limit(others + 5000)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1000, device="cuda")
        del rows
        torch.empty(1000, device="cuda")
    finally:
        device.set_limit(limit)
