"""What a grammar is to the engine: something that says, token by token, what may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TokenConstraint(Protocol):
    """One request's place in its grammar. It sees exactly the committed tokens, in order.

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
