"""`verl-mixed evaluate`: what it refuses, what it chooses, and comparisons of two evaluations."""

import json
import os
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from agent_loop.records.evaluation_records import write_records
from config.lookup import at
from config.schema import ConfigError
from tests.fakes.records import of_policy, record
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.cli import main, parser_for
from verl_mixed.commands.evaluate_targets import targets_of
from verl_mixed.commands.evaluate_weights import identity_of_model
from verl_mixed.launch.evaluation import Target
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.evaluations import Evaluation, validation_file
from verl_mixed.run.state import RunFolder


def targets(
    words: Sequence[str], environ: RunEnviron, overrides: Sequence[str] = ()
) -> list[Target]:
    arguments = parser_for(["evaluate", *words]).parse_args(["evaluate", *words])
    return targets_of(arguments, arguments.overrides, overrides, environ, lambda line: None)


def test_step_0_is_the_model_that_the_run_began_with(run: Path, run_environ: RunEnviron):
    (one,) = targets([str(run), "--step", "0", "--samples", "4"], run_environ)
    assert one.label == "step_0" and one.job.step == 0 and one.ks == (1, 4)
    assert one.plan.folder.path == Path("runs/trial/evaluations/step_0").absolute()
    assert at(one.plan.config, "actor_rollout_ref.model.path") == "someone/some-model"
    assert not one.plan.own_tool_server  # the run had one given
    assert not one.plan.folder.path.exists()  # nothing is written before it is started


def test_a_server_that_the_run_started_itself_is_started_again(run: Path, run_environ: RunEnviron):
    url = at(make_plan([], run_environ).config, "actor_rollout_ref.rollout.multi_turn.tool_config")
    (run / "tool_server.json").write_text(json.dumps({"url": url["server_url"], "pid": 1}))
    (one,) = targets([str(run), "--step", "0"], run_environ)
    assert one.plan.own_tool_server


def test_overrides_are_laid_over_the_config_of_the_run(run: Path, run_environ: RunEnviron):
    key = "actor_rollout_ref.rollout.val_kwargs.temperature"
    (one,) = targets([str(run), "--step", "0"], run_environ, [f"{key}=0.25"])
    assert at(one.plan.config, key) == 0.25
    with pytest.raises(ConfigError, match=r"structured=guided: rollout\.name=hf"):
        guided = ["+agent_loops={gateway: {function: a.py:f, structured: guided}}"]
        targets([str(run), "--step", "0"], run_environ, guided)
    with pytest.raises(ConfigError, match=r"unknown key .*temprature.*did you mean .*temperature"):
        targets([str(run), "--step", "0"], run_environ, [f"{key[:-11]}temprature=1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name what to evaluate: RUN or MODEL, or --base-url"),
        (("RUN", "--base-url", "http://x/v1"), "and not both"),
        (("RUN", "other"), "one RUN or MODEL at a time"),
        (("RUN", "--step", "7"), "no checkpoint of step=7 in .*: none is whole"),
        (("RUN",), "no checkpoint to export"),
        (("RUN", "--step", "0", "--pass-at", "8"), "pass@k needs k samples of a row, and there"),
        (("RUN", "--step", "0", "--source", "nq"), r"--source nq: .* no rows.*math \(12\), taco"),
        (("RUN", "--step", "0", "--limit", "2", "--sample", "2"), "give one of them"),
        (("RUN", "--step", "0", "--model", "m"), "--model is of --base-url"),
        (("RUN", "--step", "0", "2", "--label", "x"), "--label names one evaluation"),
        (("RUN", "--step", "0", "--label", "../x"), "--label '../x'"),
        (("nowhere",), "no nowhere: name runs/<experiment>"),
        (("runs/nope",), "no runs/nope: name runs/<experiment>"),
        (("someone/model", "--step", "3"), "only a run has steps, and someone/model is none"),
        ((".",), "neither a run nor a model"),
        (("--base-url", "ftp://x"), "want http://host:port/v1"),
        (("--base-url", "http://127.0.0.1:9/v1"), r"no answer from http://127.0.0.1:9/v1/models"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(
    words: Sequence[str], message: str, run: Path, run_environ: RunEnviron
):
    Path("runs").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=message):
        targets([str(run) if word == "RUN" else word for word in words], run_environ)


def test_a_config_error_is_exit_code_2(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(run), "no.such.key=1", "--step", "0"]) == 2
    assert "cannot evaluate, 1 problem:\n  - unknown key no.such.key" in capsys.readouterr().out


