"""Commands that speak with a server: how it is reached, and what stands in for the engine in this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from jaxoverlap.cli.command import CommandError
from jaxoverlap.cli.options import EngineOptions, given
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.outputs import RequestOutput, StreamDelta
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.client import Client

TARGET_VARIABLE, DEFAULT_TARGET = "JAXOVERLAP_TARGET", "127.0.0.1:50051"

_connection = functools.partial(typer.Option, rich_help_panel="Connection", show_default=False)
_file = functools.partial(_connection, metavar="FILE")


class Answering(Protocol):
    """What `LLM` and `Client` have in common, as far as commands go."""

    def generate(
        self, prompts: list[Prompt], sampling_params: SamplingParams, options: RequestOptions
    ) -> list[RequestOutput]: ...

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams, options: RequestOptions
    ) -> Iterator[StreamDelta]: ...

    def generate_each(
        self, inputs: Iterable[tuple[Prompt, SamplingParams, RequestOptions] | None]
    ) -> Iterator[tuple[int, RequestOutput | JaxOverlapError]]: ...


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Fields of `ClientConfig`, with files where it has their contents; None leaves one at its default."""

    token_file: Annotated[
        str | None, _file(envvar="JAXOVERLAP_TOKEN_FILE", help="Has the bearer token to send, in one line.")
    ] = None
    allow_plaintext_token: Annotated[
        bool, _connection("--allow-plaintext-token", help="Send it to another machine without TLS.")
    ] = False
    tls: Annotated[
        bool, _connection("--tls", help="Encrypted. Implied by any of the certificates; trusts the system's roots.")
    ] = False
    root_certificates: Annotated[str | None, _file(help="Whom to trust instead, PEM.")] = None
    client_certificate: Annotated[str | None, _file(help="Who we are, PEM, for a server that asks.")] = None
    client_key: Annotated[str | None, _file(help="Its key, PEM.")] = None
    server_name: Annotated[
        str | None, _connection(metavar="NAME", help="The name in the server's certificate, if it is another one.")
    ] = None
    max_retries: Annotated[
        int | None,
        _connection(
            help="Tries after the first, where trying again is safe. Default: 4, for batch 10 (half a minute)."
        ),
    ] = None
    concurrency: Annotated[
        int | None, _connection(help="Requests at the server at once. Default: 64, for generate 32.")
    ] = None
    max_message_mib: Annotated[float | None, _connection(help="Of one message, either way. Default: 64.")] = None

    @contextmanager
    def client(
        self, target: str, *, progress: bool | None, model: str | None = None, **defaults: Any
    ) -> Iterator[Client]:
        """A client of the server at `target`. Its arguments are those of `Client`: what was given, else `defaults`.

        Raises:
          CommandError, ConfigError: settings that can't be, or a file that can't be read.
        """
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported
        from jaxoverlap.client import Client

        settings = {name: value for name, value in (defaults | given(self)).items() if value is not False}
        if "token_file" in settings:
            settings["token"] = _read_token(settings.pop("token_file"))
        with Client(target, progress=progress, model=model or "", **settings) as client:
            yield client

    def check_unused(self) -> None:
        """Raises CommandError if anything was given, although no server is."""
        for name, value in given(self).items():
            if value is not False and not (name == "token_file" and os.environ.get("JAXOVERLAP_TOKEN_FILE") == value):
                raise CommandError(f"--{name.replace('_', '-')} is for a server; name it with --server")


def server_model(engine: EngineOptions) -> str | None:
    """With --server, --model is the served model's name, and the server has its own engine.

    Raises:
      CommandError: any other of the engine's options was given.
    """
    for name in given(engine):
        if name != "model":
            raise CommandError(
                f"--{name.replace('_', '-')} is for an engine in this process, not for one behind --server"
            )
    return engine.model


def _read_token(path: str) -> str:
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"token_file: {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    if len(lines) != 1:
        raise CommandError(f"token_file: {path}: one line with a token is needed, there are {len(lines)}")
    return lines[0]
