"""The one exception this package defines. Wrong shapes and dtypes raise ValueError."""

IMPLEMENTATIONS = ("xla", "triton", "mosaic")


class ImplementationNotAvailable(NotImplementedError):
    """A known implementation that the installed jax is too old for."""