# --- weights --------------------------------------------------------------------------------------


def write_checkpoint(run: Path, step: int, weights: str, written_s: int) -> None:
    """A checkpoint that looks whole, written at a time in seconds since 1970."""
    folder = run / "checkpoints" / f"global_step_{step}"
    (folder / "actor" / "huggingface").mkdir(parents=True, exist_ok=True)
    for name, text in {
        "data.pt": "",
        "actor/fsdp_config.json": '{"world_size": 1}',
        "actor/model_world_size_1_rank_0.pt": weights,
        "actor/huggingface/config.json": "{}",
    }.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (written_s, written_s))


@pytest.mark.slow
def test_a_step_that_is_trained_again_is_exported_again_and_has_another_identity(
    run: Path, run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
):
    def export(of: RunFolder, step: str, output: Path) -> None:
        actor = of.path / "checkpoints" / f"global_step_{step}" / "actor"
        output.mkdir(parents=True)
        weights = (actor / "model_world_size_1_rank_0.pt").read_text()
        (output / "model.safetensors").write_text(weights)
        made.append(weights)

    made: list[str] = []
    monkeypatch.setattr("verl_mixed.commands.evaluate_weights.export", export)
    words, folder = [str(run), "--step", "4"], run.absolute() / "export" / "step_4-fp32"
    write_checkpoint(run, 4, "first", 1000)
    (first,) = targets(words, run_environ)
    (again,) = targets(words, run_environ)
    write_checkpoint(run, 4, "other", 2000)  # as long as the first, and older than its export
    (other,) = targets(words, run_environ)

    assert made == ["first", "other"]
    assert first.identity == again.identity != other.identity
    assert (folder / "model.safetensors").read_text() == "other"
    assert (folder.with_name("step_4-fp32.old1") / "model.safetensors").read_text() == "first"


def test_an_export_of_the_user_is_taken_if_it_is_newer_than_the_checkpoint(
    run: Path, run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
):
    made: list[Path] = []
    monkeypatch.setattr(
        "verl_mixed.commands.evaluate_weights.export",
        lambda of, step, output: (output.mkdir(), made.append(output)),
    )
    weights = run / "export" / "step_4-fp32" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("first")
    os.utime(weights, (1500, 1500))
    write_checkpoint(run, 4, "first", 1000)
    targets([str(run), "--step", "4"], run_environ)
    assert made == []
    (weights.parent.parent / "step_4-fp32.checkpoint.json").unlink()
    write_checkpoint(run, 4, "other", 2000)
    targets([str(run), "--step", "4"], run_environ)
    assert len(made) == 1


def test_a_model_that_is_overwritten_in_place_has_another_identity(tmp_path: Path):
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1000, 1000))
    before = identity_of_model(str(tmp_path))
    assert before.keys() == {"model", "file config.json", "file model.safetensors"}
    os.utime(tmp_path / "model.safetensors", (2000, 2000))
    assert identity_of_model(str(tmp_path)) != before
    assert identity_of_model("someone/model") == {"model": "someone/model"}


