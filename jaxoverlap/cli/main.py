"""The `jaxoverlap` command. Starting it imports no jax: help comes at once."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxoverlap import __version__
from jaxoverlap.cli.batch import batch
from jaxoverlap.cli.command import as_command
from jaxoverlap.cli.generate import generate
from jaxoverlap.cli.serve import serve

app = typer.Typer(
    name="jaxoverlap",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(as_command(serve))
app.command("generate")(as_command(generate))
app.command("batch")(as_command(batch))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxoverlap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """LLM inference in JAX, with the host's work hidden behind the device's."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
