"""Calls made at once, that an interrupt need not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def at_once(calls: list[Callable[[], Result]]) -> list[Result]:
    """The calls' results in their order. Raises the first's error once all have ended.

    By daemon threads: those of an executor are waited for at its end and at the interpreter's,
    so that Ctrl-C would show nothing until the last reply is there.
    """
    ended: queue.SimpleQueue[tuple[int, list[Result], Exception | None]] = queue.SimpleQueue()

    def run(index: int) -> None:
        try:
            ended.put((index, [calls[index]()], None))
        except Exception as error:  # noqa: BLE001  raised below, where the calls were made
            ended.put((index, [], error))

    for index in range(len(calls)):
        threading.Thread(target=run, args=(index,), daemon=True).start()
    found = sorted((ended.get() for _ in calls), key=lambda each: each[0])
    for _, _, error in found:
        if error is not None:
            raise error
    return [result for _, results, _ in found for result in results]
