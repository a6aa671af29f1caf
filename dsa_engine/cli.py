"""The ``dsa-engine`` command."""

from __future__ import annotations

from dsa_engine.system.interrupts import ending_at_once

with ending_at_once():
    from dsa_engine.arguments import Parser, run
    from dsa_engine.commands import chat, env, generate, info
    from dsa_engine.commands.bench import command as bench
    from dsa_engine.commands.doctor import command as doctor
    from dsa_engine.commands.planner import command as plan
    from dsa_engine.version import __version__


def main(argv: list[str] | None = None) -> None:
    """Entry point of the installed command and of ``python -m dsa_engine``."""

    def parsed() -> None:
        args = _parser().parse_args(argv)
        args.command(args)

    run(parsed)


def _parser() -> Parser:
    parser = Parser(prog="dsa-engine", description="Generates, measures, and says what a model needs.")
    parser.add_argument("--version", action="version", version=f"dsa_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, module, command in (
        ("generate", "generate from a prompt and print the text as it comes", generate, generate.run_generate),
        ("chat", "a conversation on the terminal", chat, chat.run_chat),
        ("info", "parameters, bytes per dtype, cache bytes per token, and what fits", info, info.run_info),
        ("plan", "which cut over which devices, and what to expect: TTFT, TPOT, rates, limits", plan, plan.run_plan),
        ("env", "versions, devices and paths, as a report of a fault needs them", env, env.run_env),
        ("doctor", "whether this machine runs the engine, and runs it right", doctor, doctor.run_doctor),
        ("bench", "measure prefill, time to first token, time per output token", bench, None),
    ):
        one = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        one.set_defaults(command=command)
        module.add_arguments(one)
    return parser


if __name__ == "__main__":
    main()
