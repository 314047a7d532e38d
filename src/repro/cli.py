"""The ``repro`` command: one thin function per sub-command.

The one idea: a command parses its options, imports the room that does the work and
hands over.  Rooms are imported inside the functions, so ``repro --help`` and
``repro doctor`` answer at once, also where torch is missing or broken.

Errors that a user can act on end as ``error: <sentence>`` on stderr with exit code 2;
an interruption (Ctrl-C) ends with code 130 and says how to go on.  Programming mistakes
keep their traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from repro.errors import ReproError

#: Base of the parser's own errors (unknown option, missing argument), wherever the
#: installed Typer keeps it: newer releases carry their own copy of click.
_ParserError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

INTERRUPTED = 130


class OneSentenceGroup(TyperGroup):
    """A command group whose errors are one sentence, however it is started."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options before the sub-command."""
        try:
            return super().make_context(*args, **kwargs)
        except _ParserError as error:
            if not str(error):  # `repro` alone: the help text is shown
                raise
            _fail(_parser_sentence(error), 2)

    def invoke(self, ctx: Any) -> Any:
        """Run the sub-command; turn errors of the user's input into a sentence and a code."""
        try:
            return super().invoke(ctx)
        except ReproError as error:
            _fail(str(error), error.exit_code)
        except _ParserError as error:
            _fail(_parser_sentence(error), 2)
        except ModuleNotFoundError as error:
            package = (error.name or "repro").partition(".")[0]
            if package == "repro":
                raise
            _fail(f"Python package {package!r} is not installed: run `repro doctor`", 2)
        except KeyboardInterrupt:
            print(
                "\ninterrupted: finished points are kept; run the same command to go on",
                file=sys.stderr,
            )
            raise typer.Exit(INTERRUPTED) from None


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    raise typer.Exit(code) from None


def _parser_sentence(error: Any) -> str:
    sentence = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "repro"
    return f"{sentence}: see `{where} --help`"


app = typer.Typer(
    name="repro",
    cls=OneSentenceGroup,
    help="Measure and reproduce MoE expert precision that changes while serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _known(profile: str) -> str:
    """Option callback: ``profile`` if it exists; an unknown name fails before any work is done."""
    from repro import profiles

    return profiles.get(profile).name


def _known_source(source: str | None) -> str | None:
    """The same for where workloads come from."""
    from repro.workloads import list_workloads

    if source is not None:
        list_workloads(source)
    return source


ProfileOption = Annotated[
    str,
    typer.Option(
        help="Parameter set: tiny, public (test sets in a folder) or gpu.", callback=_known
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        help="Where workloads come from: embedded, folder or hub (profile's default).",
        callback=_known_source,
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Measure again what is recorded.")]


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Say what this machine can do and what is missing."""
    from repro import doctor

    raise typer.Exit(doctor.main(as_json=as_json))


@app.command()
def models() -> None:
    """List the bundled models and the known checkpoints."""
    from repro.models.catalog import format_models, list_models

    print(format_models(list_models()))


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Bundled name, folder or hub id.")],
    prompts: Annotated[
        Path, typer.Option(help="Your prompts: one a line, or JSON lines with prompt or text.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the calibration; a stopped run goes on.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    streamed: Annotated[
        bool, typer.Option("--streamed", help="One layer in memory at a time; no heads.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens read of a prompt.", min=1)] = 1024,
    n_blocks: Annotated[
        int, typer.Option(help="Blocks measured one by one for the heads; 0: no heads.", min=0)
    ] = 96,
    hessians: Annotated[
        bool, typer.Option("--hessians", help="Also what formats with -gptq need; large files.")
    ] = False,
) -> None:
    """Train sensitivities and prompt heads on your own prompts, before serving."""
    from repro.calibration.job import Options
    from repro.calibration.run import calibrate as run

    options = Options(max_tokens=max_tokens, n_blocks=n_blocks, hessians=hessians)
    summary = run(model, prompts, out, device=device, streamed=streamed, options=options)
    print(f"{out}: calibrated on {summary['n_tokens']} tokens of {summary['n_prompts']} prompts")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Bundled name, folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint; a stopped run goes on.")],
    format: Annotated[
        str, typer.Option(help="any-precision, int4-g128, int4-g64-asym, fp16, ...")
    ] = "any-precision",
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of `repro calibrate`: which errors matter more.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Replace what another source or format left there.")
    ] = False,
) -> None:
    """Encode the experts of a checkpoint, layer by layer."""
    from repro.formats import make_format
    from repro.models.loading import local_folder
    from repro.models.quantize import quantize as run

    made = make_format(format)
    importance = None
    if calibration is not None:
        from repro.calibration.attached import importance_of

        importance = importance_of(
            calibration,
            local_folder(model)[1],
            hessians=getattr(made, "encoder", None) == "gptq",
        )
    manifest = run(model, out, made, importance, force=force, progress=print, device=device)
    if calibration is not None:
        from repro.calibration.attached import attach

        print(f"stored with it: {', '.join(attach(calibration, out)) or 'nothing'}")
    print(f"{out}: readable at {', '.join(map(str, manifest.widths))} bits")


@app.command()
def measure(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment.")],
    profile: ProfileOption = "tiny",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    source: SourceOption = None,
    force: ForceOption = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records (default: data/records).")
    ] = None,
    save_traces: Annotated[
        bool, typer.Option("--save-traces", help="Write the routing traces to data/traces too.")
    ] = False,
) -> None:
    """Run one experiment and append its records."""
    from repro import experiments

    options = {"save_traces": True} if save_traces else {}
    records = experiments.run(
        experiment, profile, device=device, source=source, force=force, out=out, **options
    )
    print(f"{experiment}: {len(records)} records")


@app.command()
def reproduce(
    profile: ProfileOption = "tiny", source: SourceOption = None, force: ForceOption = False
) -> None:
    """Execute the notebooks in order; skip what has not changed."""
    from repro import pipeline

    raise typer.Exit(pipeline.reproduce(profile, force=force, source=source))


@app.command()
def refresh(
    names: Annotated[
        list[str] | None, typer.Argument(help="Notebooks, e.g. 01 (default: all).")
    ] = None,
) -> None:
    """Execute notebooks in place, so that their stored outputs are new."""
    from repro import pipeline

    raise typer.Exit(pipeline.refresh(names or []))


@app.command()
def figures(profile: ProfileOption = "tiny") -> None:
    """Draw every figure from the records, committed ones of other profiles included."""
    from repro import paths
    from repro.reporting import figures

    for path in figures.draw_all(profile):
        print(paths.relative(path))


@app.command()
def report(profile: ProfileOption = "tiny") -> None:
    """Write the report page from the records."""
    from repro import paths
    from repro.reporting import report

    print(paths.relative(report.write_report(profile)))


@app.command()
def verify(profile: ProfileOption = "tiny") -> None:
    """Check the claims against every set of records; non-zero when a required one fails."""
    from repro.reporting import verify

    raise typer.Exit(verify.verify(profile))


@app.command()
def status(profile: ProfileOption = "tiny") -> None:
    """Show what is done and what would run, without running it."""
    from repro import pipeline

    raise typer.Exit(pipeline.status(profile))


def main() -> None:
    """Entry point of the console script and of ``python -m repro``."""
    app(prog_name="repro")
