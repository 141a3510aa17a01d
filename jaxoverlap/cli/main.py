"""The `jaxoverlap` command. Starting it imports no jax: help comes at once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from jaxoverlap import __version__
from jaxoverlap.cli import client, trace
from jaxoverlap.cli.autotune import autotune
from jaxoverlap.cli.batch import batch
from jaxoverlap.cli.bench import bench
from jaxoverlap.cli.chat import chat
from jaxoverlap.cli.command import FAILED, as_command, exit_code, prepare_streams, say
from jaxoverlap.cli.generate import generate
from jaxoverlap.cli.inspect_step import inspect_step
from jaxoverlap.cli.serve import serve
from jaxoverlap.cli.simulate import simulate
from jaxoverlap.cli.top import top

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for arguments it can't understand; it has no public name there."""


class _Commands(typer.core.TyperGroup):
    """Says what is wrong with the arguments as everything else is said: in one line."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **settings: Any) -> Any:
        standalone = settings.pop("standalone_mode", True)
        try:
            main = functools.partial(super().main, args, prog_name, *rest, **{**settings, "standalone_mode": False})
            code = exit_code(main)
        except _UsageError as error:
            if not standalone:
                raise
            if type(error).__name__ != "NoArgsIsHelpError":  # the help has been shown, and says it all
                context = getattr(error, "ctx", None)
                message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
                say(f"error: {message}; see {context.command_path if context else 'jaxoverlap'} --help")
            sys.exit(FAILED)
        return sys.exit(code or 0) if standalone else code


app = typer.Typer(
    name="jaxoverlap",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(as_command(serve))
app.command("generate")(as_command(generate))
app.command("batch")(as_command(batch))
app.command("chat")(as_command(chat))
app.command("bench")(as_command(bench))
app.command("simulate")(as_command(simulate))
app.command("top")(as_command(top))
app.command("inspect-step")(as_command(inspect_step))
app.command("autotune")(as_command(autotune))
app.add_typer(client.app, name="client")
app.add_typer(trace.app, name="trace")


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
    prepare_streams()
    app()


if __name__ == "__main__":
    main()
