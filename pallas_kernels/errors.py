"""The one exception this package defines. Wrong shapes and dtypes raise ValueError."""

IMPLEMENTATIONS = ("xla", "triton", "mosaic")


class ImplementationNotAvailable(NotImplementedError):
    """A known implementation that is not part of this build."""
