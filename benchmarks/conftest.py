"""What `pytest benchmarks` measures, with a progress bar, and where the results go."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import benchmarks.ours
import benchmarks.peers  # noqa: F401
from benchmarks import measure, results
from benchmarks.problems import MODELS, TOKENS, Problem, problems_of
from benchmarks.providers import PROVIDERS, Provider


def pytest_addoption(parser: pytest.Parser) -> None:
    """What to measure."""
    group = parser.getgroup("linear layers")
    group.addoption("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    group.addoption("--model", default="llama-2-7b", help=f"one of {', '.join(MODELS)}")
    group.addoption("--layers", default="o_proj,down_proj", help="o_proj and so on; 'all' for all")
    group.addoption("--bits", default="4,8", help="of the codes")
    group.addoption("--group-size", type=int, default=128, help="weights that share a scale; -1: a row")
    group.addoption("--tp", type=int, default=1, help="measure the layers of one of so many ranks")
    group.addoption("--tokens", default=",".join(map(str, TOKENS)), help="rows of x")
    group.addoption("--providers", default="", help="only these; a part of a name means all that have it")
    group.addoption("--seconds", type=float, default=1.0, help="about how long to time each case")
    group.addoption("--kind", default="linear", help="first part of the name of the results' file")
    group.addoption("--results", default=str(results.FOLDER), help="folder for the results")


class Run:
    """One run: what to measure, and what came of it."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.device: str = option("--device")
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            sees = "a GPU" if torch.cuda.is_available() else "no GPU"
            raise ValueError(
                f"--device is {self.device!r}, but must be cpu or cuda, and torch sees {sees} here"
            )
        self.seconds: float = option("--seconds")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"--seconds is {self.seconds}, but must be positive")
        self.tokens = [_positive("--tokens", text) for text in option("--tokens").split(",")]
        layers = [] if option("--layers") == "all" else option("--layers").split(",")
        self.problems: list[Problem] = []
        for bits in option("--bits").split(","):
            self.problems += problems_of(
                option("--model"), layers, _positive("--bits", bits), option("--group-size"), option("--tp")
            )
        names = [name for name in option("--providers").split(",") if name]
        exact = {p.name for p in PROVIDERS} & set(names)
        self.providers = [
            p
            for p in PROVIDERS
            if not names or p.name in exact or any(name in p.name for name in set(names) - exact)
        ]
        if not self.providers:
            raise ValueError(
                f"--providers {option('--providers')} matches none of {', '.join(p.name for p in PROVIDERS)}"
            )
        self.kind: str = option("--kind")
        self.path = results.new_file(Path(option("--results")), self.kind, self.device)
        self.records: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        for chosen in self.providers:
            reason = chosen.unavailable(self.device)
            if reason and not any(
                p.name == chosen.name and not p.unavailable(self.device) for p in self.providers
            ):
                self.left_out[chosen.name] = f"missing: {reason}"
        if not self.cases():
            reasons = [f"{name}, {reason}" for name, reason in self.left_out.items()]
            raise ValueError(
                f"nothing to measure: no provider that was asked for is here and has the codes of "
                f"--bits {option('--bits')} ({'; '.join(reasons) or 'none is missing'})"
            )

    def cases(self) -> list[tuple[Problem, Provider]]:
        """Every layer with every provider that can serve it; dense ones once a shape."""
        found, dense = [], set()
        for problem in self.problems:
            for chosen in self.providers:
                if chosen.unavailable(self.device):
                    continue
                if chosen.num_bits >= 16:
                    if (problem.shape, chosen.name) in dense:
                        continue
                    dense.add((problem.shape, chosen.name))
                elif chosen.num_bits != problem.scheme.num_bits:
                    continue
                found.append((problem, chosen))
        return found


def _positive(option: str, text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{option} has {text!r}, but takes positive numbers, separated by commas")
    return int(text)


_RUN = pytest.StashKey[Run]()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot be measured before anything runs."""
    try:
        config.stash[_RUN] = Run(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each layer, provider and number of tokens."""
    if "case" in metafunc.fixturenames:
        run = metafunc.config.stash[_RUN]
        cases = [
            pytest.param(
                (problem, chosen, tokens),
                id=f"{problem.name}-int{problem.scheme.num_bits}-{chosen.name}-M{tokens}".replace(" ", "_"),
            )
            for problem, chosen in run.cases()
            for tokens in run.tokens
        ]
        metafunc.parametrize("case", cases)


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    """The run that a test belongs to."""
    return request.config.stash[_RUN]


class Bar:
    """A progress bar in place of pytest's dots."""

    def __init__(self) -> None:
        self._bar: Any = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Know how many there are."""
        self._bar = tqdm(total=len(session.items), unit="case", smoothing=0.05)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show what is being measured."""
        self._bar.set_postfix_str(nodeid.rpartition("[")[2].rstrip("]")[:60])

    def pytest_runtest_logfinish(self) -> None:
        """One more is done."""
        self._bar.update()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Print nothing for a case that was measured."""
        return ("passed", "", "") if report.passed and report.when == "call" else None

    def pytest_sessionfinish(self) -> None:
        """Leave the terminal to the summary."""
        if self._bar is not None:
            self._bar.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Put the bar in place."""
    session.config.pluginmanager.register(Bar())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was measured; an interrupted run leaves what it has, and says so."""
    run = session.config.stash[_RUN]
    if not run.records:
        return
    ceilings = {
        "copy_bytes_per_second": measure.copy_bandwidth(run.device),
        "bf16_flops_per_second": measure.matrix_rate(run.device, torch.bfloat16),
        "fp32_flops_per_second": measure.matrix_rate(run.device, torch.float32),
    }
    notes = {chosen.name: chosen.note for chosen in run.providers if chosen.note}
    body = {"ceilings": ceilings, "records": run.records, "left_out": run.left_out, "notes": notes}
    body["interrupted"] = exitstatus == pytest.ExitCode.INTERRUPTED
    results.write(run.path, run.kind, run.device, body)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say where the results are and what is not in them."""
    run = config.stash[_RUN]
    if run.records:
        terminalreporter.write_line(f"{len(run.records)} cases measured: {run.path}")
    for name, reason in run.left_out.items():
        terminalreporter.write_line(f"  {name}: {reason}")
