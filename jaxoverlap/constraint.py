"""What the engine asks of a request's structured output; how a grammar does it is the business of `text.grammar`.

The rules, for who calls:

- The mask of a step is filled after every earlier token of the request has been committed, so a constraint has seen
  exactly the committed ids. A preempted request keeps its constraint.
- `advance` is told each committed token once, in order, the one that ends the request included. Then it is known
  whether the request goes on: if `error` is set, it ends with that error; if `is_complete`, it ends as asked; else
  there is a mask with an id in it.
- Nothing here raises for what a grammar or a model does, and no id is allowed once a constraint is complete or in
  error: there is no way to an unconstrained token.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import numpy as np

from jaxoverlap.sampling_params import SamplingParams


class TokenConstraint(Protocol):
    """One sequence's.

    Attributes:
      is_complete: nothing more may follow.
      error: why the sequence can't go on (a dead end, or a fault), else None.
    """

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def fill_mask(self, out: np.ndarray) -> None:
        """Which ids may come next, into int32 [ceil(V/32)]: id i is bit ``i % 32`` of word ``i // 32``."""

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""


class ConstraintCompiler(Protocol):
    """Makes constraints; may be called from any thread."""

    def submit(self, sampling: SamplingParams) -> Future[TokenConstraint]:
        """A new constraint for ``sampling.structured_output``, once it is compiled; does not block.

        The future raises `InvalidRequestError` for a structure that is wrong, unsatisfiable or too complex.
        """

    def close(self) -> None:
        """Lets go of threads and processes; what is being compiled is cancelled."""
