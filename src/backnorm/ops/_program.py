"""What a call does on the CPU, as whole numbers: kernels, their arguments, and where addresses are to be put in.

A program is made once for a plan and knows no addresses; it is run with one for each of its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WORKSPACE = "workspace"


class Place(NamedTuple):
    """An address that is known when the program runs: bytes from the start of a tensor or of the workspace."""

    name: str
    offset: int

    def __add__(self, more: Any) -> Place:
        return Place(self.name, self.offset + int(more))


class Program:
    def __init__(self, names: Sequence[str]) -> None:
        self._slots = {name: slot for slot, name in enumerate((WORKSPACE, *names))}
        self._words: list[int] = []
        self._relocations: list[tuple[int, int]] = []
        self._jobs: list[tuple[int, int, int, int, int, bool]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def job(self, kernel: int, tasks: int, elements: int, *arguments: int | Place) -> None:
        """Run the tasks of a kernel, after those of the job before. `elements` tell how much work they are together."""
        self.run(kernel, self.arguments(*arguments), 0, tasks, elements)

    def run(self, kernel: int, arguments: int, first: int, last: int, elements: int, backwards: bool = False) -> None:
        """The same for some of the tasks only, with arguments that several jobs share. Each thread does its tasks
        from the last to the first if `backwards`: what it read last in the job before, its caches have still."""
        self._jobs.append((kernel, first, last, elements, arguments, backwards))

    def arguments(self, *arguments: int | Place) -> int:
        """Where a kernel finds its arguments."""
        start = len(self._words)
        for argument in arguments:
            if isinstance(argument, Place):
                self._relocations.append((len(self._words), self._slots[argument.name]))
                argument = argument.offset
            self._words.append(int(argument))
        return start

    def code(self) -> Code:
        """The numbers as native code reads them."""
        numbers = [len(self._words), len(self._relocations), len(self._jobs), *self._words]
        for relocation in self._relocations:
            numbers += relocation
        for job in self._jobs:
            numbers += job
        memory = np.array(numbers, np.int64)
        largest = max((elements for _, first, last, elements, *_ in self._jobs if last - first > 1), default=0)
        return Code(memory.ctypes.data, len(self._slots) + len(self._words), largest, memory)


class Code(NamedTuple):
    """A finished program: where its numbers are, how many of a thread's own it needs to run, and the elements of its
    largest job that can be divided."""

    address: int
    words: int
    elements: int
    memory: Any
