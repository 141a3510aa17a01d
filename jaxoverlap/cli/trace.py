"""`jaxoverlap trace view`: a recorded timeline as a page to look at."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxoverlap.cli import command
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.trace_page import to_page


def view(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="What --trace or jaxoverlap client trace has written.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            show_default=False,
            callback=command.writable,
            help="Default: the trace's name, with .html.",
        ),
    ] = None,
) -> int:
    """Write a trace as one page of HTML that needs nothing else, and print its name.

    Above, what the trace comes to; below, the host's lane and the device's, to be zoomed and moved. Red is host time
    during which the device had nothing to do.
    """
    try:
        page = to_page(trace_file.read(trace))
    except ValueError as error:
        text = str(error)
        raise command.CommandError(text if text.startswith(trace) else f"{trace}: {text}") from error
    except OSError as error:
        raise command.CommandError(f"{trace}: {error.strerror or error}") from error
    path = output or trace.removesuffix(".gz").removesuffix(".json") + ".html"
    command.write_text(path, page)
    print(path)
    return command.OK


app = typer.Typer(no_args_is_help=True, help="Look at what --trace has recorded.")


@app.callback()
def _root() -> None:
    """Keeps `view` a command of its own, though it is the only one."""


app.command("view")(command.as_command(view))
