"""`jaxoverlap trace`: a recorded timeline as a page to look at, and as a picture."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxoverlap.cli import command
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.figures import HOW_TO_GET, can_plot, save
from jaxoverlap.observe.trace_page import to_page
from jaxoverlap.observe.trace_picture import to_figure

PICTURES = (".svg", ".png", ".pdf")


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
        page = to_page(_read(trace))
    except ValueError as error:
        raise command.CommandError(f"{trace}: {error}") from error
    path = output or _stem(trace) + ".html"
    command.write_text(path, page)
    command.print_path(path)
    return command.OK


def picture(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE…", help="One below the other, at the same scale.")],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=command.writable, help="By its name an SVG, a PNG or a PDF."
        ),
    ] = "trace.svg",
    start_ms: Annotated[
        float,
        typer.Option(min=0, callback=command.finite, help="Where the picture begins, from the first step on."),
    ] = 0,
    length_ms: Annotated[float, typer.Option(min=0.001, callback=command.finite, help="What it shows.")] = 1000,
) -> int:
    """Draw a window of traces: the host's lane above the device's, and between them, red, what nothing hid.

    Needs matplotlib: pip install 'jaxoverlap[plots]'.
    """
    if not output.lower().endswith(PICTURES):
        raise command.CommandError(
            f"--output: {output!r} is not allowed; use a name that ends in {', '.join(PICTURES)}"
        )
    if not can_plot():
        raise command.CommandError(HOW_TO_GET)
    try:
        figure = to_figure({_stem(path): _read(path) for path in traces}, start_ms=start_ms, length_ms=length_ms)
        save(figure, output)
    except ValueError as error:
        raise command.CommandError(str(error)) from error
    except OSError as error:
        raise command.CommandError(f"{output}: {error.strerror or error}") from error
    command.print_path(output)
    return command.OK


def _stem(path: str) -> str:
    return path.removesuffix(".gz").removesuffix(".json")


def _read(path: str) -> dict[str, Any]:
    try:
        return trace_file.read(path)
    except (OSError, ValueError) as error:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise command.CommandError(text if text.startswith(path) else f"{path}: {text}") from error


app = typer.Typer(no_args_is_help=True, help="Look at what --trace has recorded.")
app.command("view")(command.as_command(view))
app.command("picture")(command.as_command(picture))
