"""`jaxoverlap serve`: the gRPC service."""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.options import EngineOptions, given
from jaxoverlap.errors import JaxOverlapError

if TYPE_CHECKING:
    from jaxoverlap.server.address import Address

logger = logging.getLogger(__name__)

DEFAULT_MAX_QUEUE = 1024

_network = functools.partial(typer.Option, rich_help_panel="Network", show_default=False)
_security = functools.partial(typer.Option, rich_help_panel="Security", show_default=False)
_limits = functools.partial(typer.Option, rich_help_panel="Limits", show_default=False)
_operation = functools.partial(typer.Option, rich_help_panel="Operation", show_default=False)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Fields of `ServerConfig`; None leaves one at its default. So do the next three groups."""

    listen: Annotated[
        str | None, _network(metavar="HOST:PORT|unix:PATH", help="Port 0 takes a free one. Default: 127.0.0.1:50051.")
    ] = None
    admin_listen: Annotated[
        str | None,
        _network(
            metavar="HOST:PORT|unix:PATH", help="The admin service's own address. Default: together with the rest."
        ),
    ] = None
    frontends: Annotated[
        int | None, _network(help="Processes that speak with callers, and share the port. Default: 1.")
    ] = None
    served_name: Annotated[
        str | None, _network(help="What callers may call the model. Default: the model's own name.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    tls_cert: Annotated[
        str | None, _security(metavar="FILE", help="Certificate chain, PEM. Read again when it changes.")
    ] = None
    tls_key: Annotated[str | None, _security(metavar="FILE", help="Its key, PEM.")] = None
    tls_client_ca: Annotated[
        str | None, _security(metavar="FILE", help="Mutual TLS: callers need a certificate that this one has signed.")
    ] = None
    token_file: Annotated[
        str | None,
        _security(metavar="FILE", help="Bearer tokens, one a line; callers need one. Read again when it changes."),
    ] = None
    admin_token_file: Annotated[
        str | None,
        _security(
            metavar="FILE",
            help="Those of the admin service. Without it, that is for this machine only, and closed if there is a "
            "--token-file.",
        ),
    ] = None
    insecure: Annotated[
        bool | None, _security("--insecure", help="Listen without TLS where other machines can reach it.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    max_streams: Annotated[
        int | None, _limits(help="Open calls in a front end at most; more are refused. Default: 2048.")
    ] = None
    max_streams_per_connection: Annotated[int | None, _limits(help="The same of one connection. Default: 1024.")] = None
    max_prompt_tokens: Annotated[int | None, _limits(help="Of one prompt. Default: what the context holds.")] = None
    max_output_tokens: Annotated[int | None, _limits(help="Of one answer. Default: what the context holds.")] = None
    max_message_mib: Annotated[float | None, _limits(help="Of one message, either way. Default: 64.")] = None
    max_backlog_kib: Annotated[
        float | None, _limits(help="What may wait for a stream's reader before the stream is ended. Default: 1024.")
    ] = None
    reader_timeout: Annotated[
        float | None, _limits(help="Seconds a stream's reader may take for a message. Default: 60.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OperationOptions:
    grace: Annotated[
        float | None, _operation(help="Seconds that running calls get to finish after SIGTERM. Default: 30.")
    ] = None
    stall_timeout: Annotated[
        float | None,
        _operation(help="Seconds without a step, with work to do, after which health says NOT_SERVING. Default: 30."),
    ] = None
    profile_dir: Annotated[
        str | None, _operation(metavar="FOLDER", help="Where the admin service's profiles go. Default: none are made.")
    ] = None
    trace: command.TraceFile = None
    metrics_port: Annotated[
        int | None,
        _operation(
            help="Prometheus metrics at http://--metrics-host:PORT/metrics. 0 takes a free port. Default: none."
        ),
    ] = None
    metrics_host: Annotated[
        str | None, _operation(help="Where that port is, for everyone who can reach it. Default: 127.0.0.1.")
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        _operation(metavar="URL", help="OpenTelemetry traces go there, by OTLP over HTTP. Needs the extra otel."),
    ] = None
    log_level: Annotated[
        str | None, _operation(metavar="debug|info|warning|error", help="Of the log on standard error. Default: info.")
    ] = None
    log_format: Annotated[
        str | None, _operation(metavar="text|json", help="json: an object a line, with request ids. Default: text.")
    ] = None
    in_process: Annotated[bool | None, _operation("--in-process", help="Everything in one process, for debugging.")] = (
        None
    )


def serve(
    *,
    engine: EngineOptions,
    network: NetworkOptions,
    security: SecurityOptions,
    limits: LimitOptions,
    operation: OperationOptions,
) -> int:
    """Serve a model over gRPC: jaxoverlap.v1.GenerateService and AdminService, health and reflection.

    When it takes calls it prints one line with the address. SIGTERM or Ctrl-C lets running calls finish, within
    --grace; a second one ends them. docs/operations.md says more.

    Exit codes: 0 stopped by a signal, 2 it could not start or go on.
    """
    if operation.log_format != "json":
        return _serve(engine, network, security, limits, operation)
    from jaxoverlap.observe.logs import log_to_stderr

    log_to_stderr("server", "info", "json")  # until the settings are known to be right
    try:
        return _serve(engine, network, security, limits, operation)
    except BrokenPipeError:
        raise
    except (command.CommandError, JaxOverlapError, OSError) as error:
        logger.error("%s", error)
        return command.FAILED


def _serve(
    engine: EngineOptions,
    network: NetworkOptions,
    security: SecurityOptions,
    limits: LimitOptions,
    operation: OperationOptions,
) -> int:
    from jaxoverlap.engine.core_process import EngineSpec
    from jaxoverlap.observe.logs import log_to_stderr
    from jaxoverlap.server.config import ServerConfig
    from jaxoverlap.server.serve import serve as run

    config = ServerConfig(**given(network), **given(security), **given(limits), **given(operation))
    log_to_stderr("server", config.log_level, config.log_format)
    spec = EngineSpec(
        builder=BUILDER,
        config=engine.settings(max_queue=DEFAULT_MAX_QUEUE, **command.watchdog_defaults()),
        profile_dir=config.profile_dir,
        progress="jaxoverlap.display:track_warm_up" if sys.stderr.isatty() else None,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    try:
        run(config, spec, _say_ready)
    except BaseException as error:
        if config.in_process:
            if config.log_format == "json":
                logger.error("%s", error)
            else:
                command.say(f"error: {error}")
            os._exit(command.FAILED)
        raise
    if config.in_process:  # its thread may still compile
        os._exit(command.OK)
    return command.OK


BUILDER = "jaxoverlap.engine.build:build_engine"
"""What the engine's process calls; tests have one of their own."""


def _say_ready(model: str, address: Address) -> None:
    print(f"serving {model} at {address}", flush=True)