# --- servers --------------------------------------------------------------------------------------


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        names = self.path.strip("/").split("/")[0].split("+")
        body = json.dumps({"data": [{"id": name} for name in names]}).encode()
        code = {"locked": 401, "moved": 302, "lent": 307}.get(names[0], 200)
        self.send_response(code)
        if code in (302, 307):
            self.send_header("Location", "/elsewhere/models")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def models() -> Iterator[str]:
    """A server at whose address `/a+b` there are the models a and b."""
    server = HTTPServer(("127.0.0.1", 0), _Models)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_only_model_of_a_server_is_taken(models: str, run: Path, run_environ: RunEnviron):
    words = ["--base-url", f"{models}/mine", "--run", str(run)]
    (one,) = targets(words, run_environ)
    assert (one.job.model, one.job.base_url) == ("mine", f"{models}/mine")
    assert one.label == "mine" and one.job.step == 0
    assert one.identity == {"base_url": f"{models}/mine", "model": "mine"}
    assert at(one.plan.config, "actor_rollout_ref.rollout.name") == "openai"
    (one,) = targets([*words, "--tokenizer", "some/tokenizer"], run_environ)
    assert at(one.plan.config, "actor_rollout_ref.model.path") == "some/tokenizer"


def test_a_model_that_a_server_lacks_is_refused(models: str, run: Path, run_environ: RunEnviron):
    for words, message in (
        ([f"{models}/a+b"], "give --model, one of a, b"),
        ([f"{models}/a+b", "--model", "c"], r"--model c: .* has a, b"),
        ([f"{models}/moved"], r"HTTP 302, a redirect to /elsewhere/models: it is not followed"),
        ([f"{models}/lent", "--model", "elsewhere"], "HTTP 307, a redirect to"),
        ([f"{models}/locked"], "HTTP 401: is OPENAI_API_KEY the key"),
    ):
        with pytest.raises(ValueError, match=message):
            targets(["--base-url", *words, "--run", str(run)], run_environ)


# --- comparisons ----------------------------------------------------------------------------------


def test_two_validations_of_a_run_are_compared_row_by_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, out = tmp_path / "trial", tmp_path / "out.json"
    write_records(validation_file(run, 0), of_policy([0.0] * 30, 1, 0))
    write_records(validation_file(run, 8), of_policy([1.0] * 12 + [0.0] * 18, 1, 1, step=8))

    code = main(
        [
            *("evaluate", "--compare", f"{run}@0", f"{run}@8"),
            *("--json", str(out), "--csv", str(tmp_path / "out.csv")),
        ]
    )

    screen = capsys.readouterr().out
    assert code == 0
    assert "30 (12 changed)" in screen and "]: improved" in screen
    assert "nq: 12 rows solved more often, by 1.00 on average" in screen
    assert "unsolved -> solved  nq:0  What is 0?" in screen
    written = json.loads(out.read_text())
    assert written["differences"][0]["verdict"] == "improved" and len(written["changed"]) == 12
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 13


def test_a_comparison_starts_nothing_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_records(validation_file(tmp_path, 0), of_policy([0.5], 1, 0))
    write_records(validation_file(tmp_path, 8), of_policy([0.5], 1, 0, source="math"))
    assert main(["evaluate", "--compare", f"{tmp_path}@0", f"{tmp_path}@8"]) == 2
    assert "no judged row in common" in capsys.readouterr().err
    assert main(["evaluate", "x", "--compare", f"{tmp_path}@0", f"{tmp_path}@8"]) == 2
    assert "starts none: leave the others out" in capsys.readouterr().err


def test_results_are_shown_and_a_source_that_lost_too_much_makes_them_not_good(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    kept = of_policy([0.5] * 10, 1, 0)
    lost = [record("math", str(row), reward=0.0, lost=True) for row in range(10)]
    done = Evaluation(label="step_0", step=0, records=[*kept, *lost])
    monkeypatch.setattr("verl_mixed.launch.evaluation.evaluate", lambda *_, **__: [done])

    code = main(["evaluate", str(run), "--step", "0"])

    screen = capsys.readouterr().out
    assert code == 1
    assert "WARNING step_0: math lost 10 of 10 trajectories, more than" in screen
    assert "the first: search: no answer; correct it, then" in screen
    assert "nq lost" not in screen and "10 x 1" in screen
