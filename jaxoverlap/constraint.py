"""What a grammar is to the engine: something that says, token by token, what may come next.

The rules, for who calls:

- The mask of a step is filled after every earlier token of the request has been committed, so a constraint has seen
  exactly the committed ids. A preempted request keeps its constraint.
- `advance` is told each committed token once, in order, but for one that ends the request by itself. After it is known
  whether the request goes on: if `error` is set, it ends with that error; if `is_complete`, it ends as asked; else
  there is a mask with an id in it.
- Nothing here raises for what a grammar or a model does, and no id is allowed once a constraint is complete or in
  error: there is no way to an unconstrained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from jaxoverlap.sampling_params import SamplingParams


class TokenConstraint(Protocol):
    """One sequence's place in its grammar.

    Attributes:
      is_complete: nothing more may follow.
      error: a dead end or a fault inside, which ends the request; None while all is well.
    """

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def fill_mask(self, out: np.ndarray) -> None:
        """Sets bit i % 32 of word i // 32 where id i may come, and clears the others: int32 [ceil(V / 32)]."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes a committed token that does not end the request by itself."""
        ...


class CompiledConstraint(Protocol):
    """What a request's text must be, compiled; each of its samples starts from here."""

    def behind(self, prompt_ids: Sequence[int] | np.ndarray) -> CompiledConstraint:
        """The same for this prompt, on which it may depend what the first token adds to the text. Without it, a
        prompt with some text is taken for granted."""
        ...

    def start(self) -> TokenConstraint:
        """A constraint of its own at the beginning of a text; takes microseconds."""
        ...


class ConstraintCompiler(Protocol):
    """Compiles what requests ask for; may be called from any thread."""

    def submit(self, sampling: SamplingParams) -> Future[CompiledConstraint]:
        """Compiles ``sampling.structured_output``, for these parameters; does not block.

        The future raises `InvalidRequestError` for a structure that is wrong, unsatisfiable or too complex,
        `EngineError` if there is no way to compile it, and nothing else.
        """
        ...

    def close(self) -> None:
        """Lets go of threads and processes; what is being compiled fails."""
        ...
