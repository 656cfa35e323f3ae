"""`up`: a whole site in one process. `arbiter`, `node-agent`, `app-agent`: one daemon each, from one TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, get_args

import typer
from msgspec.structs import replace

from arbiter.core.seam import DEFAULT_POLICY
from launch import completion
from launch.faults import usage
from launch.surface import answering
from launch.web import check_libraries
from protocol import exit_codes
from protocol.messages import Sharing

LOG_LEVELS = ("debug", "info", "warning", "error")
Config = Annotated[Path, typer.Option("--config", "-c", help="the daemon's TOML file, see docs/operations.md")]
AdoptSite = Annotated[
    bool, typer.Option("--adopt-site", help="for one start, after the journal was lost: take over the site there is")
]
LogLevel = Annotated[str, typer.Option(autocompletion=completion.one_of(LOG_LEVELS), help=", ".join(LOG_LEVELS))]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(up)
    app.command()(arbiter)
    app.command("node-agent")(node_agent)
    app.command("app-agent")(app_agent)
    app.command()(gateway)
    app.command()(launcher)


def up(
    gpus: Annotated[
        str,
        typer.Option(
            autocompletion=completion.one_of(("simulated:4", "nvml")),
            help="simulated:N per node; nvml for this host's real GPUs, 0,2 for some of them",
        ),
    ] = "simulated:4",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="nodes to pretend to be (1 with nvml)")] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.policy,
            help=f"the policy that grants GPUs: see docs/policies.md  [default: {DEFAULT_POLICY}]",
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.sharing,
            help="exclusive, timeslice or pack: see docs/sharing.md  [default: exclusive]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="an arbiter's TOML file: [arbiter], [policy...], `history` and `adopt_site`"
        ),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="where the state is kept between runs")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="start without old state, and remove it at the end")] = False,
    web: Annotated[bool, typer.Option("--web", help="also show the site in a browser; prints the address")] = False,
    adopt_site: AdoptSite = False,
    log_level: LogLevel = "error",  # a person reads along, and the answers tell the rest
) -> None:
    """Start a whole site on this host: arbiter, node agents and app agent in one process. Ctrl-C stops it."""
    with answering(as_json=False):
        from arbiter.config import ArbiterConfig, load
        from arbiter.core.registry import POLICIES
        from launch.site import up as site
        from launch.site.service import faults

        _set_log_level(log_level)
        if web:
            check_libraries(traces=False)
        if not gpus.startswith("simulated") and nodes != 1:
            raise usage(f"--gpus {gpus} is this host, which is one node", "leave --nodes out")
        with faults():
            chosen = load(config) if config is not None else ArbiterConfig()
        settings = chosen.arbiter
        if policy is not None:
            settings = replace(settings, policy=_one_of("--policy", policy, sorted(POLICIES)))
        if sharing is not None:
            settings = replace(settings, sharing=_one_of("--sharing", sharing, get_args(Sharing)))
        site.run(
            site.Options(
                gpus=gpus if gpus.isidentifier() or ":" in gpus else tuple(gpus.split(",")),
                nodes=nodes,
                state_dir=state_dir,
                fresh=fresh,
                settings=settings,
                history=chosen.history,
                adopt_site=adopt_site or chosen.adopt_site,
                web=web,
            )
        )


def _one_of(option: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        nearest = get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise usage(f"{option} is {value!r}; it may be {', '.join(known)}", f"try {option} {nearest}")
    return value


def arbiter(
    config: Config,
    adopt_site: AdoptSite = False,
    log_level: LogLevel = "info",
) -> None:
    """Run the arbiter of a site; a site has one."""
    from arbiter.config import load
    from arbiter.daemon import run_arbiter
    from launch.buses import open_bus
    from launch.notify import feeder
    from launch.site.service import faults, serve

    with answering(as_json=False), faults():
        _set_log_level(log_level)
        chosen = load(config)
        chosen = replace(chosen, adopt_site=adopt_site or chosen.adopt_site)
        bus = open_bus(chosen.bus, file=chosen.bus_file, prefix=chosen.prefix)
        serve(lambda: (run_arbiter(chosen, bus, on_alive=feeder()),))


def node_agent(
    config: Config,
    adopt_site: Annotated[
        bool,
        typer.Option("--adopt-site", help="for one start: leave the former site, and obey the next that speaks"),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run this host's node agent. Ending it leaves training running; the next one adopts it."""
    from launch.buses import open_bus
    from launch.notify import feeder
    from launch.site.service import faults, serve
    from launch.site.site import bootstrap_dir
    from node_agent.config import load
    from node_agent.daemon import run_node_agent

    with answering(as_json=False), faults():
        _set_log_level(log_level)
        chosen = load(config)
        chosen = replace(
            chosen,
            bootstrap_dir=chosen.bootstrap_dir or str(bootstrap_dir()),
            adopt_site=adopt_site or chosen.adopt_site,
        )
        bus = open_bus(chosen.bus, file=chosen.bus_file, prefix=chosen.prefix)
        serve(lambda: (run_node_agent(chosen, bus, on_alive=feeder()),))


def app_agent(config: Config, log_level: LogLevel = "info") -> None:
    """Run an owner's app agent, which hosts every app the owner submits."""
    from app_agent.config import load
    from app_agent.daemon import run_app_host
    from launch.buses import open_bus
    from launch.notify import feeder
    from launch.site.service import faults, serve

    with answering(as_json=False), faults():
        _set_log_level(log_level)
        chosen = load(config)
        bus = open_bus(chosen.bus, file=chosen.bus_file, prefix=chosen.prefix)
        serve(lambda: (run_app_host(chosen, bus, on_alive=feeder()),))


def gateway(config: Config, log_level: LogLevel = "info") -> None:
    """Run a login host's gateway: all its users submit there, and it signs what they launch."""
    from app_agent.gateway import load, run_gateway
    from launch.buses import open_bus
    from launch.notify import feeder
    from launch.site.service import faults, serve

    with answering(as_json=False), faults():
        _set_log_level(log_level)
        chosen = load(config)
        bus = open_bus(chosen.bus, file=chosen.bus_file, prefix=chosen.prefix)
        serve(lambda: (run_gateway(chosen, bus, on_alive=feeder()),))


def launcher(config: Config) -> None:
    """Run this node's launcher, as root: it starts tasks as the users who submitted them through a gateway."""
    with answering(as_json=False):
        import app_agent
        from launch.faults import Fault
        from launch.notify import feeder
        from node_agent.launcher.config import load
        from node_agent.launcher.service import serve
        from protocol.config import ConfigError

        bootstrap = Path(app_agent.__file__).resolve().parent / "training/bootstrap"
        try:  # not by `launch.site`, which imports all daemons: this one is root
            chosen = load(config)
            chosen = replace(chosen, bootstrap_dir=chosen.bootstrap_dir or str(bootstrap))
            serve(chosen, on_alive=feeder())
        except ConfigError as error:
            raise Fault(str(error), code=exit_codes.USAGE) from error


def _set_log_level(level: str) -> None:
    if level not in LOG_LEVELS:
        raise usage(f"--log-level is {level!r}", f"choose one of {', '.join(LOG_LEVELS)}")
    from launch import log_lines

    log_lines.configure(level)
