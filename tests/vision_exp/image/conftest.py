from __future__ import annotations

import logging

import native_image
import pytest

from vision_exp.image import backend
from vision_exp.image.pixels import PILLOW


@pytest.fixture(params=["pillow", "compiled"])
def each_backend(request, monkeypatch):
    """This process's backend: one of the two, then the other."""
    found = PILLOW if request.param == "pillow" else backend.warm_up()
    assert (request.param == "compiled") == found.resamples
    monkeypatch.setattr(backend, "_backend", found)
    return found


@pytest.fixture
def kernels():
    return backend.warm_up().kernels


@pytest.fixture
def log():
    """Messages of our logger. Not caplog: vLLM, where it is imported, keeps them from the root."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    backend.logger.addHandler(handler)
    yield messages
    backend.logger.removeHandler(handler)


@pytest.fixture(scope="session")
def native():
    return native_image.functions()
