"""Run every notebook on the devices that a user has: simulated ones are for the tests."""

import os
import re
from collections.abc import Generator
from unittest import mock

import pytest

DEVICES = r"--xla_force_host_platform_device_count=\d+"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Start the kernel of a notebook without the simulated devices of `tests/conftest.py`."""
    flags = re.sub(DEVICES, "", os.environ.get("XLA_FLAGS", "")).strip()
    with mock.patch.dict(os.environ, XLA_FLAGS=flags):
        yield
