"""The emulated device says what a real one would only show now and then."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from featcal_cli.engine import weight_uploads

ROWS = torch.arange(20.0).view(4, 5)


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


def test_weights_used_last_stay_as_far_as_there_is_room(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_uploads, "room_for_weights", lambda _: 2 * ROWS.nbytes)
    weights = weight_uploads.DeviceWeights(torch.device("cuda", 0))
    homes, before = [ROWS + number for number in range(3)], torch.cuda.memory_allocated()

    def use(number: int) -> int:
        """Bytes that go up for it."""
        begun = device.counts().get("bytes up", 0)
        (taken,) = weights.take([(homes[number], torch.float32, False)])
        assert taken is not None and taken.data is not None and torch.equal(taken.data.cpu(), homes[number])
        return int(device.counts()["bytes up"] - begun)

    assert [use(number) for number in (0, 1, 0, 2, 0, 1)] == [ROWS.nbytes * up for up in (1, 1, 0, 1, 0, 1)]
    large = torch.ones(4, ROWS.numel())
    (taken,) = weights.take([(large, torch.float32, False)])
    assert taken is not None and torch.cuda.memory_allocated() - before == large.nbytes
    del taken
    weights.drop()
    assert torch.cuda.memory_allocated() == before
    assert use(0) == ROWS.nbytes
    weights.drop()
    assert not device.faults()
