"""The demo model: what its tokenizer, teacher and cache promise."""

import json
import random

import pytest

from agent_loop.turns.tags import all_tags
from config.schema import ToolConfig
from samplers.rows.sources.demo import make_demo, write_demo
from tool_server.search import PassageIndex
from verl_mixed.demo.model import WarmStartError, prepare_demo
from verl_mixed.demo.recipe import Recipe
from verl_mixed.demo.teacher import Teacher
from verl_mixed.demo.warm_start import Codec, encode_trace, train_tokenizer

CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
QUICK = Recipe(traces=60, min_steps=2, max_steps=2, floor=0.0, probe_prompts=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Who wrote Iron Bridge?", "12*34+5"], all_tags(CONFIG), 300)


def test_each_tag_is_one_token_that_survives_skipping_special_tokens(tokenizer):
    for tag in all_tags(CONFIG):
        (token,) = tokenizer.encode(tag, add_special_tokens=False)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag


@pytest.mark.parametrize("text", ["<code>15*21</code>", "a  b\n é 漢 <answer>x</answer>", "007"])
def test_text_comes_back_as_it_was_and_digits_stand_alone(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert not any(len(t) > 1 and any(c.isdigit() for c in t) for t in map(tokenizer.decode, ids))


def test_the_teacher_is_careless_about_as_often_as_asked_and_only_the_model_is_imitated(
    tokenizer, tmp_path
):
    data = make_demo(0)
    write_demo(data, tmp_path)
    index = PassageIndex.build(tmp_path / "corpus.jsonl")
    rng = random.Random(0)
    for source in ("math", "nq", "taco"):
        right = 0
        for careful, least, most in ((1.0, 200, 200), (0.0, 0, 40)):
            recipe = Recipe(careful={source: careful})
            teacher = Teacher(data, CONFIG, index, recipe)
            traces = [teacher.trace(source, task, rng) for task in data.train[source][:200]]
            truths = [
                t.record["answer"][0] if source == "nq" else t.work if source == "taco" else None
                for t in data.train[source][:200]
            ]
            right = sum(
                truth is None or f"<answer>{truth}</answer>" == trace.parts[-1][1]
                for trace, truth in zip(traces, truths, strict=True)
            )
            if source != "math":
                assert least <= right <= most
        ids, weights = encode_trace(traces[0], Codec(tokenizer), 0.3)
        assert len(ids) == len(weights)
        assert set(weights) == {0.3, 1.0}


def test_a_demo_is_made_once_and_then_found(tmp_path):
    said: list[str] = []
    folder = tmp_path / "demo"
    prepare_demo(folder, 0, recipe=QUICK, progress=said.append)
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    prepare_demo(tmp_path / "demo", 0, recipe=QUICK, progress=said.append)
    assert "found" in said[-1]
    assert made == {path: path.stat().st_mtime_ns for path in made}
    for source in ("math", "nq", "taco"):
        assert {folder / f"{source}_train.parquet", folder / f"{source}_val.parquet"} <= made.keys()
    assert {folder / "corpus.jsonl", folder / "model" / "config.json"} <= made.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match=r"demo: it is there and holds no demo\.json"):
        prepare_demo(tmp_path / "demo", 0, recipe=QUICK, progress=lambda line: None)
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "years"


@pytest.mark.slow
@pytest.mark.parametrize("note", ["{", "[]"])
def test_a_demo_with_a_broken_note_is_made_again(note, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.json").write_text(note)
    prepare_demo(tmp_path / "demo", 0, recipe=QUICK, progress=lambda line: None)
    assert json.loads((tmp_path / "demo" / "demo.json").read_text())["probe"]


def test_a_warm_start_below_its_floor_fails_by_name_and_leaves_nothing(tmp_path):
    hopeless = Recipe(traces=60, min_steps=2, max_steps=2, floor=0.9, probe_prompts=1)
    with pytest.raises(WarmStartError, match=r"warm start failed.*floor=0\.9"):
        prepare_demo(tmp_path / "demo", 0, recipe=hopeless, progress=lambda line: None)
    assert list(tmp_path.iterdir()) == []
