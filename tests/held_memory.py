"""Tensors that begin anywhere, for kernels in Gluon that are stepped through on NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from backnorm.accuracy import excess
from backnorm.ops import _held
from backnorm.ops._launch import Launch, Pointer

from . import gluon_on_numpy

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: With views of shared memory, and with what newer versions of Triton have instead.
WAYS = {"views": gluon_on_numpy.Slots, "gathers": gluon_on_numpy.NewSlots}
#: Elements before and after a tensor; those before are a multiple of 16 bytes.
GUARD, UNTOUCHED = 32, 7.0


def load(module: ModuleType, way: str = "views", right: str = "", wrong: str = "") -> ModuleType:
    """A module of kernels, or (where it or its helpers have what is right) a wrong one."""
    helpers, source = (Path(str(m.__file__)).read_text(encoding="utf-8") for m in (_held, module))
    assert right in helpers or right in source
    held = gluon_on_numpy.load(helpers.replace(right, wrong), str(_held.__package__), WAYS[way])
    return gluon_on_numpy.load(source.replace(right, wrong), str(module.__package__), WAYS[way], _held=held)


class Large:
    """gradOut, input and the gradient of it, of so many rows: `gaps` elements between rows, `pasts` past a multiple of
    16 bytes. What lies around them must not count, and must not be written."""

    def __init__(
        self, dx: str, rows: int, length: int, dtype: str, gaps: tuple[int, int, int], pasts: tuple[int, int, int]
    ) -> None:
        self.dtype, self._dx, self._rows, self._length = dtype, dx, rows, length
        self._steps = dict(zip(("gradOut", "input", dx), (length + gap for gap in gaps)))
        self._starts = dict(zip(self._steps, (GUARD + past for past in pasts)))
        arounds = dict(zip(self._steps, (float("nan"), float("inf"), UNTOUCHED)))
        self._memory = {
            name: torch.full((start + rows * self._steps[name] + GUARD,), arounds[name], dtype=DTYPES[dtype])
            for name, start in self._starts.items()
        }
        self.views = {name: self._view(name, memory) for name, memory in self._memory.items()}
        for seed, name in enumerate(("gradOut", "input")):
            self.views[name].copy_(torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)))

    def _view(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        return memory[self._starts[name] :].as_strided((self._rows, self._length), (self._steps[name], 1))

    def launch(self, kernel: Any, launch: Launch, small: dict[str, torch.Tensor], partials: Any) -> None:
        """Fills the partials and the gradient's memory."""
        self._arrays = {
            name: (t.float() if t.dtype == torch.bfloat16 else t).reshape(-1).numpy()
            for name, t in {**self._memory, **small}.items()
        }
        arguments = []
        for argument in launch.arguments:
            if not isinstance(argument, Pointer):
                arguments.append(argument)
            elif argument.name in self._starts:
                array, start = self._arrays[argument.name], self._starts[argument.name]
                arguments.append(gluon_on_numpy.Memory(array, self.dtype, start))
            else:
                arguments.append(gluon_on_numpy.Memory(self._arrays.get(argument.name, partials), "float32"))
        gluon_on_numpy.launch(kernel, launch.grid[0], arguments, launch.constants, launch.num_warps)

    def judge(self, golden: Any, terms: Any, wanted: bool = True) -> None:
        written = torch.from_numpy(self._arrays[self._dx].copy())
        if wanted:
            view = self._view(self._dx, written)
            array = (
                view.numpy().copy().astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else written.numpy().dtype)
            )
            shape = (self._rows, self._length)
            assert excess(array, golden.reshape(shape), terms.reshape(shape)) <= 1
            view.fill_(UNTOUCHED)
        assert (written == UNTOUCHED).all()


def judge_sums(partials: Any, names: tuple[str, str], golden: Any, terms: Any) -> None:
    """Of partials [partial][2][column]."""
    for name, sums in zip(names, np.moveaxis(partials, 1, 0)):
        total = sums.sum(0, dtype=np.float64).astype(np.float32)
        assert excess(total, golden[name].reshape(total.shape), terms[name].reshape(total.shape)) <= 1, name
