"""Checkpoints as Hugging Face folders."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from agent_loop.records.run_folder import write_lines
from tests.verl_mixed.conftest import REPO_ROOT
from tests.verl_mixed.sharded_actor import adapted_model, tiny_model
from verl_mixed.cli import main
from verl_mixed.commands.export import chosen_step, export
from verl_mixed.run.checkpoints import DType, missing_part
from verl_mixed.run.compose import save_config
from verl_mixed.run.state import RunFolder

MESHES = ("1", "3", "2x2")
LORA = "3+lora"
DTYPES: tuple[DType, ...] = ("fp32", "bf16")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole checkpoint for each mesh, saved by processes of their own."""
    folder = tmp_path_factory.mktemp("sharded")
    subprocess.run(
        [sys.executable, "-m", "tests.verl_mixed.sharded_actor", str(folder), *MESHES, LORA],
        cwd=REPO_ROOT,
        check=True,
    )
    return {mesh: folder / mesh for mesh in (*MESHES, LORA)}


@pytest.fixture
def run(tmp_path: Path, checkpoints: dict[str, Path]) -> RunFolder:
    """A run with whole checkpoints of steps 5 and 10."""
    folder = tmp_path / "runs" / "trial"
    for step in (5, 10):
        shutil.copytree(checkpoints["3"], folder / "checkpoints" / f"global_step_{step}")
    return RunFolder(folder)


def run_with(checkpoint: Path, tmp_path: Path) -> RunFolder:
    folder = tmp_path / "runs" / "trial"
    shutil.copytree(checkpoint, folder / "checkpoints" / "global_step_1")
    return RunFolder(folder)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_fp32_is_the_trainers_weights_bit_for_bit_and_a_tied_one_is_kept_once(
    mesh: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = export(run_with(checkpoints[mesh], tmp_path))

    weights = load_file(made / "model.safetensors")
    whole = load_file(checkpoints[mesh] / "whole.safetensors")
    assert whole.keys() - weights.keys() == {"lm_head.weight"}
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    parameters = sum(weight.numel() for weight in weights.values())
    assert f"wrote {made}: {parameters:,} parameters, " in capsys.readouterr().out


@pytest.mark.slow
def test_bf16_is_fp32_rounded_once(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = export(run_with(checkpoints["3"], tmp_path), dtype="bf16")

    weights = load_file(made / "model.safetensors")
    whole = load_file(checkpoints["3"] / "whole.safetensors")
    assert all(torch.equal(weights[name], whole[name].bfloat16()) for name in weights)
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_loads_it_and_says_the_same(run: RunFolder) -> None:
    made = export(run)

    model = AutoModelForCausalLM.from_pretrained(made)

    ids = torch.arange(30).reshape(2, 15)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(ids).logits, tiny_model().eval()(ids).logits)
    assert GenerationConfig.from_pretrained(made).eos_token_id == 5
    assert (made / "tokenizer.json").read_text() == "{}"


@pytest.fixture
def lora_run(checkpoints: dict[str, Path], tmp_path: Path) -> RunFolder:
    """A run with LoRA, and its base model in `base`."""
    run = run_with(checkpoints[LORA], tmp_path)
    tiny_model().save_pretrained(tmp_path / "base")
    base = {"actor_rollout_ref": {"model": {"path": str(tmp_path / "base")}}}
    save_config(base, run.config)
    return run


IDS = torch.arange(30).reshape(2, 15)


def test_a_merged_export_and_an_adapter_on_its_base_say_what_the_trained_model_says(
    lora_run: RunFolder, tmp_path: Path
) -> None:
    trained = adapted_model().eval()(IDS).logits

    made, adapter = export(lora_run), export(lora_run, adapter=True)

    merged = AutoModelForCausalLM.from_pretrained(made)
    on_base = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(adapter)
    )
    assert (made.name, adapter.name) == ("step_1-fp32", "step_1-adapter-fp32")
    assert not torch.allclose(tiny_model().eval()(IDS).logits, trained, atol=1e-3)
    torch.testing.assert_close(merged(IDS).logits, trained, rtol=0, atol=1e-6)
    assert torch.equal(on_base(IDS).logits, trained)
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(adapter)(IDS).logits, trained)
    assert {file.name for file in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_merged_model_is_rounded_after_the_merge(lora_run: RunFolder) -> None:
    whole, half = (load_file(export(lora_run, dtype=t) / "model.safetensors") for t in DTYPES)

    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)
    rounded = load_file(export(lora_run, dtype="bf16", adapter=True) / "adapter_model.safetensors")
    assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}


