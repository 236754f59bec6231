"""Device profiles with other figures, for tests that need a decision whatever is predicted."""

import dataclasses
from typing import Any

import pytest

from symjax_rewrite.cost import device_profiles
from symjax_rewrite.cost.device_profiles import CPU, Device


def changed(device: Device = CPU, /, **groups: dict[str, Any]) -> Device:
    """A profile with some figures of some groups changed: `changed(margins={"fold": 0.0})`."""
    parts = {g: dataclasses.replace(getattr(device, g), **new) for g, new in groups.items()}
    return dataclasses.replace(device, **parts)


def use_on_cpu(monkeypatch: pytest.MonkeyPatch, **groups: dict[str, Any]) -> Device:
    """Let the CPU's profile have other figures during a test."""
    device = changed(device_profiles.DEVICES["cpu"], **groups)
    monkeypatch.setitem(device_profiles.DEVICES, "cpu", device)
    return device