def test_of_a_checkpoint_with_the_adapter_alone_only_the_adapter_is_exported(
    lora_run: RunFolder,
) -> None:
    whole = export(lora_run, adapter=True) / "adapter_model.safetensors"
    actor = lora_run.path / "checkpoints" / "global_step_1" / "actor"
    for path in actor.glob("model_*.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({name: state[name] for name in state if ".lora_" in name}, path)

    with pytest.raises(ValueError, match=r"without the \d+ weights of its base.*--adapter"):
        export(lora_run, output=lora_run.path / "merged")
    again = export(lora_run, output=lora_run.path / "alone", adapter=True)
    assert (again / whole.name).read_bytes() == whole.read_bytes()


def test_an_adapter_that_is_not_there_or_does_not_fit_is_refused(
    run: RunFolder, lora_run: RunFolder
) -> None:
    assert run.path == lora_run.path  # step 1 has an adapter, step 10 has none
    with pytest.raises(ValueError, match="trained without LoRA"):
        export(run, "10", adapter=True)
    facts = lora_run.path / "checkpoints" / "global_step_1" / "actor" / "lora_train_meta.json"
    facts.write_text(json.dumps({"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM"}))
    with pytest.raises(ValueError, match=r"do not fit its model: .*size mismatch"):
        export(lora_run, "1")


def test_without_a_step_the_newest_whole_checkpoint_is_taken(run: RunFolder) -> None:
    assert chosen_step(run, "latest") == 10
    (run.path / "checkpoints" / "global_step_10" / "data.pt").unlink()
    assert chosen_step(run, "latest") == 5


def test_the_best_is_that_of_the_highest_mean_validation_over_the_sources(run: RunFolder) -> None:
    rewards = {5: (0.5, 0.9), 8: (1.0, 1.0), 10: (0.6, 0.6)}
    write_lines(
        run.metrics,
        [
            {
                "step": step,
                "time": 0.0,
                "metrics": {
                    "mixed/math/val/reward/mean": math,
                    "mixed/nq/val/reward/mean": nq,
                    "mixed/math/reward/mean": 0.0,
                    "mixed/nq/reward/mean": 0.0,
                },
            }
            for step, (math, nq) in rewards.items()
        ],
    )

    assert chosen_step(run, "best") == 5  # of step 8 there is no checkpoint


def test_the_best_of_a_run_without_validation_is_refused(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="no step has both a whole checkpoint and a validation"):
        chosen_step(run, "best")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("data.pt", "interrupted"),
        ("actor", "max_actor_ckpt_to_keep"),
        ("actor/model_world_size_3_rank_1.pt", "actor/ has no model_world_size_3_rank_1.pt"),
        ("actor/fsdp_config.json", "only model_engine=dp is exported"),
        ("actor/huggingface/config.json", "no config.json"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_and_whole_ones_are_named(
    gone: str, said: str, run: RunFolder
) -> None:
    lost = run.path / "checkpoints" / "global_step_10" / gone
    if lost.is_dir():
        shutil.rmtree(lost)
    else:
        lost.unlink()

    assert said in (missing_part(run.path / "checkpoints" / "global_step_10") or "")
    with pytest.raises(ValueError, match=f"not whole: .*{said}.*whole checkpoints are 5"):
        export(run, "10")
    assert not (run.path / "export").exists()


def test_a_checkpoint_of_no_ranks_is_not_whole(run: RunFolder) -> None:
    checkpoint = run.path / "checkpoints" / "global_step_10"
    (checkpoint / "actor" / "fsdp_config.json").write_text('{"world_size": 0}')

    assert "number of ranks" in (missing_part(checkpoint) or "")
    assert chosen_step(run, "latest") == 5


def test_a_step_or_run_that_is_not_there_is_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no checkpoint of step=7 .*: whole checkpoints are 5, 10"
    ):
        chosen_step(run, "7")
    with pytest.raises(ValueError, match="not a run's folder"):
        chosen_step(RunFolder(tmp_path / "never"), "latest")


def test_an_output_that_is_there_is_left_alone(run: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()

    with pytest.raises(ValueError, match="is there already"):
        export(run, output=output)

    assert list(output.iterdir()) == []


def test_of_a_torn_file_nothing_is_left(run: RunFolder, tmp_path: Path) -> None:
    torn = run.path / "checkpoints" / "global_step_10" / "actor" / "model_world_size_3_rank_2.pt"
    torn.write_bytes(torn.read_bytes()[:2000])
    output = tmp_path / "out" / "model"

    with pytest.raises(OSError, match=r"cannot read .*rank_2\.pt: damaged, or"):
        export(run, output=output)

    assert list(output.parent.iterdir()) == []


def test_what_a_killed_export_left_is_taken_over(run: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "model"
    left = tmp_path / ".model.draft"
    left.mkdir()
    (left / "half.safetensors").touch()

    export(run, output=output)

    assert not left.exists()
    assert not (output / "half.safetensors").exists()


def test_code_in_a_checkpoint_is_not_run(run: RunFolder, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    path = run.path / "checkpoints" / "global_step_10" / "actor" / "model_world_size_3_rank_0.pt"
    torch.save({"lm_head.weight": Trap()}, path)

    with pytest.raises(
        OSError, match=r"not a state of weights \(Unsupported global: [^\n.]*\); export"
    ):
        export(run)

    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (b"", "mmap can only"),
        (b"junk", "mmap can only"),
        ([torch.ones(2)], "it holds a list"),
        ({"lm_head.weight": 3}, "'lm_head.weight' is not a tensor"),
    ],
    ids=["empty", "junk", "list", "number"],
)
def test_a_file_without_weights_is_named_with_the_reason_after(
    held: object, said: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / "checkpoints" / "global_step_10" / "actor" / "model_world_size_3_rank_0.pt"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held, path)

    assert main(["export", str(run.path)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot read {path}: damaged, or not a state of weights ({said}")
    assert line.endswith("; export another step")


def test_ranks_that_do_not_fit_together_are_refused(run: RunFolder) -> None:
    checkpoint = run.path / "checkpoints" / "global_step_10"
    unsharded = load_file(checkpoint / "whole.safetensors")
    torch.save(unsharded, checkpoint / "actor" / "model_world_size_3_rank_1.pt")

    with pytest.raises(ValueError, match="its parts on the ranks do not fit together"):
        export(run)


def test_weights_of_another_model_are_refused_by_name(run: RunFolder) -> None:
    path = run.path / "checkpoints" / "global_step_10" / "actor" / "huggingface" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 12}))

    with pytest.raises(ValueError, match=r"down_proj\.weight: \(8, 10\), the model has \(8, 12\)"):
        export(run)


def test_a_config_that_transformers_cannot_make_a_model_of_is_refused_in_a_line(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / "checkpoints" / "global_step_10" / "actor" / "huggingface" / "config.json"
    config = json.loads(path.read_text())
    changes = ({"architectures": ["Nobodys"]}, {"model_type": "none"}, {"layer_types": ["x"]})
    for text in ("{", "[]", *(json.dumps(config | change) for change in changes)):
        path.write_text(text)
        assert main(["export", str(run.path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: cannot export {path.parent}: transformers makes no model")


def test_tied_weights_that_differ_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    run = run_with(checkpoints["1"], tmp_path)
    path = run.path / "checkpoints" / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt"
    whole = load_file(checkpoints["1"] / "whole.safetensors")
    torch.save(whole | {"lm_head.weight": whole["lm_head.weight"] + 1}, path)

    with pytest.raises(ValueError, match="are tied, and differ"):
        export(run)


def test_the_command_says_what_it_wrote(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.path), "--dtype", "bf16"]) == 0

    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 10 is the newest whole checkpoint"
    assert said[-1].startswith(f"wrote {run.path}/export/step_10-bf16: ")


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (["--step", "7"], 2, "whole checkpoints are 5, 10"),
        (["--output", "/proc/never/model"], 1, "or name another --output"),
    ],
)
def test_the_command_ends_with_2_for_what_is_not_there_and_1_for_what_cannot_be_written(
    words: list[str], code: int, remedy: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.path), *words]) == code

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(remedy)


def test_a_full_disk_is_said_and_nothing_is_left(run: RunFolder, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # less than the weights
    try:
        with pytest.raises(OSError, match=r"cannot write .*/out/model: .*name another --output"):
            export(run, output=tmp_path / "out" / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list((tmp_path / "out").iterdir()) == []
